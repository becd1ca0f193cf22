"""The CPU executor: attends tokens where they lie, in either tier, and decodes as it reads; nothing
is gathered.

On a CPU "device" and "host" are the same memory, so that nothing has to move; the store notes what
was attended, and counts later what a device would have been brought. `kvbench.kernels.attend` is
the compiled half. Rows that are held in several ways are parts of one attention, a call of a kernel
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.kernels import attend as kernels
from kvbench.kernels.library import why_missing
from kvbench.memory.codecs import Codecs
from kvbench.memory.codecs.codec import Codec, Native, name_of
from kvbench.memory.codecs.rotated import turned
from kvbench.memory.device import DeviceTier, Span, of_kv_heads
from kvbench.memory.host import HostTier
from kvbench.memory.kinds import KV, NATIVE, TIERS
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

READABLE = torch.float32, torch.bfloat16
WORTH_A_THREAD = 2**18  # bytes of keys and values; fewer are read before another thread has begun

Rotations = tuple[torch.Tensor | None, torch.Tensor | None]


class Part(NamedTuple):
    """What is attended by one call.

    Attributes
    ----------
    pieces
        that each list is cut into; not asked of a part that is all.
    rows
        a structure of `kvbench.kernels.attend`, or another that attends.
    alive
        whose memory `rows` has addresses of.
    rotations
        of its keys and of its values, see `Codec.rotation`.
    """

    pieces: int
    rows: Any
    alive: Any
    rotations: Rotations = (None, None)


def unfit(shape: Shape, kv: KV = NATIVE) -> str | None:
    """Why this executor cannot run a generation of this shape, or None."""
    if shape.device.type != "cpu":
        return f"the device is {shape.device.type}"
    if shape.dtype not in READABLE:
        return f"reads float32 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    if (reason := why_missing()) is not None:
        return reason
    for tier in TIERS:
        codecs = Codecs.of(kv, tier, shape.head_dim, shape.dtype, shape.latent_dim).in_place
        numbers = (_format(codec, side) for side, codec in enumerate(codecs))
        if any(number is None for number in numbers):
            return f"no kernel reads kv={kv} in place"
    return None


def attend(
    query: torch.Tensor,
    store: LayerStore,
    selection: Selection | None,
    scaling: float,
    probabilities: bool = False,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kvbench.attention.executor.Executor`."""
    if selection is not None:
        out, weights = _attend_lists(query, scaling, softcap, store, selection, probabilities)
    else:
        if store.home == "host":
            store.resident()  # refuses: nothing is resident to attend
        columns = store.device.longest if probabilities else 0
        stretches = store.worked_out(_stretches)
        out, weights = _attend_resident(query, scaling, softcap, stretches, columns)
    return (out[..., : store.latent_dim] if store.latent_dim else out), weights


# -- how rows are held -----------------------------------------------------------------------------


def address(tensor: torch.Tensor | None) -> int:
    """Of its numbers; 0 of none."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "a kernel finds a row by its number alone"
    return tensor.data_ptr()


def in_place(
    key: torch.Tensor | None, value: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows of keys and of values as kernels read them: of values within their keys the keys."""
    return key, (value if value is None or value.shape[-1] else key)


def _format(codec: Codec, side: int) -> int | None:
    """The number of the format that a codec's rows of keys, or of values (side 1), have."""
    name = codec.row.name if codec.row else name_of(codec.dtype)
    is_held = codec.row is not None or isinstance(codec, Native)
    return kernels.format_number(name, side == 1) if is_held else None


@cache
def kinds_of(codecs: Codecs) -> kernels.Kinds:
    """How keys and values are held."""
    kinds = []
    for side, codec in enumerate(codecs.in_place):
        codes = 0 if codec.row is None else codec.head_dim * codec.row.bits // 8
        table = 0 if codec.row is None else codec.row.table
        size = codec.width * codec.stored.itemsize
        kinds.append(kernels.Kind(_format(codec, side), size, codes, table))
    return kernels.Kinds(*kinds, 2 * codecs.key.head_dim * codecs.key.dtype.itemsize)


def _rotations(codecs: Codecs) -> Rotations:
    key, value = codecs.in_place
    return key.rotation, value.rotation


# -- all slots -------------------------------------------------------------------------------------


def _stretches(store: LayerStore) -> list[Part]:
    return list(map(_stretch, store.device.spans()))


