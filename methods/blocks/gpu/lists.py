"""Parts of Triton kernels that read lists of ranges, and products of queries with centroids."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def range_of(ends, count, slots, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which range each of `slots` is in: the first that ends after it; `count` of none.

    Parameters
    ----------
    ends
        pointer to where each of `count` ranges ends, rising; written before a barrier.
    ROUNDS
        bits of `count`.
    """
    low, high = tl.zeros_like(slots), tl.zeros_like(slots) + count
    for _ in tl.static_range(ROUNDS):
        middle = (low + high) // 2
        later = tl.load(ends + middle, mask=low < high, other=0) <= slots
        low, high = (
            tl.where((low < high) & later, middle + 1, low),
            tl.where((low < high) & later, high, middle),
        )
    return low


@triton.jit
def products_with(rows, query, count, first, size, ROWS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of rows first .. first + ROWS - 1 of `count` with a query [WIDE], in float32.

    `rows`: pointer to vectors of `size` numbers.
    """
    row, at = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    place = rows + row[:, None].to(tl.int64) * size + at[None, :]
    inside = (row < count)[:, None] & (at < size)[None, :]
    return tl.sum(tl.load(place, mask=inside, other=0.0).to(tl.float32) * query[None, :], axis=1)
