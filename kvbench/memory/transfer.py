"""Memory of keys, values and weights, and copies between host and device that nothing waits for.

A CPU looks up the address of each page that it reads, and reads rows from all over a cache, and
weights, more quickly from pages of 2 MiB than from those of 4 KiB. Linux gives such pages to a
process that asks for them, unless the system's settings forbid it.

For a GPU, host memory is pinned in blocks that are kept for the next generation: torch's allocator
rounds every block up to a power of two, which can double tens of gigabytes, and pinning is slow. A
device reads rows of them itself (unified virtual addressing): a selection that was made on the
device stays there, nothing is gathered on the host, nobody waits.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache

import torch

from kvbench.kernels.operators import operator

LARGE_PAGE = 2**21
LINE = 64  # bytes of a cache's line, in which a weight begins
PRIVATE = getattr(mmap, "MAP_PRIVATE", 0)
ANONYMOUS = PRIVATE | getattr(mmap, "MAP_ANONYMOUS", 0)
# cudaHostRegister: pinned for every context, and readable by the device itself
PORTABLE_AND_MAPPED = 3

_ANYWHERE = nullcontext()
_free: dict[int, list[torch.Tensor]] = defaultdict(list)  # pinned blocks [n] uint8 by size


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a block of code: kernels that are no operations of torch run
    on that one.
    """
    return torch.cuda.device(device) if device.type == "cuda" else _ANYWHERE


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's copies run beside its computation."""
    return torch.cuda.Stream(device)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, without a wait for it: to a GPU through pinned memory, which takes
    nothing expanded.
    """
    if tensor.device == device:
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()
    return pinned.to(device, non_blocking=True)


# -- memory of a CPU -------------------------------------------------------------------------------


@contextmanager
def _allocating(size: int) -> Iterator[None]:
    """Say what the system does not give as torch says it."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"can't allocate memory: {size} bytes") from error


def _large_pages(size: int) -> mmap.mmap:
    with _allocating(size):
        region = mmap.mmap(-1, size, flags=ANONYMOUS)
    with suppress(OSError):  # a system that has none
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def zeros(
    size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Zeros on a device (None: the CPU), on a CPU in large pages where they fill one; as torch does
    it raises RuntimeError where the system gives no more memory.
    """
    nbytes, on_cpu = math.prod(size) * dtype.itemsize, device is None or device.type == "cpu"
    if not on_cpu or nbytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*size, dtype=dtype, device=device)
    return torch.frombuffer(_large_pages(nbytes), dtype=dtype).view(*size)


def move_weights(weights: Iterable[torch.Tensor]) -> None:
    """Have weights on a CPU in large pages from now on, each with a storage of its own; elsewhere
    they stay.
    """
    weights = [weight for weight in weights if weight.nbytes]
    if not weights or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    # pages come as they are written: a weight is in memory twice while it moves, and no other
    region, begin = _large_pages(sum(map(_lines, weights))), 0
    for weight in weights:
        moved = torch.frombuffer(region, dtype=torch.uint8, count=weight.nbytes, offset=begin)
        weight.data = moved.view(weight.dtype).view(weight.shape).copy_(weight)
        begin += _lines(weight)


def _lines(weight: torch.Tensor) -> int:
    """Bytes of a weight, in whole lines."""
    return -(-weight.nbytes // LINE) * LINE


class Original:
    """Tensors of which any number of copies can be had, to read and to write.

    Under Linux those of a CPU are private mappings of one file in memory: what no copy has written,
    a 4 KiB page at a time, is in memory once. Elsewhere every copy is whole.

    Parameters
    ----------
    parts
        contiguous, on one device; their memory is not used any more.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._kinds = [(part.shape, part.dtype) for part in parts]
        self._whole = list(parts)
        if not shares_pages(parts[0].device) or not any(part.nbytes for part in parts):
            return
        self._size = sum(-(-part.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for part in parts)
        with _allocating(self._size):
            self._file = os.memfd_create("kvbench")
            weakref.finalize(self, os.close, self._file)
            os.truncate(self._file, self._size)
        for mapped, part in zip(self._mapped(mmap.MAP_SHARED), parts, strict=True):
            mapped.copy_(part)
        self._whole.clear()

    def copy(self) -> list[torch.Tensor]:
        """The tensors anew."""
        return [part.clone() for part in self._whole] or self._mapped(PRIVATE)

    def _mapped(self, flags: int) -> list[torch.Tensor]:
        with _allocating(self._size):
            region = mmap.mmap(self._file, self._size, flags=flags)
        parts, begin = list[torch.Tensor](), 0
        for shape, dtype in self._kinds:
            if not shape.numel():  # values within their keys
                parts.append(torch.empty(shape, dtype=dtype))
                continue
            part = torch.frombuffer(region, dtype=dtype, count=shape.numel(), offset=begin)
            parts.append(part.view(shape))
            begin += -(-part.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return parts


def shares_pages(device: torch.device) -> bool:
    """Whether copies of an `Original` on this device share the memory that they do not write."""
    return device.type == "cpu" and hasattr(os, "memfd_create")


# -- pinned memory ---------------------------------------------------------------------------------


def pinned_zeros(size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
    """Pinned memory for as long as `owner` lives; finite everywhere, zero when it is new."""
    nbytes = -(-max(1, math.prod(size)) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        block = _free[nbytes].pop() if _free[nbytes] else _register(nbytes)
    except RuntimeError:
        # blocks of other sizes, of earlier generations, may take the memory that is missing
        release()
        block = _register(nbytes)
    weakref.finalize(owner, _free[nbytes].append, block)
    return block.view(dtype)[: math.prod(size)].view(*size)


def release() -> None:
    """Give the blocks that nobody owns back to the system."""
    for blocks in _free.values():
        for block in blocks:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))
        blocks.clear()


def _register(nbytes: int) -> torch.Tensor:
    # Pages of its own: CUDA refuses a block that shares one with a block it knows.
    with _allocating(nbytes):
        block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, PORTABLE_AND_MAPPED)
    )
    return block


# -- rows that the device reads itself -------------------------------------------------------------


@operator("kvbench.memory.gpu")
def fetch(
    near: torch.Tensor,
    far: torch.Tensor,
    staged: Sequence[torch.Tensor],
    newest: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Each row of keys, of values or of both, from the device or from the host: [n, width] on the
    device.

    Parameters
    ----------
    near
        [n] int64, row of `staged`, or behind these of `newest`, or -1.
    far
        [n] int64, row of `host` where `near` is -1, or -1: zeros.
    staged, newest
        [..., width] of each on the device; nothing where there are none.
    host
        [m, width] of each, pinned where the device is a GPU; only the rows named are read.
    """
    out = []
    for side, block in enumerate(host):
        parts = [rows[side].flatten(0, -2) for rows in (staged, newest) if rows]
        rows = block.new_zeros(len(far), block.shape[1], device=far.device)
        if len(block):
            rows = torch.where((far >= 0)[:, None], block[far.clamp(min=0)], rows)
        if here := sum(map(len, parts)):
            rows_here = parts[0] if len(parts) == 1 else torch.cat(parts)
            local = rows_here[near.clamp(0, here - 1)]
            rows = torch.where((near >= 0)[:, None], local, rows)
        out.append(rows)
    return out