def _stretch(span: Span) -> Part:
    """Slots that are attended, and where they begin in the pool and in the logits, [L] int64 each,
    in one way held.
    """
    begin = _numbers(span.begin)
    used = _numbers(span.end)  # which grows in place, as tokens come
    first = _numbers(span.first)
    if begin.any():
        used, first = used - begin, first + begin
    return resident_part(used, first, begin, (*span.pool, span.parameters), span.codecs)


def resident_part(
    used: torch.Tensor,
    first: torch.Tensor,
    column: torch.Tensor,
    pool: Sequence[torch.Tensor | None],
    codecs: Codecs,
) -> Part:
    """Slots of a pool, see `kernels.ResidentRows`."""
    where = used, first, column, *in_place(*pool[:2]), *pool[2:]
    rows = kernels.ResidentRows(*map(address, where), kinds_of(codecs))
    pieces = kernels.pieces_of(int(used.max()), kernels.DENSE_PIECE)
    return Part(pieces, rows, where, _rotations(codecs))


def _attend_resident(
    query: torch.Tensor,
    scaling: float,
    softcap: float | None,
    parts: Sequence[Part],
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output as the query and probabilities [B, Hq, columns], of the most used slots or 0, for all
    that are used.
    """
    lists = parts[0].alive[0].numel()
    if len(parts) > 1:
        most = (int(part.alive[0].max()) for part in parts)
        pieces = (kernels.pieces_of(count, kernels.DENSE_PIECE) for count in most)
        parts = [part._replace(pieces=count) for part, count in zip(parts, pieces, strict=True)]
    result = run(query, scaling, lists, parts, columns, softcap)
    return result.out, result.probabilities


# -- lists of tokens -------------------------------------------------------------------------------


class Held(NamedTuple):
    """Where those tokens are that are held in one way.

    Attributes
    ----------
    codecs
        of keys and of values.
    rows
        as `kernels.Lists` has them, without lists; both tiers know all tokens, attended
        here or not.
    alive
        see `Part`.
    """

    codecs: Codecs
    rows: kernels.Lists
    alive: Any

    @property
    def is_native(self) -> bool:
        """Both keys and values are held as they are."""
        return all(isinstance(codec, Native) for codec in self.codecs)


def _attend_lists(
    query: torch.Tensor,
    scaling: float,
    softcap: float | None,
    store: LayerStore,
    selection: Selection,
    probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output as the query and probabilities [B, Hq, M (+ E)] of lists of tokens.

    Raises
    ------
    LookupError
        as `LayerStore.locate`.
    """
    tiers, heads = store.worked_out(_tiers), store.kv_heads
    replaces_all = not (store.rebuilds_keys and len(tiers) == 1 and tiers[0].is_native)
    selection = store.with_stored_keys(selection) if replaces_all else selection
    parts = tiers, selection, heads, replaces_all, probabilities
    attended = _attend_parts(query, scaling, softcap, *parts)
    if attended.lost:
        store.locate(of_kv_heads(selection.index, heads))  # raises, and names the token
        raise AssertionError("a token that the store locates was not found")
    store.attended(selection.index)
    return attended.out, attended.probabilities


def _attend_parts(
    query: torch.Tensor,
    scaling: float,
    softcap: float | None,
    tiers: Sequence[Held],
    selection: Selection,
    heads: int,
    replaces_all: bool,
    probabilities: bool,
) -> Result:
    """As `_attend_lists`, for `heads` KV heads, and how many pieces named a token that is nowhere.

    Parameters
    ----------
    replaces_all
        keys of the selection replace those of all tokens; else of the host's alone.
    """
    index, extra = selection.index.contiguous(), selection.extra
    batch, lists = len(index), max(index.shape[1], heads)
    bias, rebuilt = bias_of(selection, batch, lists), rebuilt_keys(selection, query.dtype)
    parts = [lists_part(index, bias, tier, rebuilt, replaces_all) for tier in tiers]
    extras = 0 if extra is None else extra.key.shape[2]
    # they come with rows that are held as they are, or by themselves
    if extra is not None and extras:
        beside = Beside.of(extra, query.dtype)
        if tiers[-1].is_native:
            parts[-1] = beside.with_part(parts[-1], index.shape[2])
        else:
            parts.append(beside.alone(index, bias, heads))
    columns = index.shape[2] + extras if probabilities else 0
    return run(query, scaling, batch * lists, parts, columns, softcap)


def rebuilt_keys(selection: Selection, dtype: torch.dtype) -> torch.Tensor | None:
    """Keys of a selection as kernels read them."""
    keys = selection.keys
    return None if keys is None else keys.to(dtype).contiguous()


def lists_part(
    index: torch.Tensor,
    bias: torch.Tensor | None,
    tier: Held,
    rebuilt: torch.Tensor | None,
    replaces_all: bool,
) -> Part:
    """The tokens that lists [B, Hs, M] name and a tier holds, with keys that replace theirs."""
    rows = kernels.Lists.from_buffer_copy(tier.rows)
    rows.index = index.data_ptr()
    rows.batch, rows.count = len(index), index.shape[2]
    rows.lists = index.shape[1]
    if bias is not None:
        rows.bias, rows.bias_columns = bias.data_ptr(), bias.shape[2]
    codecs = tier.codecs
    rotations = _rotations(codecs)
    if rebuilt is not None:
        rows.rebuilt, rows.rebuilt_count = rebuilt.data_ptr(), rebuilt.shape[2]
        rows.rebuilt_near = replaces_all
        key = Native(rebuilt.shape[3], rebuilt.dtype)
        kinds = kinds_of(Codecs(key, codecs.in_place.value))
        rows.kinds, rotations = kinds, (None, rotations[1])
    pieces = kernels.pieces_of(index.shape[2], kernels.LIST_PIECE)
    return Part(pieces, rows, (index, bias, tier.alive, rebuilt), rotations)


class Beside(NamedTuple):
    """Extra entries [B, Hkv, E, D] beside lists [B, Hs, M]."""

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, extra: Extra, dtype: torch.dtype) -> Beside:
        """Those of a selection, as kernels read them: values as wide as keys."""
        key, value = extra.key.to(dtype), extra.value.to(dtype)
        if value.shape[3] < key.shape[3]:
            value = pad(value, (0, key.shape[3] - value.shape[3]))
        return cls(key.contiguous(), value.contiguous())

    def with_part(self, part: Part, column: int) -> Part:
        """A part with lists of rows that are held as they are, and these, a piece more."""
        rows = part.rows
        rows.extra_keys, rows.extra_values = address(self.key), address(self.value)
        rows.extra_count, rows.extra_column = self.key.shape[2], column
        return part._replace(pieces=part.pieces + 1, alive=(part.alive, self))

    def alone(self, index: torch.Tensor, bias: torch.Tensor | None, heads: int) -> Part:
        """A part of these alone, of `heads` KV heads."""
        zeros = torch.zeros(len(index) * heads, dtype=torch.int64)
        codecs = Codecs.native(self.key.shape[3], self.key.dtype)
        held = held_near(codecs, (None, None, None), None, zeros, zeros, zeros, zeros)
        part = lists_part(index[..., :0].contiguous(), bias, held, None, True)
        return self.with_part(part, index.shape[2])


