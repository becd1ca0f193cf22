"""The CPU executor: attends tokens where they lie, in either tier, and decodes as it reads; nothing is gathered.

On a CPU "device" and "host" are the same memory, so that nothing has to move; the store notes what was attended, and
counts later what a device would have been brought. `kvbench.kernels.attend` is the compiled half. Rows that are held in
several ways are parts of one attention, a call of a kernel each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.attention import torch as torch_executor
from kvbench.kernels import attend as kernels
from kvbench.kernels import rows
from kvbench.memory.codec import Codec, Fp8, Int8, KiviKeys, KiviValues, Native
from kvbench.memory.device import DeviceTier, Span
from kvbench.memory.host import HostTier
from kvbench.memory.kinds import KV, NATIVE
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

Claims = NDArray[np.int64]  # the next piece, see `kernels.attend_lists`
Pieces = tuple[int, int]  # of a list: the first, and how many
Asked = tuple[NDArray[Any], np.float32]  # queries [L, R, D], and their scaling
Part = Callable[..., None]  # of a layer's attention, see `Work.run`

# A number of each dtype that the kernels read, of the type in which they read it: NumPy has no bfloat16.
STORED: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
WORTH_A_THREAD = 2**18  # bytes of keys and values; fewer are read before another thread has begun
# Bytes of keys and values attended as a whole from which on the kernel is quicker than sdpa, in either dtype.
WORTH_STREAMING = 2**19


def unfit(shape: Shape) -> str | None:
    """Why this executor cannot run a generation of this shape, or None."""
    if shape.device.type != "cpu":
        return f"the device is {shape.device.type}"
    return (
        None if shape.dtype in STORED else f"reads float32 and bfloat16, not {str(shape.dtype).removeprefix('torch.')}"
    )


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
    stretches = [_stretch(span) for span in store.device.spans()]
    if store.device.even and _quicker_in_torch(stretches):
        return torch_executor.attend(query, store, None, scaling, probabilities)
    return _attend_resident(query, scaling, stretches, probabilities)


def _quicker_in_torch(stretches: Sequence[Stretch]) -> bool:
    """Whether so little is attended that sdpa is quicker, and nothing is to be decoded for it."""
    return _native(one.codecs for one in stretches) and sum(one.size for one in stretches) < WORTH_STREAMING


def _native(held: Iterable[tuple[Codec | KiviKeys, Codec]]) -> bool:
    """Whether all keys are held as they are."""
    return all(isinstance(key, Native) for key, _ in held)


# -- how rows are held -------------------------------------------------------------------------------------------------


def _addresses(*parts: torch.Tensor | None) -> tuple[int, ...]:
    """Of keys, values and parameters; 0 of what there is none of."""
    assert all(part is None or part.is_contiguous() for part in parts), "a kernel finds a row by its number alone"
    return tuple(0 if part is None else part.data_ptr() for part in parts)


@cache
def _stored(codecs: tuple[Codec | KiviKeys, Codec]) -> tuple[Any, ...]:
    """How keys and values are held, as `kernels.attend_resident` takes it."""
    (key_kind, *key_sizes), (value_kind, *value_sizes) = (_kind(codec) for codec in codecs)
    group = 2 * codecs[0].head_dim * codecs[0].dtype.itemsize
    return key_kind, value_kind, tuple(key_sizes), tuple(value_sizes), group


def _kind(codec: Codec | KiviKeys) -> tuple[Any, int, int]:
    """What the kernels call rows of a codec, bytes of such a row, and of the codes that it begins with."""
    number = STORED[codec.dtype]
    match codec:
        case Int8():
            return rows.Int8(), codec.width, codec.head_dim
        case Fp8():
            return rows.Fp8(), codec.width, codec.head_dim
        case KiviKeys(bits=bits) | KiviValues(bits=bits):
            return {2: rows.Kivi2, 4: rows.Kivi4}[bits](number), codec.width, codec.head_dim * bits // 8
    return number, codec.head_dim * number.itemsize, 0


@cache
def _entry_bytes(codecs: tuple[Codec | KiviKeys, Codec]) -> int:
    """Bytes of a token's key and value in one KV head."""
    return sum(_kind(codec)[1] for codec in codecs)


