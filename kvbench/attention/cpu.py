"""The CPU executor: attends tokens where they lie, in either tier, and decodes as it reads; nothing
is gathered.

On a CPU "device" and "host" are the same memory, so that nothing has to move; the store notes what
was attended, and counts later what a device would have been brought. `kvbench.kernels.attend` is
the compiled half. Rows that are held in several ways are parts of one attention, a call of a kernel
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.kernels import attend as kernels
from kvbench.kernels.coded import GROUP
from kvbench.memory.codecs import Codecs
from kvbench.memory.codecs.codec import Native
from kvbench.memory.codecs.rotated import turned
from kvbench.memory.device import DeviceTier, Span, of_kv_heads
from kvbench.memory.kinds import KV, NATIVE, TIERS
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

# A number of each dtype that the kernels read, of the type in which they read it: NumPy has no
# bfloat16.
STORED: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
WORTH_A_THREAD = 2**18  # bytes of keys and values; fewer are read before another thread has begun
NO_LOGITS = np.empty((0, 0, 0), np.float32)  # of logits
NO_BIAS = NO_LOGITS
NO_RESULTS = np.empty((0, 0, 0, 0), np.float32)


Rotations = tuple[torch.Tensor | None, torch.Tensor | None]


class Part(NamedTuple):
    """What is attended by one call.

    Attributes
    ----------
    kernel
        one of `kvbench.kernels.attend`, or one that takes as much.
    pieces
        that it cuts each list into; not asked of a part that is all.
    arguments
        of the kernel, between the queries and the results.
    rotations
        of its keys and of its values, see `Codec.rotation`.
    """

    kernel: Callable[..., int]
    pieces: int
    arguments: tuple[Any, ...]
    rotations: Rotations = (None, None)


def unfit(shape: Shape, kv: KV = NATIVE) -> str | None:
    """Why this executor cannot run a generation of this shape, or None."""
    if shape.device.type != "cpu":
        return f"the device is {shape.device.type}"
    if shape.dtype not in STORED:
        return f"reads float32 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    for tier in TIERS:
        key, value = Codecs.of(kv, tier, shape.head_dim, shape.dtype)
        unread = any(codec.row is None and not isinstance(codec, Native) for codec in (key, value))
        if unread or (value.row is not None and value.row.only_keys):
            return f"no kernel reads kv={kv} in place"
    return None


def attend(
    query: torch.Tensor,
    store: LayerStore,
    selection: Selection | None,
    scaling: float,
    probabilities: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `kvbench.attention.executor.Executor`."""
    if selection is not None:
        return _attend_lists(query, scaling, store, selection, probabilities)
    if store.home == "host":
        store.resident()  # refuses: nothing is resident to attend
    return _attend_resident(
        query, scaling, store.worked_out(_stretches), store.device.longest if probabilities else 0
    )


# -- how rows are held -----------------------------------------------------------------------------


def addresses(*parts: torch.Tensor | None) -> tuple[int, ...]:
    """Of keys, values and parameters; 0 of what there is none of."""
    assert all(part is None or part.is_contiguous() for part in parts), (
        "a kernel finds a row by its number alone"
    )
    return tuple(0 if part is None else part.data_ptr() for part in parts)