def bias_of(selection: Selection, batch: int, lists: int) -> torch.Tensor | None:
    """[L, R, M (+ E)], what is added to the logits of lists, `lists` a row of the batch; None:
    nothing.
    """
    weight, extra = selection.log_weight, selection.extra
    if weight is None and (extra is None or not extra.log_weight.any()):
        return None
    if extra is not None:
        if weight is None:
            weight = torch.zeros(*extra.log_weight.shape[:2], selection.index.shape[2])
        weight = torch.cat([weight.float(), extra.log_weight.float()], dim=2)
    assert weight is not None
    return weight.float().contiguous().view(batch * lists, -1, weight.shape[2])


def _tiers(store: LayerStore) -> list[Held]:
    """Tokens of a store: of both tiers together where these hold them alike or the device has none,
    else apart.
    """
    device, host = store.device, store.host
    spans = device.spans()
    if host is None:
        return [_held(span.codecs, device, span, None, False) for span in spans]
    if spans[0].codecs == host.codecs or not device.total:
        return [_held(host.codecs, device, spans[0], host, True)]
    passed = spans[0]._replace(end=torch.zeros_like(device.used))
    return [
        _held(host.codecs, device, passed, host, True),
        *(_held(span.codecs, device, span, host, False) for span in spans),
    ]


def _held(
    codecs: Codecs, device: DeviceTier, span: Span, host: HostTier | None, on_host: bool
) -> Held:
    """Both tiers, of which a span of the device's slots is attended, and the host's tokens where
    `on_host`.
    """
    pool = *span.pool, span.parameters
    held = held_near(codecs, pool, device.ids, span.first, device.used, span.begin, span.end)
    if host is None:
        return held
    far = *in_place(host.key, host.value), host.slot_of, host.present
    held.rows.far = kernels.FarRows(*map(address, far), host.capacity, on_host)
    return held._replace(alive=(held.alive, far))


