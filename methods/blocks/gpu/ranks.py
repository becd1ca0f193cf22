"""Parts of Triton kernels that choose: the best of a list of scores, by a histogram of their bits.

One program has one list. A score's rank is its bits, turned so that greater scores have greater
ones; of equal scores the smaller id is better, and what is no number is as bad as -inf. Each of
four passes over the scores settles 8 bits of the least rank that is among the best.
"""

from __future__ import annotations

import triton
import triton.language as tl

LONGEST = 2048  # entries that one program sorts
NOTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # sorts after every packed entry
WORST = tl.constexpr(0x007FFFFF)  # rank of -inf


@triton.jit
def rank(scores):  # type: ignore[no-untyped-def]
    """Ranks, uint32, of float32 scores."""
    plain = tl.where(scores == 0, 0.0, scores)  # zeros of both signs are equal
    bits = tl.where(scores != scores, float("-inf"), plain).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def least_rank(scores, count, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rank of the last of the `wanted` best, and how many of that rank are among them.

    Parameters
    ----------
    scores
        pointer to `count` float32 scores.
    wanted
        at most `count`; 0: no score has the rank.
    BLOCK
        scores that are read at once.
    """
    least = tl.full([], 0, tl.uint32)
    left = wanted
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ranks = rank(tl.load(scores + at, mask=at < count, other=0.0))
            here = at < count
            if shift < 24:
                here = here & (((ranks ^ least) >> (shift + 8)) == 0)
            counts += tl.histogram(((ranks >> shift) & 255).to(tl.int32), 256, mask=here)
        as_good = tl.sum(counts) - tl.cumsum(counts) + counts
        chosen = tl.maximum(tl.sum((as_good >= left).to(tl.int32)) - 1, 0)
        left -= tl.sum(tl.where(tl.arange(0, 256) > chosen, counts, 0))
        least = least | (chosen.to(tl.uint32) << shift)
    return least, left


@triton.jit
def ranked(scores, count, wanted, room, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids of the `wanted` best of `count` scores, best first, [WIDTH] int64: -1 after the last, and
    for a score of -inf.

    Parameters
    ----------
    scores
        pointer to float32.
    wanted
        at most `count`, and WIDTH.
    room
        pointer to `wanted` int64, written: a place that this program alone uses.
    """
    least, equals = least_rank(scores, count, wanted, BLOCK)
    written, tied = 0, 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ranks = rank(tl.load(scores + at, mask=at < count, other=0.0))
        equal = (at < count) & (ranks == least)
        turn = tied + tl.cumsum(equal.to(tl.int32))
        best = ((at < count) & (ranks > least)) | (equal & (turn <= equals))
        slot = written + tl.cumsum(best.to(tl.int32)) - 1
        # worse ranks, then later ids, are greater
        tl.store(room + slot, ((ranks ^ 0xFFFFFFFF).to(tl.int64) << 31) | at, mask=best)
        written += tl.sum(best.to(tl.int32))
        tied += tl.sum(equal.to(tl.int32))
    tl.debug_barrier()  # what the other threads wrote is there
    slot = tl.arange(0, WIDTH)
    packed = tl.sort(tl.load(room + slot, mask=slot < wanted, other=NOTHING))
    tl.debug_barrier()  # all have read
    worst: tl.constexpr = 0xFFFFFFFF - WORST
    return tl.where((packed >> 31) < worst, packed & 0x7FFFFFFF, -1)


@triton.jit
def write_ranges(out, starts, sizes, room, most, STEP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the numbers starts, starts + 1, ... of every range, in their order: [most] int64.

    Parameters
    ----------
    starts, sizes
        [WIDTH] int64 and int32; a range may be empty.
    room
        numbers that are written at most; -1 follows.
    STEP
        numbers of a range that are written at once.
    """
    begin = tl.cumsum(sizes) - sizes
    for done in range(0, tl.max(sizes), STEP):
        step = done + tl.arange(0, STEP)
        slot = begin[:, None] + step[None, :]
        there = (step[None, :] < sizes[:, None]) & (slot < room)
        tl.store(out + slot, starts[:, None] + step[None, :], mask=there)
    written = tl.minimum(tl.sum(sizes), room)
    for start in range(0, most, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(out + slot, tl.full([BLOCK], -1, tl.int64), mask=(slot >= written) & (slot < most))
