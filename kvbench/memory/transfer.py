"""Copies between host and device that nothing waits for, and what they go through.

Large blocks of pinned host memory are kept for the next generation: torch's own pinned allocator
rounds every block up to a power of two, which can double tens of gigabytes, and pinning is slow. So
a host tier's blocks are plain memory that is registered with CUDA at its own size, once, and lent
again. A device reads rows of it itself (unified virtual addressing): a selection that was made on
the device stays there, nothing is gathered on the host, nobody waits. On a GPU that is one Triton
kernel; `fetched` in torch says what it computes, and is what other devices run.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from kvbench.memory import large

_ANYWHERE = nullcontext()


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a block of code: kernels that are no operations of torch run
    on that one.
    """
    return torch.cuda.device(device) if device.type == "cuda" else _ANYWHERE


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros on a device, on a CPU in large pages."""
    if device.type == "cpu":
        return large.zeros(size, dtype)
    return torch.zeros(*size, dtype=dtype, device=device)


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
    return (tensor if tensor.is_pinned() else tensor.contiguous().pin_memory()).to(
        device, non_blocking=True
    )


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


def fetch(
    near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """Each row from the device or from the host.

    Parameters
    ----------
    near
        [n] int64, row of `here`, or -1.
    far
        [n] int64, row of `host` where `near` is -1, or -1: zeros.
    here
        [h, D] on the device.
    host
        [m, D], pinned where the device is a GPU; only the rows named are read.

    Returns
    -------
    torch.Tensor
        [n, D] on the device.
    """
    return _launch(near, far, here, host) if near.is_cuda else fetched(near, far, here, host)


def fetched(
    near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """As `fetch`, in torch, with everything on one device."""
    rows = torch.where((far >= 0)[:, None], host[far.clamp(min=0)], 0)
    return torch.where((near >= 0)[:, None], here[near.clamp(min=0)], rows) if len(here) else rows


def _launch(
    near: torch.Tensor, far: torch.Tensor, here: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(len(near), host.shape[1], dtype=host.dtype, device=near.device)
    width = 1 << (host.shape[1] - 1).bit_length()
    _kernel()[(len(near),)](near, far, here, host, out, host.shape[1], width)
    return out


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def fetch_rows(near, far, here, host, out, size, width: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0)
        lane = tl.arange(0, width)
        local, remote = tl.load(near + at), tl.load(far + at)
        inside = lane < size
        row = tl.load(here + local * size + lane, mask=inside & (local >= 0), other=0.0)
        distant = tl.load(
            host + remote * size + lane, mask=inside & (local < 0) & (remote >= 0), other=0.0
        )
        tl.store(out + at * size + lane, tl.where(local >= 0, row, distant), mask=inside)

    return fetch_rows