# -- all slots ---------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """A `Span`, as the kernel takes it.

    Attributes:
        codecs: of keys and of values.
        where: [L] int64 each: slots that are attended, where they begin in the pool, and of the logits; addresses.
        longest: slots of the KV head that has most.
        size: bytes of all.
    """

    codecs: tuple[Codec | KiviKeys, Codec]
    where: tuple[Any, ...]
    longest: int
    size: int


def _stretch(span: Span) -> Stretch:
    first, begin, end = (numbers.reshape(-1).numpy() for numbers in (span.first, span.begin, span.end))
    used = end - begin
    where = used, first + begin, begin, _addresses(*span.pool, span.parameters)
    return Stretch(span.codecs, where, int(used.max()), int(used.sum()) * _entry_bytes(span.codecs))


def _attend_resident(
    query: torch.Tensor, scaling: float, stretches: Sequence[Stretch], probabilities: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output as the query and probabilities [B, Hq, n], n = most used slots, for all slots that are used."""
    columns = max(int((one.where[0] + one.where[2]).max()) for one in stretches) if probabilities else 0
    pieces = [kernels.pieces_of(one.longest, kernels.DENSE_PIECE) for one in stretches]
    work = Work(query, scaling, len(stretches[0].where[0]), pieces, columns)
    work.run([_stretch_part(one) for one in stretches], sum(one.size for one in stretches))
    return work.merged()


def _stretch_part(stretch: Stretch) -> Part:
    held = *stretch.where, _stored(stretch.codecs)

    def part(threads: int, claims: Claims, pieces: Pieces, asked: Asked, *results: NDArray[np.float32]) -> None:
        kernels.attend_resident(threads, claims, pieces, *asked, *held, *results)

    return part


# -- lists of tokens ---------------------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """Where those tokens are that are held in one way.

    Attributes:
        codecs: of keys and of values.
        device, host: the tiers, as `kernels.attend_lists` takes them; both know all tokens, attended here or not.
    """

    codecs: tuple[Codec | KiviKeys, Codec]
    device: tuple[Any, ...]
    host: tuple[Any, ...]


NO_HOST = 0, 0, 0, np.empty((0, 0), np.int64), np.empty((0, 0), np.bool_), True


def _attend_lists(
    query: torch.Tensor, scaling: float, store: LayerStore, selection: Selection, probabilities: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output as the query and probabilities [B, Hq, M (+ E)] of lists of tokens.

    Raises:
        LookupError: as `LayerStore.locate`.
    """
    batch, index, heads = len(query), selection.index, store.kv_heads
    shared = (index if index.shape[1] in (1, heads) else index.reshape(batch, heads, -1)).expand(batch, heads, -1)
    found = _attend_parts(query, scaling, _tiers(store), selection, heads, probabilities)
    if found is None:
        store.locate(shared)  # raises, and names the token
        raise AssertionError("a token that the store locates was not found")
    store.attended(shared)
    return found


