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
def _drop_least(  # type: ignore[no-untyped-def]
    ids, numbers, counts, worth, limits, lists, groups, room, width, apart, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + at)
    limit = tl.load(limits + at // lists * groups + at % lists * groups // lists)
    least, first = float("inf"), 0
    for start in range(0, width, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        here = tl.load(worth + at * apart + slot, mask=slot < width, other=float("inf"))
        here = tl.where(here != here, float("-inf"), here)
        lowest = tl.min(here)
        its = tl.min(tl.where(here == lowest, slot, width))
        first = tl.where(lowest < least, its, first)
        least = tl.minimum(least, lowest)
    first = tl.where(count > limit, first, room)
    tl.debug_barrier()  # the numbers may be what they are worth
    for start in range(0, room, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        source = tl.minimum(slot + (slot >= first).to(tl.int32), room - 1)
        moved = (slot >= first) & (slot < room)
        token = tl.load(ids + at * room + source, mask=moved, other=-1)
        number = tl.load(numbers + at * room + source, mask=moved, other=0.0)
        tl.debug_barrier()
        tl.store(ids + at * room + slot, token, mask=moved)
        tl.store(numbers + at * room + slot, number, mask=moved)
        tl.debug_barrier()
    tl.store(counts + at, tl.minimum(count, tl.maximum(limit, count - 1)))


def drop_least(ids: Tensor, numbers: Tensor, counts: Tensor, worth: Tensor, limits: Tensor) -> None:
    """See `methods.blocks.held.drop_least`."""
    lists, room = ids.shape[1:]
    if worth.stride(0) != lists * worth.stride(1) or worth.stride(2) != 1:
        worth = worth.contiguous()
    _drop_least[(counts.numel(),)](
        ids,
        numbers,
        counts,
        worth,
        limits,
        lists,
        limits.shape[1],
        room,
        worth.shape[2],
        worth.stride(1),
        BLOCK=BLOCK,
    )
