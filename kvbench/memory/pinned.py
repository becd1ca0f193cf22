"""Large blocks of pinned host memory, kept for the next generation.

torch's own pinned allocator rounds every block up to a power of two, which can double tens of
gigabytes, and pinning is slow. So a host tier's blocks are plain memory that is registered with
CUDA at its own size, once, and lent again.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch

# cudaHostRegister: pinned for every context, and readable by the device itself
PORTABLE_AND_MAPPED = 3

_free: dict[int, list[torch.Tensor]] = defaultdict(list)  # blocks [n] uint8 by size


def pinned_zeros(size: Sequence[int], dtype: torch.dtype, owner: object) -> torch.Tensor:
    """Pinned memory for as long as `owner` lives; finite everywhere, zero when it is new.

    Raises
    ------
    RuntimeError
        the system gives or pins no more memory.
    """
    nbytes = -(-max(1, math.prod(size)) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    block = _free[nbytes].pop() if _free[nbytes] else _registered(nbytes)
    weakref.finalize(owner, _free[nbytes].append, block)
    return block.view(dtype)[: math.prod(size)].view(*size)


def release() -> None:
    """Give the blocks that nobody owns back to the system."""
    for blocks in _free.values():
        for block in blocks:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))
        blocks.clear()


def _registered(nbytes: int) -> torch.Tensor:
    try:
        return _register(nbytes)
    except RuntimeError:
        # blocks of other sizes, of earlier generations, may take the memory that is missing
        release()
        return _register(nbytes)


def _register(nbytes: int) -> torch.Tensor:
    # Pages of its own: CUDA refuses a block that shares one with a block it knows.
    try:
        block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    except OSError as error:
        raise RuntimeError(f"can't allocate memory: {nbytes} bytes on the host") from error
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, PORTABLE_AND_MAPPED)
    )
    return block