def _attend_parts(
    query: torch.Tensor,
    scaling: float,
    parts: Sequence[Lists],
    selection: Selection,
    heads: int,
    probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """As `_attend_lists`, for `heads` KV heads; None: a token is nowhere."""
    batch, query_heads, _, head_dim = query.shape
    index, extra = selection.index.contiguous(), selection.extra
    count, lists = index.shape[2], max(index.shape[1], heads)
    extras = 0 if extra is None else extra.key.shape[2]
    plain = Native(head_dim, parts[0].codecs[0].dtype)
    # both must live until the work is done
    own = None if selection.keys is None else selection.keys.to(plain.dtype).contiguous()
    both = () if extra is None else (extra.key, extra.value)
    more = [part.to(plain.dtype).contiguous() for part in both]
    entries = (*(part.data_ptr() for part in more), extras, count) if extras else (0, 0, 0, 0)
    bias = bias_of(selection, batch, query_heads).view(batch * lists, query_heads // lists, -1).numpy()

    def call(tokens: torch.Tensor, part: Lists, keys: torch.Tensor | None, entries: tuple[int, ...]) -> Part:
        codecs = part.codecs if keys is None else (plain, part.codecs[1])
        address = 0 if keys is None else keys.data_ptr()
        held = tokens.numpy(), bias, part.device, part.host, address, entries, _stored(codecs)

        def one(threads: int, claims: Claims, pieces: Pieces, asked: Asked, *results: NDArray[np.float32]) -> None:
            kernels.attend_lists(threads, claims, pieces, *asked, *held, *results)

        return one

    each, nothing = kernels.pieces_of(count, kernels.LIST_PIECE), (0, 0, 0, 0)
    last = parts[-1]
    if extras and all(codec == plain for codec in last.codecs):  # extra entries come with rows that are held as they
        pieces = [each] * (len(parts) - 1) + [each + 1]
        calls = [*(call(index, part, own, nothing) for part in parts[:-1]), call(index, last, own, entries)]
    else:
        pieces = [each] * len(parts) + [1] * (extras > 0)
        alone = [extra_part(index, bias, heads, *more)] if extras else []
        calls = [*(call(index, part, own, nothing) for part in parts), *alone]
    work = Work(query, scaling, batch * lists, pieces, count + extras if probabilities else 0)
    there = work.run(calls, batch * lists * count * max(_entry_bytes(part.codecs) for part in parts))
    return work.merged() if there else None


def extra_part(
    index: torch.Tensor, bias: NDArray[np.float32], heads: int, key: torch.Tensor, value: torch.Tensor
) -> Part:
    """Extra entries [B, Hkv, E, D] beside lists [B, Hs, M], as a part of its own, of one piece; they must live on."""
    count, rows = index.shape[2], len(index) * heads
    numbers, codecs = np.zeros(rows, np.int64), (Native(key.shape[3], key.dtype),) * 2
    nowhere = 0, 0, 0, numbers, np.empty((rows, 0), np.int64), numbers, numbers, numbers
    entries = *_addresses(key, value), key.shape[2], count
    held = index[..., :0].contiguous().numpy(), bias, nowhere, NO_HOST, 0, entries, _stored(codecs)

    def part(threads: int, claims: Claims, pieces: Pieces, asked: Asked, *results: NDArray[np.float32]) -> None:
        kernels.attend_lists(threads, claims, pieces, *asked, *held, *results)

    return part


def bias_of(selection: Selection, batch: int, query_heads: int) -> torch.Tensor:
    """[B, Hq, M (+ E)] float32, what is added to the logits; [B, Hq, 0]: nothing."""
    weight, extra = selection.log_weight, selection.extra
    if extra is None:
        return torch.empty(batch, query_heads, 0) if weight is None else weight.float().contiguous()
    if weight is None:
        weight = torch.zeros(batch, query_heads, selection.index.shape[2])
    return torch.cat([weight.float(), extra.log_weight.float()], dim=2)


# The last that was found of each store, with what it was found from: a step changes little in tiers on the host.
_found: WeakKeyDictionary[LayerStore, tuple[tuple[Any, ...], list[Lists]]] = WeakKeyDictionary()


def _tiers(store: LayerStore) -> list[Lists]:
    """Tokens of a store: of both tiers together where these hold them alike or the device has none, else apart."""
    device, host = store.device, store.host
    tensors = device.pool.key, device.used, device.ids, *((host.key, host.slot_of) if host is not None else ())
    known, lists = _found.get(store, ((), []))
    if len(known) != len(tensors) or any(one is not other for one, other in zip(known, tensors, strict=True)):
        lists = _lists(device, host)
        _found[store] = tensors, lists
    return lists


def _lists(device: DeviceTier, host: HostTier | None) -> list[Lists]:
    spans = device.spans()
    if host is None:
        return [Lists(span.codecs, _near(device, span), NO_HOST) for span in spans]
    slots = host.capacity
    ids = host.slot_of.view(-1, slots).numpy(), host.present.view(-1, slots).numpy()
    far = *_addresses(host.key, host.value), slots, *ids
    if spans[0].codecs == host.codecs or not device.longest:
        return [Lists(host.codecs, _near(device, spans[0]), (*far, True))]
    passed = _near(device, spans[0]._replace(end=torch.zeros_like(device.used)))
    return [
        Lists(host.codecs, passed, (*far, True)),
        *(Lists(span.codecs, _near(device, span), (*far, False)) for span in spans),
    ]


def _near(device: DeviceTier, span: Span) -> tuple[Any, ...]:
    """The device tier as `kernels.attend_lists` takes it, of which a span is attended."""
    heads, ids = device.used.numel(), device.ids
    tokens = np.empty((heads, 0), np.int64) if ids is None else ids.view(heads, -1).numpy()
    each = span.first, device.used, span.begin, span.end
    first, used, begin, end = (numbers.reshape(-1).numpy() for numbers in each)
    return *_addresses(*span.pool, span.parameters), first, tokens, used, begin, end


# -- the work ----------------------------------------------------------------------------------------------------------


class Work:
    """A layer's attention in parts, these in pieces, spread over threads, and their results.

    Args:
        query: [B, Hq, 1, D].
        lists: L, of which each has as many rows of the query.
        pieces: of each list, one number for each part.
        columns: of the logits to keep; 0: none.
    """

    def __init__(self, query: torch.Tensor, scaling: float, lists: int, pieces: Sequence[int], columns: int) -> None:
        self._query, self._pieces, head_dim = query.contiguous(), pieces, query.shape[3]
        rows = query.shape[0] * query.shape[1] // lists
        self._asked = self._query.float().numpy().reshape(lists, rows, head_dim), np.float32(scaling)
        self._logits = np.full((lists, rows, columns), -np.inf, np.float32)
        self._results = np.empty((lists, sum(pieces), rows, head_dim + 2), np.float32)

    def run(self, parts: Sequence[Part], size: int) -> bool:
        """Do all pieces, one part after the other; whether every token that was named was there.

        Args:
            parts: each is given threads, claims, its pieces of a list, the query with its scaling, the logits to keep,
                and the `results` that the kernels write.
            size: bytes to read.
        """
        before, lost = 0, 0
        for part, pieces in zip(parts, self._pieces, strict=True):
            claims = np.zeros(2, np.int64)
            threads = max(1, min(torch.get_num_threads(), len(self._logits) * pieces, size // WORTH_A_THREAD))
            part(threads, claims, (before, pieces), self._asked, self._logits, self._results)
            before, lost = before + pieces, lost + int(claims[1])
        return not lost

    def merged(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output, as the query, and, where the logits were kept, probabilities [B, Hq, columns]."""
        query, logits = self._query, self._logits
        out = torch.empty_like(query)
        kernels.merge(self._results, out.data_ptr(), STORED[query.dtype], logits)
        return out, torch.from_numpy(logits).view(*query.shape[:2], -1) if logits.shape[2] else None


@cache
def compile_kernels(dtype: torch.dtype, kv: KV = NATIVE) -> None:
    """Compile, or read from disk, before anything is timed: what reads rows as they are, and as a tier holds them."""
    for kind in sorted({"native", *kv}):
        store = LayerStore(1, 1, rows.GROUP, 1, dtype, torch.device("cpu"), kv=KV(kind, kind))
        token = torch.zeros(1, 1, 1, rows.GROUP, dtype=dtype)
        store.write_prompt(token, token, 0, [0])
        store.seal_prompt([1])
        store.encode()
        if kind in ("native", kv.device):
            _attend_resident(token, 1.0, [_stretch(span) for span in store.device.spans()], probabilities=True)
        selection = Selection(torch.zeros(1, 1, 1, dtype=torch.int64), extra=Extra(token, token, torch.zeros(1, 1, 1)))
        _attend_lists(token, 1.0, store, selection, probabilities=True)
