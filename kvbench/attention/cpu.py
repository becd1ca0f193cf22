"""The CPU executor: attends tokens where they lie, in either tier, with nothing gathered.

On a CPU "device" and "host" are the same memory, so that nothing has to move; the store is told what was attended, and
counts later what a device would have been brought. `kernels.py` has the compiled half.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from kvbench.attention import kernels
from kvbench.attention import torch as torch_executor
from kvbench.memory.store import LayerStore
from kvbench.method import Extra, Selection, Shape

# A number of each dtype that the kernels read, of the type in which they read it: NumPy has no bfloat16.
STORED = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
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
    size = int(store.device.used.sum()) * store.device.entry_bytes
    if selection is None and size < WORTH_STREAMING and store.device.even:
        return torch_executor.attend(query, store, None, scaling, probabilities)
    asked = query.float() * scaling
    if selection is None:
        out, weights = _attend_resident(asked, store, probabilities)
    else:
        out, weights = _attend_lists(asked, store, selection, probabilities)
    return out.view(query.shape).to(query.dtype), weights


def _attend_resident(
    query: torch.Tensor, store: LayerStore, probabilities: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [B, Hkv, G, D] and probabilities [B, Hq, n], n = most used slots, for all slots that are used."""
    batch, query_heads, _, head_dim = query.shape
    longest = int(store.device.used.max())
    heads = store.kv_heads
    work = _Work(
        query.reshape(batch * heads, -1, head_dim),
        kernels.pieces_of(longest, kernels.DENSE_PIECE),
        longest if probabilities else 0,
    )
    device = store.device
    _check(*device.pool)
    key, value = device.pool
    used, first = device.used.view(-1).numpy(), device.first.view(-1).numpy()
    pool = first, key.data_ptr(), value.data_ptr(), STORED[key.dtype]

    threads = work.threads(int(used.sum()) * device.entry_bytes)
    kernels.attend_resident(threads, work.claims, work.pieces, work.query, used, *pool, *work.results)
    return work.merged(batch, query_heads)


def _attend_lists(
    query: torch.Tensor, store: LayerStore, selection: Selection, probabilities: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [B, Hs, R, D] and probabilities [B, Hq, M (+ E)] of lists of tokens.

    Raises:
        LookupError: as `LayerStore.locate`.
    """
    batch, query_heads, _, head_dim = query.shape
    index, heads, dtype = selection.index.contiguous(), store.kv_heads, store.device.pool.key.dtype
    count, lists = index.shape[2], max(index.shape[1], heads)
    extra = selection.extra
    extras = 0 if extra is None else extra.key.shape[2]
    pieces = kernels.pieces_of(count, kernels.LIST_PIECE) + (extras > 0)
    work = _Work(query.reshape(batch * lists, -1, head_dim), pieces, count + extras if probabilities else 0)
    bias = _bias(selection, batch, query_heads).view(*work.query.shape[:2], -1).numpy()
    own = None if selection.keys is None else selection.keys.to(dtype).contiguous()
    more = None if extra is None else (extra.key.to(dtype).contiguous(), extra.value.to(dtype).contiguous())
    arguments = (
        index.numpy(),
        bias,
        _device(store),
        _host(store),
        0 if own is None else own.data_ptr(),
        (0, 0, 0) if more is None else (more[0].data_ptr(), more[1].data_ptr(), extras),
        STORED[dtype],
    )

    threads = work.threads(batch * lists * count * store.device.entry_bytes)
    kernels.attend_lists(threads, work.claims, work.pieces, work.query, *arguments, *work.results)
    shared = (index if lists == heads else index.view(batch, heads, -1)).expand(batch, heads, -1)
    if work.claims[1]:
        store.locate(shared)  # raises, and names the token
        raise AssertionError("a token that the store locates was not found")
    store.attended(shared)
    return work.merged(batch, query_heads)


def _bias(selection: Selection, batch: int, query_heads: int) -> torch.Tensor:
    """[B, Hq, M (+ E)] float32, what is added to the logits; [B, Hq, 0]: nothing."""
    weight, extra = selection.log_weight, selection.extra
    if extra is None:
        return torch.empty(batch, query_heads, 0) if weight is None else weight.float().contiguous()
    if weight is None:
        weight = torch.zeros(batch, query_heads, selection.index.shape[2])
    return torch.cat([weight.float(), extra.log_weight.float()], dim=2)


def _device(store: LayerStore) -> tuple[Any, ...]:
    """The device tier as `kernels.attend_lists` takes it."""
    device = store.device
    _check(*device.pool)
    used, first = device.used.view(-1).numpy(), device.first.view(-1).numpy()
    ids = np.empty((len(used), 0), np.int64) if device.ids is None else device.ids.view(len(used), -1).numpy()
    return device.pool.key.data_ptr(), device.pool.value.data_ptr(), first, ids, used


def _host(store: LayerStore) -> tuple[Any, ...]:
    """The host tier, with no slots where there is none."""
    host = store.host
    if host is None:
        return 0, 0, 0, np.empty((0, 0), np.int64), np.empty((0, 0), np.bool_)
    _check(host.key, host.value)
    slots = host.capacity
    slot_of, present = host.slot_of.view(-1, slots).numpy(), host.present.view(-1, slots).numpy()
    return host.key.data_ptr(), host.value.data_ptr(), slots, slot_of, present


def _check(*blocks: torch.Tensor) -> None:
    """A kernel finds a row by its number alone."""
    assert all(block.is_contiguous() for block in blocks), "a tier's blocks have no holes"


class _Work:
    """Pieces of a layer's attention, and their results.

    Args:
        query: [L, R, D].
        pieces: of each list.
        columns: of the logits to keep; 0: none.
    """

    def __init__(self, query: torch.Tensor, pieces: int, columns: int) -> None:
        self.query, self.pieces, self.claims = query.numpy(), pieces, np.zeros(2, np.int64)
        lists, rows, head_dim = self.query.shape
        most, total = (np.empty((lists * pieces, rows), np.float32) for _ in range(2))
        self._logits = np.full((lists, rows, columns), -np.inf, np.float32)
        self.results = self._logits, most, total, np.empty((lists * pieces, rows, head_dim), np.float32)

    def threads(self, size: int) -> int:
        """Threads that `size` bytes to read are worth."""
        return max(1, min(torch.get_num_threads(), len(self.results[1]), size // WORTH_A_THREAD))

    def merged(self, batch: int, query_heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [L, R, D] and, where the logits were kept, probabilities [B, Hq, columns]."""
        out = np.empty_like(self.query)
        kernels.merge(self.pieces, *self.results[1:], out, self._logits)
        kept = self._logits.shape[2] > 0
        return torch.from_numpy(out), torch.from_numpy(self._logits).view(batch, query_heads, -1) if kept else None


@cache
def compile_kernels(dtype: torch.dtype) -> None:
    """Compile, or read from disk, before anything is timed."""
    store = LayerStore(1, 1, kernels.LANES, 1, dtype, torch.device("cpu"))
    token = torch.zeros(1, 1, 1, kernels.LANES, dtype=dtype)
    store.write_prompt(token, token, 0, [0])
    store.seal_prompt([1])
    extra = Extra(token, token, torch.zeros(1, 1, 1))
    _attend_resident(token.float(), store, probabilities=True)
    _attend_lists(token.float(), store, Selection(torch.zeros(1, 1, 1, dtype=torch.int64), extra=extra), True)
