"""Triton kernels of pages, see `methods.blocks.pages`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.blocks import pages
from methods.blocks.gpu.ranks import LONGEST, ranked, write_ranges

AT_ONCE = 32  # pages that a program scores
BLOCK = 2048  # scores that a program reads at once


@triton.jit
def _take_in_page(  # type: ignore[no-untyped-def]
    key, low, high, page, heads, pages, size, WIDTH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    widened = tl.load(page + at // heads)
    lane = tl.arange(0, WIDTH)
    new = tl.load(key + at * size + lane, mask=lane < size, other=0.0).to(tl.float32)
    slot = (at * pages + widened) * size + lane
    least = tl.load(low + slot, mask=lane < size, other=0.0).to(tl.float32)
    most = tl.load(high + slot, mask=lane < size, other=0.0).to(tl.float32)
    # a key that is no number makes bounds that are none
    least = tl.where((new < least) | (new != new), new, least)
    most = tl.where((new > most) | (new != new), new, most)
    tl.store(low + slot, least, mask=lane < size)
    tl.store(high + slot, most, mask=lane < size)


def take_in_page(key: Tensor, low: Tensor, high: Tensor, page: Tensor) -> None:
    """See `methods.blocks.pages.take_in`."""
    heads, count = low.shape[1:3]
    size = low.shape[3]
    _take_in_page[(len(low) * heads,)](
        key.contiguous(),
        low,
        high,
        page,
        heads,
        count,
        size,
        WIDTH=triton.next_power_of_2(size),
        num_warps=1,
    )


@triton.jit
def _edge(starts, row, pages, page, page_size):  # type: ignore[no-untyped-def]
    """Where each page of a row begins; after the last ones is no token."""
    first = page.to(tl.int64) * page_size
    if starts is not None:
        at, inside = starts + row * (pages + 1) + page, (page >= 0) & (page <= pages)
        first = tl.load(at, mask=inside, other=0x7FFFFFFFFFFFFFFF)
    return first


@triton.jit
def _page_bounds(  # type: ignore[no-untyped-def]
    query,
    low,
    high,
    tokens,
    starts,
    scores,
    heads,
    group,
    pages,
    page_size,
    size,
    mean: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    lane = tl.arange(0, WIDTH)
    row = at // heads
    there = _edge(starts, row, pages, page, page_size) < tl.load(tokens + row)
    slot = (at * pages + page)[:, None] * size + lane[None, :]
    here = there[:, None] & (page < pages)[:, None] & (lane < size)[None, :]
    least = tl.load(low + slot, mask=here, other=0.0).to(tl.float32)
    most = tl.load(high + slot, mask=here, other=0.0).to(tl.float32)
    summed = tl.zeros([AT_ONCE], tl.float32)
    for member in range(group):
        asks = tl.load(query + (at * group + member) * size + lane, mask=lane < size, other=0.0)
        asks = asks.to(tl.float32)[None, :]
        bound = tl.sum(tl.where(asks > 0, asks * most, asks * least), axis=1)
        bound = tl.where(bound == bound, bound, float("inf"))
        bound = tl.where(there, bound, float("-inf"))
        if mean:
            summed += bound
        else:
            tl.store(scores + (at * group + member) * pages + page, bound, mask=page < pages)
    if mean:
        tl.store(scores + at * pages + page, summed / group, mask=page < pages)


def page_bounds(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    tokens: Tensor,
    starts: Tensor | None,
    page_size: int,
    mean: bool,
) -> Tensor:
    """See `methods.blocks.pages.page_bounds`."""
    heads, count = low.shape[1:3]
    size, group = low.shape[3], query.shape[1] // heads
    lists = heads if mean else query.shape[1]
    scores = torch.empty(len(low), lists, count, dtype=torch.float32, device=query.device)
    _page_bounds[(len(low) * heads, triton.cdiv(count, AT_ONCE))](
        query.contiguous(),
        low,
        high,
        tokens,
        starts,
        scores,
        heads,
        group,
        count,
        page_size,
        size,
        mean=mean,
        WIDTH=triton.next_power_of_2(size),
        AT_ONCE=AT_ONCE,
    )
    return scores


@triton.jit
def write_pages(  # type: ignore[no-untyped-def]
    scores,
    length,
    capacity,
    room,
    starts,
    row,
    out,
    pages,
    page_size,
    most,
    MORE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the tokens of a list's best pages to `out` [most].

    Parameters
    ----------
    scores
        pointer to those of its `pages`.
    length, capacity, room
        tokens of the row, and what it attends.
    MORE
        pages that may be smaller than `page_size`, of those with `starts`.
    STEP
        tokens of a page that are written at once.
    """
    room = tl.minimum(tl.where(capacity >= length, length, room), most).to(tl.int32)
    wanted = tl.minimum((room + page_size - 1) // page_size + MORE, tl.minimum(pages, WIDTH))
    page = ranked(scores, pages, wanted, out, WIDTH, BLOCK)
    first = tl.minimum(_edge(starts, row, pages, page, page_size), length)
    sizes = tl.minimum(_edge(starts, row, pages, page + 1, page_size), length) - first
    sizes = tl.where(page >= 0, sizes, 0).to(tl.int32)
    sizes = tl.where(tl.cumsum(sizes) <= room, sizes, 0)
    write_ranges(out, first, sizes, room, most, STEP, BLOCK)


@triton.jit
def _page_tokens(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    capacities,
    rooms,
    starts,
    ids,
    lists,
    pages,
    page_size,
    most,
    MORE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // lists
    write_pages(
        scores + at * pages,
        tl.load(tokens + row),
        tl.load(capacities + row),
        tl.load(rooms + row),
        starts,
        row,
        ids + at * most,
        pages,
        page_size,
        most,
        MORE,
        16,
        WIDTH,
        BLOCK,
    )


def page_tokens(
    scores: Tensor,
    tokens: Tensor,
    capacities: Tensor,
    rooms: Tensor,
    starts: Tensor | None,
    page_size: int,
    most: int,
) -> Tensor:
    """See `methods.blocks.pages.page_tokens`; what is too much for one program is torch's."""
    lists, count = scores.shape[1:]
    more = 0 if starts is None else pages.SHORTER
    width = min(count, triton.cdiv(most, page_size) + more)
    # the pages of a list are ranked in its own memory
    if width > min(LONGEST, most):
        limits = tokens, capacities, rooms, starts
        return pages.page_tokens.reference(scores, *limits, page_size, most)
    ids = torch.empty(len(scores), lists, most, dtype=torch.int64, device=scores.device)
    _page_tokens[(len(scores) * lists,)](
        scores,
        tokens,
        capacities,
        rooms,
        starts,
        ids,
        lists,
        count,
        page_size,
        most,
        MORE=more,
        WIDTH=triton.next_power_of_2(width),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return ids
