"""Memory in large pages: weights, and keys and values.

A CPU looks up the address of each page that it reads. Weights, which are read whole for every token, and rows from all
over a cache are read more quickly from pages of 2 MiB than from those of 4 KiB. Linux gives such pages to a process
that asks for them, unless the system's settings forbid it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import torch

PAGE = 2**21
REGION = 2**28  # bytes of weights that move together; during the move they are in memory twice
LINE = 64  # bytes of a cache's line, in which a weight begins


def move(weights: Iterable[torch.Tensor]) -> None:
    """Have weights on a CPU in large pages from now on, each with a storage of its own; elsewhere they stay."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    for group in _groups(weights):
        region, at = _region(sum(map(_lines, group))), 0
        for weight in group:
            moved = torch.frombuffer(region, dtype=torch.uint8, count=weight.nbytes, offset=at)
            at += _lines(weight)
            weight.data = moved.view(weight.dtype).view(weight.shape).copy_(weight)


def zeros(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on a CPU, in large pages where they fill one.

    Raises:
        RuntimeError: the system gives no more memory.
    """
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*size, dtype=dtype)
    try:
        region = _region(nbytes)
    except OSError as error:
        raise RuntimeError(f"can't allocate memory: {nbytes} bytes") from error
    return torch.frombuffer(region, dtype=dtype).view(*size)


def _region(size: int) -> mmap.mmap:
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that has none
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _groups(weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Weights in their order, of `REGION` bytes or a single one."""
    group: list[torch.Tensor] = []
    for weight in weights:
        if not weight.nbytes:
            continue
        if group and sum(map(_lines, [*group, weight])) > REGION:
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


def _lines(weight: torch.Tensor) -> int:
    """Bytes of a weight, in whole lines."""
    return -(-weight.nbytes // LINE) * LINE