@cache
def stored_as(codecs: Codecs) -> tuple[Any, ...]:
    """How keys and values are held, as `kernels.attend_resident` takes it."""
    kinds = [
        STORED[codec.dtype] if codec.row is None else codec.row.kernel_argument for codec in codecs
    ]
    codes = [0 if codec.row is None else codec.head_dim * codec.row.bits // 8 for codec in codecs]
    sizes = zip((codec.width * codec.stored.itemsize for codec in codecs), codes, strict=True)
    return *kinds, *sizes, 2 * codecs.key.head_dim * codecs.key.dtype.itemsize


def _rotations(codecs: Codecs) -> Rotations:
    return codecs.key.rotation, codecs.value.rotation


# -- all slots -------------------------------------------------------------------------------------


def _stretches(store: LayerStore) -> list[Part]:
    return list(map(_stretch, store.device.spans()))


def _stretch(span: Span) -> Part:
    """Slots that are attended, and where they begin in the pool and in the logits, [L] int64 each,
    in one way held.
    """
    begin, end = _numbers(span.begin), _numbers(span.end)
    used = end - begin if begin.any() else end  # which grows in place, as tokens come
    arguments = (
        used,
        _numbers(span.first) + begin,
        begin,
        addresses(*span.pool, span.parameters),
        stored_as(span.codecs),
    )
    return Part(kernels.attend_resident, 0, arguments, _rotations(span.codecs))


def _attend_resident(
    query: torch.Tensor, scaling: float, parts: Sequence[Part], columns: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output as the query and probabilities [B, Hq, columns], of the most used slots or 0, for all
    that are used.
    """
    lists = len(parts[0].arguments[0])
    if len(parts) > 1:
        most = (int(part.arguments[0].max()) for part in parts)
        pieces = (kernels.pieces_of(count, kernels.DENSE_PIECE) for count in most)
        parts = [part._replace(pieces=count) for part, count in zip(parts, pieces, strict=True)]
    return run(query, scaling, lists, parts, columns)[:2]


# -- lists of tokens -------------------------------------------------------------------------------


class Lists(NamedTuple):
    """Where those tokens are that are held in one way.

    Attributes
    ----------
    codecs
        of keys and of values.
    native
        both are held as they are.
    device, host
        the tiers, as `kernels.attend_lists` takes them; both know all tokens, attended here or not.
    stored
        as it takes the codecs.
    rotations
        see `Part`.
    """

    codecs: Codecs
    native: bool
    device: tuple[Any, ...]
    host: tuple[Any, ...]
    stored: tuple[Any, ...]
    rotations: Rotations


NO_HOST = 0, 0, 0, np.empty((0, 0), np.int64), np.empty((0, 0), np.bool_), True
NO_EXTRA = 0, 0, 0, 0


def _attend_lists(
    query: torch.Tensor,
    scaling: float,
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
    replaces_all = not (store.rebuilds_keys and len(tiers) == 1 and tiers[0].native)
    selection = store.with_stored_keys(selection) if replaces_all else selection
    attended = _attend_parts(query, scaling, tiers, selection, heads, replaces_all, probabilities)
    if attended.lost:
        store.locate(of_kv_heads(selection.index, heads))  # raises, and names the token
        raise AssertionError("a token that the store locates was not found")
    store.attended(selection.index)
    return attended.out, attended.probabilities


def _attend_parts(
    query: torch.Tensor,
    scaling: float,
    tiers: Sequence[Lists],
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
    dtype, count = tiers[0].codecs.key.dtype, index.shape[2]
    batch, lists = len(index), max(index.shape[1], heads)
    tokens, bias = index.numpy(), bias_of(selection, batch, lists)
    pieces = kernels.pieces_of(count, kernels.LIST_PIECE)
    # rebuilt and more must live until the work is done
    rebuilt = None if selection.keys is None else selection.keys.to(dtype).contiguous()
    more = (
        [] if extra is None else [part.to(dtype).contiguous() for part in (extra.key, extra.value)]
    )
    keys, parts = (
        (0, 0, True) if rebuilt is None else (rebuilt.data_ptr(), rebuilt.shape[2], replaces_all),
        [],
    )
    for tier in tiers:
        stored, rotations = tier.stored, tier.rotations
        if rebuilt is not None:
            stored, rotations = (
                stored_as(Codecs(Native(rebuilt.shape[3], dtype), tier.codecs.value)),
                (None, rotations[1]),
            )
        arguments = tokens, bias, tier.device, tier.host, keys, NO_EXTRA, stored
        parts.append(Part(kernels.attend_lists, pieces, arguments, rotations))
    extras = more[0].shape[2] if more else 0
    # they come with rows that are held as they are, or by themselves
    if extras and tiers[-1].native:
        entries = *addresses(*more), extras, count
        parts[-1] = Part(kernels.attend_lists, pieces + 1, (*arguments[:5], entries, stored))
    elif extras:
        parts.append(extra_part(index, bias, heads, *more))
    return run(query, scaling, batch * lists, parts, count + extras if probabilities else 0)


def extra_part(
    index: torch.Tensor,
    bias: NDArray[np.float32],
    heads: int,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Part:
    """Extra entries [B, Hkv, E, D] beside lists [B, Hs, M], as a part of its own, of one piece;
    they must live on.
    """
    rows = len(index) * heads
    numbers, codecs = np.zeros(rows, np.int64), Codecs.native(key.shape[3], key.dtype)
    nowhere = 0, 0, 0, numbers, np.empty((rows, 0), np.int64), numbers, numbers, numbers
    entries = *addresses(key, value), key.shape[2], index.shape[2]
    nothing = index[..., :0].contiguous().numpy()
    return Part(
        kernels.attend_lists,
        1,
        (nothing, bias, nowhere, NO_HOST, (0, 0, True), entries, stored_as(codecs)),
    )


def bias_of(selection: Selection, batch: int, lists: int) -> NDArray[np.float32]:
    """[L, R, M (+ E)], what is added to the logits of lists, `lists` a row of the batch; [0, 0, 0]:
    nothing.
    """
    weight, extra = selection.log_weight, selection.extra
    if weight is None and (extra is None or not extra.log_weight.any()):
        return NO_BIAS
    if extra is not None:
        if weight is None:
            weight = torch.zeros(*extra.log_weight.shape[:2], selection.index.shape[2])
        weight = torch.cat([weight.float(), extra.log_weight.float()], dim=2)
    assert weight is not None
    return weight.float().contiguous().view(batch * lists, -1, weight.shape[2]).numpy()


def _tiers(store: LayerStore) -> list[Lists]:
    """Tokens of a store: of both tiers together where these hold them alike or the device has none,
    else apart.
    """
    device, host = store.device, store.host
    spans = device.spans()
    if host is None:
        return [_list(span.codecs, _near(device, span), NO_HOST) for span in spans]
    slots = host.capacity
    ids = host.slot_of.view(-1, slots).numpy(), host.present.view(-1, slots).numpy()
    far = *addresses(host.key, host.value), slots, *ids
    if spans[0].codecs == host.codecs or not device.total:
        return [_list(host.codecs, _near(device, spans[0]), (*far, True))]
    passed = _near(device, spans[0]._replace(end=torch.zeros_like(device.used)))
    return [
        _list(host.codecs, passed, (*far, True)),
        *(_list(span.codecs, _near(device, span), (*far, False)) for span in spans),
    ]


def _list(codecs: Codecs, device: tuple[Any, ...], host: tuple[Any, ...]) -> Lists:
    native = all(isinstance(codec, Native) for codec in codecs)
    return Lists(codecs, native, device, host, stored_as(codecs), _rotations(codecs))


def _near(device: DeviceTier, span: Span) -> tuple[Any, ...]:
    """The device tier as `kernels.attend_lists` takes it, of which a span is attended."""
    heads, ids = device.used.numel(), device.ids
    tokens = np.empty((heads, 0), np.int64) if ids is None else ids.view(heads, -1).numpy()
    where = _numbers(span.first), tokens, _numbers(device.used)
    attended = _numbers(span.begin), _numbers(span.end)
    return *addresses(*span.pool, span.parameters), *where, *attended


def _numbers(tensor: torch.Tensor) -> NDArray[np.int64]:
    """[B, Hkv] as [L], in place."""
    return tensor.reshape(-1).numpy()


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
    query: torch.Tensor, scaling: float, lists: int, parts: Sequence[Part], columns: int
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
    """
    query, (batch, heads, _, head_dim) = query.contiguous(), query.shape
    rows = batch * heads // lists
    before = lost = 0
    logits = np.empty((lists, rows, columns), np.float32) if columns else NO_LOGITS
    logits.fill(-np.inf)
    threads = torch.get_num_threads(), WORTH_A_THREAD
    if len(parts) == 1:
        (part,) = parts
        part_query = _met(query, part.rotations)
        request, out = (
            (part_query.data_ptr(), lists, rows, head_dim, STORED[part_query.dtype], scaling),
            torch.empty_like(part_query),
        )
        lost = part.kernel(threads, 0, request, *part.arguments, logits, NO_RESULTS, out.data_ptr())
        if part.rotations[1] is not None:
            out = turned(out, part.rotations[1].T)
        if part_query is not query:
            out = out.to(query.dtype)
    else:
        results = np.empty(
            (lists, sum(part.pieces for part in parts), rows, head_dim + 2), np.float32
        )
        for part in parts:
            part_query = _met(query, part.rotations)
            request = (
                part_query.data_ptr(),
                lists,
                rows,
                head_dim,
                STORED[part_query.dtype],
                scaling,
            )
            lost += part.kernel(threads, before, request, *part.arguments, logits, results, 0)
            if part.rotations[1] is not None:
                sums = torch.from_numpy(results)[:, before : before + part.pieces, :, :head_dim]
                sums.copy_(turned(sums, part.rotations[1].T))
            before += part.pieces
        out = torch.empty_like(query)
        kernels.merge(results, out.data_ptr(), STORED[query.dtype], logits)
    probabilities = torch.from_numpy(logits).view(batch, heads, -1) if columns else None
    return Result(out, probabilities, lost)


def _met(query: torch.Tensor, rotations: Rotations) -> torch.Tensor:
    """The query as it meets a part; in float32 where rows of it are turned, so that nothing is
    rounded between.
    """
    key, value = rotations
    if key is None and value is None:
        return query
    return query.float() if key is None else turned(query, key)


@cache
def compile_kernels(dtype: torch.dtype, kv: KV = NATIVE) -> None:
    """Compile, or read from disk, before anything is timed: what reads rows as they are, and as a
    tier holds them.
    """
    for kinds in sorted({NATIVE, kv, kv._replace(device=kv.host)}, key=str):
        store = LayerStore(1, 1, GROUP, 2, dtype, torch.device("cpu"), kv=kinds)
        token = torch.zeros(1, 1, 1, GROUP, dtype=dtype)
        store.write_prompt(token, token, 0, [0])
        store.seal_prompt([1])
        store.encode()
        _attend_resident(token, 1.0, _stretches(store), 1)
        selection = Selection(
            torch.zeros(1, 1, 1, dtype=torch.int64), extra=Extra(token, token, torch.zeros(1, 1, 1))
        )
        _attend_lists(token, 1.0, store, selection, probabilities=True)