def held_near(
    codecs: Codecs,
    pool: Sequence[torch.Tensor | None],
    ids: torch.Tensor | None,
    *where: torch.Tensor,
) -> Held:
    """Slots of a pool, see `kernels.NearRows`.

    Parameters
    ----------
    pool
        keys, values and parameters.
    ids
        [B, Hkv, slots].
    where
        first, used, begin and end, [B, Hkv] each.
    """
    counts = [_numbers(part) for part in where]
    addresses = map(address, (*in_place(*pool[:2]), *pool[2:], ids, *counts))
    near = kernels.NearRows(*addresses, len(counts[0]), 0 if ids is None else ids.shape[-1])
    rows = kernels.Lists(near=near, kinds=kinds_of(codecs))
    return Held(codecs, rows, (counts, pool, ids))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """[B, Hkv] as [L], in place."""
    return tensor.reshape(-1)


# -- the work --------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A layer's attention.

    Attributes
    ----------
    out
        as the query.
    probabilities
        [B, Hq, columns], where logits were kept.
    lost
        what the kernels return, added up.
    """

    out: torch.Tensor
    probabilities: torch.Tensor | None
    lost: int


def run(
    query: torch.Tensor,
    scaling: float,
    lists: int,
    parts: Sequence[Part],
    columns: int,
    softcap: float | None = None,
) -> Result:
    """A layer's attention, one part after the other, each in pieces spread over threads.

    Parameters
    ----------
    query
        [B, Hq, 1, D].
    lists
        L, of which each has as many rows of the query.
    columns
        of the logits to keep; 0: none.
    softcap
        see `kvbench.method.capped`.
    """
    query = query.contiguous()
    batch, heads = query.shape[:2]
    logits = None
    if columns:
        logits = torch.full((lists, batch * heads // lists, columns), -torch.inf)
    request_of = partial(_request, scaling, softcap or 0, lists, logits)
    if len(parts) == 1:
        out, lost = _run_alone(query, request_of, parts[0])
    else:
        out, lost = _run_joined(query, request_of, lists, parts)
    probabilities = None if logits is None else logits.view(batch, heads, -1)
    return Result(out, probabilities, lost)


RequestOf = Callable[[torch.Tensor], kernels.Request]


def _run_alone(query: torch.Tensor, request_of: RequestOf, part: Part) -> tuple[torch.Tensor, int]:
    """The output and what was lost, of a part that is all."""
    part_query = _met(query, part.rotations)
    request, out = request_of(part_query), torch.empty_like(part_query)
    request.out = out.data_ptr()
    lost = part.rows.attend(request)
    if part.rotations[1] is not None:
        out = turned(out, part.rotations[1].T)
    return out if part_query is query else out.to(query.dtype), lost


def _run_joined(
    query: torch.Tensor, request_of: RequestOf, lists: int, parts: Sequence[Part]
) -> tuple[torch.Tensor, int]:
    """The same of several parts."""
    before = lost = 0
    head_dim, rows = query.shape[3], query.shape[0] * query.shape[1] // lists
    results = torch.empty(lists, sum(part.pieces for part in parts), rows, head_dim + 2)
    for part in parts:
        part_query = _met(query, part.rotations)
        request = request_of(part_query)
        request.results, request.pieces = results.data_ptr(), results.shape[1]
        request.before = before
        lost += part.rows.attend(request)
        if part.rotations[1] is not None:
            sums = results[:, before : before + part.pieces, :, :head_dim]
            sums.copy_(turned(sums, part.rotations[1].T))
        before += part.pieces
    request, out = request_of(query), torch.empty_like(query)
    request.results, request.pieces = results.data_ptr(), results.shape[1]
    request.out = out.data_ptr()
    request.join()
    return out, lost


def _request(
    scaling: float, softcap: float, lists: int, logits: torch.Tensor | None, query: torch.Tensor
) -> kernels.Request:
    """What parts have in common, of contiguous queries [B, Hq, 1, D]."""
    request = kernels.Request(
        torch.get_num_threads(),
        WORTH_A_THREAD,
        query.data_ptr(),
        lists,
        query.shape[0] * query.shape[1] // lists,
        query.shape[3],
        query.dtype == torch.bfloat16,
        scaling,
        softcap,
    )
    if logits is not None:
        request.logits, request.columns = logits.data_ptr(), logits.shape[2]
    return request


def _met(query: torch.Tensor, rotations: Rotations) -> torch.Tensor:
    """The query as it meets a part; in float32 where rows of it are turned, so that nothing is
    rounded between.
    """
    key, value = rotations
    if key is None and value is None:
        return query
    return query.float() if key is None else turned(query, key)
