"""Triton kernels of lists that tokens come to and leave, see `methods.blocks.held`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens of a list that a program moves at once


@triton.jit
def _append_token(ids, numbers, counts, seen, number, lists, room):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + at)
    tl.store(ids + at * room + count, tl.load(seen + at // lists) - 1)
    tl.store(numbers + at * room + count, number)
    tl.debug_barrier()  # all threads have read it
    tl.store(counts + at, count + 1)


def append_token(ids: Tensor, numbers: Tensor, counts: Tensor, seen: Tensor, number: float) -> None:
    """See `methods.blocks.held.append_token`."""
    lists, room = ids.shape[1:]
    _append_token[(counts.numel(),)](
        ids, numbers, counts, seen, float(number), lists, room, num_warps=1
    )


@triton.jit
def _received(attention, count, slot, width, group):  # type: ignore[no-untyped-def]
    """The mean attention that a group of query heads gives to slots; of the newest without end."""
    total = tl.zeros(slot.shape, tl.float32)
    for member in range(group):
        total += tl.load(attention + member * width + slot, mask=slot < width, other=0.0)
    return tl.where(slot == count - 1, float("inf"), total / group)


@triton.jit
def _page(token, origin, page_size):  # type: ignore[no-untyped-def]
    """The page of each token: those before the origin have negative numbers."""
    place = token - origin
    return tl.where(place < 0, -1 - (-1 - place) // page_size, place // page_size)


@triton.jit
def _worth(  # type: ignore[no-untyped-def]
    ids, numbers, slot, width, row, seen, recent, first, lengths, ends
):
    """The number of each slot's token, infinite for one that stays."""
    worth = tl.load(numbers + slot, mask=slot < width, other=float("inf"))
    token = tl.load(ids + slot, mask=slot < width, other=-1)
    stays = slot >= width
    if recent is not None:
        stays = stays | (token >= seen - tl.load(recent + row))
    if first is not None:
        stays = stays | (token < tl.load(first + row))
    if ends is not None:
        length, end = tl.load(lengths + row), tl.load(ends + row)
        stays = stays | (token < end) | ((token >= length - end) & (token < length))
    return tl.where(stays, float("inf"), tl.where(worth != worth, float("-inf"), worth))


@triton.jit
def _drop(  # type: ignore[no-untyped-def]
    ids,
    numbers,
    counts,
    row,
    now,
    begin,
    recent,
    first,
    lengths,
    ends,
    room,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is worth least goes from a list, and those after it close up."""
    least, best = float("inf"), 0
    for start in range(0, width, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        worth = _worth(ids, numbers, slot, width, row, now, recent, first, lengths, ends)
        lowest = tl.min(worth)
        its = tl.min(tl.where(worth == lowest, slot, width))
        best = tl.where(lowest < least, its, best)
        least = tl.minimum(least, lowest)
    size = 1
    if PAGE > 1:
        page, size = _page(tl.load(ids + best), begin, PAGE), 0
        for start in range(0, width, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            worth = _worth(ids, numbers, slot, width, row, now, recent, first, lengths, ends)
            token = tl.load(ids + slot, mask=slot < width, other=-1)
            goes = (token >= 0) & (_page(token, begin, PAGE) == page)
            size += tl.sum((goes & (tl.abs(worth) < float("inf"))).to(tl.int32))
    tl.debug_barrier()  # all have read what moves now
    for start in range(0, room, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        source = tl.minimum(slot + size, room - 1)
        moved = (slot >= best) & (slot < room)
        token = tl.load(ids + source, mask=moved, other=-1)
        number = tl.load(numbers + source, mask=moved, other=0.0)
        tl.debug_barrier()
        tl.store(ids + slot, token, mask=moved)
        tl.store(numbers + slot, number, mask=moved)
        tl.debug_barrier()
    tl.store(counts, tl.load(counts) - size)


@triton.jit
def _evict_tokens(  # type: ignore[no-untyped-def]
    ids,
    numbers,
    counts,
    attention,
    seen,
    limits,
    origin,
    threshold,
    recent,
    first,
    lengths,
    ends,
    lists,
    limited,
    group,
    room,
    width,
    HOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // lists
    count, now = tl.load(counts + at), tl.load(seen + row)
    ids += at * room
    numbers += at * room
    attention += at * group * width
    begin = count * 0
    if origin is not None:
        begin = tl.load(origin + row)
    if HOW > 0:
        for start in range(0, width, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            here = slot < width
            number = tl.load(numbers + slot, mask=here, other=float("inf"))
            token = tl.load(ids + slot, mask=here, other=-1)
            if HOW == 3:
                received = _received(attention, count, slot, width, group)
                page = _page(token, begin, PAGE)
                for step in range(1, PAGE):
                    for side in tl.static_range(-1, 2, 2):
                        other = slot + side * step
                        there = (other >= 0) & (other < width)
                        its = tl.load(ids + other, mask=there, other=-1)
                        same = there & (_page(its, begin, PAGE) == page) & (its >= 0)
                        more = _received(
                            attention, count, tl.where(same, other, width), width, group
                        )
                        received = tl.maximum(received, tl.where(same, more, 0.0))
                stamped = (token >= 0) & (received > tl.load(threshold + row))
                number = tl.where(stamped, (now - begin).to(tl.float32), number)
            else:
                # nothing is the newest here
                received = _received(attention, -1, slot, width, group)
                if HOW == 1:
                    number += received
                else:
                    number = tl.where(token >= begin, received, number)
            tl.store(numbers + slot, number, mask=here)
        tl.debug_barrier()  # they are there to be read
    if limits is not None:  # noqa: SIM102  (known when it is compiled)
        if count > tl.load(limits + row * limited + at % lists * limited // lists):
            _drop(
                ids,
                numbers,
                counts + at,
                row,
                now,
                begin,
                recent,
                first,
                lengths,
                ends,
                room,
                width,
                PAGE,
                BLOCK,
            )


def evict_tokens(
    ids: Tensor,
    numbers: Tensor,
    counts: Tensor,
    attention: Tensor,
    width: int,
    seen: Tensor,
    how: int,
    limits: Tensor | None,
    origin: Tensor | None,
    threshold: Tensor | None,
    page_size: int,
    recent: Tensor | None,
    first: Tensor | None,
    lengths: Tensor | None,
    ends: Tensor | None,
) -> None:
    """See `methods.blocks.held.evict_tokens`."""
    lists, room = ids.shape[1:]
    _evict_tokens[(counts.numel(),)](
        ids,
        numbers,
        counts,
        attention.contiguous(),
        seen,
        limits,
        origin,
        threshold,
        recent,
        first,
        lengths,
        ends,
        lists,
        0 if limits is None else limits.shape[1],
        attention.shape[1] // lists,
        room,
        width,
        HOW=how,
        PAGE=page_size,
        BLOCK=BLOCK,
    )
