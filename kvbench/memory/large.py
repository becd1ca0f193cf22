"""Memory in large pages: weights, and keys and values.

A CPU looks up the address of each page that it reads. Weights, which are read whole for every
token, and rows from all over a cache are read more quickly from pages of 2 MiB than from those of 4
KiB. Linux gives such pages to a process that asks for them, unless the system's settings forbid it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import finalize

import torch

PAGE = 2**21
REGION = 2**28  # bytes of weights that move together; during the move they are in memory twice
LINE = 64  # bytes of a cache's line, in which a weight begins


def move(weights: Iterable[torch.Tensor]) -> None:
    """Have weights on a CPU in large pages from now on, each with a storage of its own; elsewhere
    they stay.
    """
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

    Raises
    ------
    RuntimeError
        the system gives no more memory.
    """
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*size, dtype=dtype)
    with _allocating(nbytes):
        region = _region(nbytes)
    return torch.frombuffer(region, dtype=dtype).view(*size)


class Original:
    """Tensors of which any number of copies can be had, to read and to write.

    Under Linux those of a CPU are private mappings of one file in memory: what no copy has written,
    a 4 KiB page at a time, is in memory once. Elsewhere every copy is whole.

    Parameters
    ----------
    parts
        contiguous, on one device; their memory is not used any more.

    Raises
    ------
    RuntimeError
        the system gives no more memory.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._kinds = [(part.shape, part.dtype) for part in parts]
        self._whole, self._places = list(parts), list[int]()
        self._size = 0
        if not shares_pages(parts[0].device) or not all(part.nbytes for part in parts):
            return
        for part in parts:
            self._places.append(self._size)
            self._size += part.nbytes + -part.nbytes % mmap.PAGESIZE
        with _allocating(self._size):
            self._file = os.memfd_create("kvbench")
            finalize(self, os.close, self._file)
            os.truncate(self._file, self._size)
            for place, part in zip(self._mapped(mmap.MAP_SHARED), parts, strict=True):
                place.copy_(part)
        self._whole.clear()

    def copy(self) -> list[torch.Tensor]:
        """The tensors anew.

        Raises
        ------
        RuntimeError
            the system gives no more memory.
        """
        if self._whole:
            return [part.clone() for part in self._whole]
        with _allocating(self._size):
            return self._mapped(mmap.MAP_PRIVATE)

    def _mapped(self, flags: int) -> list[torch.Tensor]:
        region = mmap.mmap(
            self._file, self._size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        return [
            torch.frombuffer(region, dtype=dtype, count=shape.numel(), offset=place).view(shape)
            for place, (shape, dtype) in zip(self._places, self._kinds, strict=True)
        ]


def shares_pages(device: torch.device) -> bool:
    """Whether copies of an `Original` on this device share the memory that they do not write."""
    return device.type == "cpu" and hasattr(os, "memfd_create")


@contextmanager
def _allocating(size: int) -> Iterator[None]:
    """Say what the system does not give as torch says it."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"can't allocate memory: {size} bytes") from error


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
