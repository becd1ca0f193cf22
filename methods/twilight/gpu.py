"""Triton kernels of Twilight's keys in four bits, see `methods.twilight.estimate`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu import capped
from methods.blocks.gpu.pages import write_pages
from methods.blocks.gpu.ranks import LONGEST, NOTHING, rank
from methods.blocks.pages import SHORTER
from methods.twilight import estimate

AT_ONCE = 32  # keys that a program reads at once
BLOCK = 2048  # scores that it reads at once
MOST = 8192  # tokens that it sorts


@triton.jit
def _numbers(key, low, step):  # type: ignore[no-untyped-def]
    """Codes of numbers; of two that are as near the even one."""
    code = tl.div_rn(key - low, step) + 8388608.0 - 8388608.0
    return tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.uint8)


@triton.jit
def _widened(side, page, new, lane, inside, HIGHER: tl.constexpr):  # type: ignore[no-untyped-def]
    """A key that is no number makes bounds that are none."""
    bound = tl.load(side + page + lane, mask=inside, other=0.0).to(tl.float32)
    beyond = (new > bound) if HIGHER else (new < bound)
    tl.store(side + page + lane, tl.where(beyond | (new != new), new, bound), mask=inside)


@triton.jit
def _take_in_coded(  # type: ignore[no-untyped-def]
    key, seen, codes, steps, low, high, page, heads, slots, pages, half, HALF: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    row, lane = at // heads, tl.arange(0, HALF)
    inside = lane < half
    even = tl.load(key + at * 2 * half + 2 * lane, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(key + at * 2 * half + 2 * lane + 1, mask=inside, other=0.0).to(tl.float32)
    least = tl.min(tl.where(inside, tl.minimum(even, odd), float("inf")))
    most = tl.max(tl.where(inside, tl.maximum(even, odd), float("-inf")))
    step = tl.maximum(tl.div_rn(most - least, 15.0), 1e-9)
    slot = at * slots + tl.load(seen + row) - 1
    code = _numbers(even, least, step) | (_numbers(odd, least, step) << 4)
    tl.store(codes + slot * half + lane, code, mask=inside)
    tl.store(steps + 2 * slot, step)
    tl.store(steps + 2 * slot + 1, least)
    if low is not None:
        bounds = (at * pages + tl.load(page + row)) * 2 * half
        _widened(low, bounds, even, 2 * lane, inside, False)
        _widened(low, bounds, odd, 2 * lane + 1, inside, False)
        _widened(high, bounds, even, 2 * lane, inside, True)
        _widened(high, bounds, odd, 2 * lane + 1, inside, True)


def take_in_coded(
    key: Tensor,
    seen: Tensor,
    codes: Tensor,
    steps: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    page: Tensor | None,
) -> None:
    """See `methods.twilight.estimate.take_in_coded`."""
    slots, half = codes.shape[2:]
    heads = codes.shape[1]
    pages = 0 if low is None else low.shape[2]
    _take_in_coded[(len(codes) * heads,)](
        key.contiguous(),
        seen,
        codes,
        steps,
        low,
        high,
        page,
        heads,
        slots,
        pages,
        half,
        HALF=triton.next_power_of_2(half),
        num_warps=1,
    )


@triton.jit
def _estimate(  # type: ignore[no-untyped-def]
    query,
    codes,
    steps,
    ids,
    logits,
    most,
    half,
    scaling,
    softcap,
    HALF: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the logits of the tokens `ids` [most]; -inf for none."""
    lane = tl.arange(0, HALF)
    inside = lane < half
    even = tl.load(query + 2 * lane, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(query + 2 * lane + 1, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, most, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        token = tl.load(ids + entry, mask=entry < most, other=-1)
        there = token >= 0
        place = token[:, None] * half + lane[None, :]
        code = tl.load(codes + place, mask=there[:, None] & inside[None, :], other=0)
        step = tl.load(steps + 2 * token, mask=there, other=0.0)[:, None]
        low = tl.load(steps + 2 * token + 1, mask=there, other=0.0)[:, None]
        first = (code & 15).to(tl.float32) * step + low
        second = (code >> 4).to(tl.float32) * step + low
        logit = tl.sum(first * even[None, :] + second * odd[None, :], axis=1)
        logit = capped(logit * scaling, softcap)
        tl.store(logits + entry, tl.where(there, logit, float("-inf")), mask=entry < most)


@triton.jit
def _prune(  # type: ignore[no-untyped-def]
    ids, logits, most, share, counted, SORTED: tl.constexpr
):
    """Leave of the tokens `ids` [most] those with the largest logits, which hold the share."""
    slot = tl.arange(0, SORTED)
    token = tl.load(ids + slot, mask=slot < most, other=-1)
    logit = tl.load(logits + slot, mask=slot < most, other=float("-inf"))
    ranks = rank(tl.where(logit != logit, float("inf"), logit))
    packed = ((ranks ^ 0xFFFFFFFF).to(tl.int64) << 31) | slot
    packed = tl.sort(tl.where(token >= 0, packed, NOTHING))
    valid = packed != NOTHING
    at = packed & 0x7FFFFFFF
    logit = tl.load(logits + at, mask=valid, other=float("-inf")).to(tl.float64)
    weight = tl.where(valid, tl.exp(logit - tl.max(logit)), 0.0)
    before = tl.cumsum(weight) - weight
    # what is no number is attended, and seen
    kept = valid & ~(before >= share * tl.sum(weight))
    token = tl.load(ids + at, mask=kept, other=-1)
    tl.debug_barrier()  # all have read
    tl.store(ids + slot, token, mask=slot < most)
    tl.atomic_add(counted, tl.sum(valid.to(tl.int64)))
    tl.atomic_add(counted + 1, tl.sum(kept.to(tl.int64)))


@triton.jit
def _pruned_pages(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    capacities,
    rooms,
    starts,
    query,
    codes,
    steps,
    shares,
    counted,
    ids,
    logits,
    lists,
    heads,
    slots,
    pages,
    page_size,
    most,
    half,
    scaling,
    softcap,
    MORE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SORTED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // lists
    out, own = ids + at * most, logits + at * most
    write_pages(
        scores + at * pages,
        tl.load(tokens + row),
        tl.load(capacities + row),
        tl.load(rooms + row),
        starts,
        row,
        out,
        pages,
        page_size,
        most,
        MORE,
        STEP,
        WIDTH,
        BLOCK,
    )
    tl.debug_barrier()  # tokens are there to be read
    first = (row * heads + at % lists * heads // lists) * slots
    asks = query + at * 2 * half
    codes += first * half
    steps += first * 2
    _estimate(asks, codes, steps, out, own, most, half, scaling, softcap, HALF, AT_ONCE)
    tl.debug_barrier()  # and their logits
    _prune(out, own, most, tl.load(shares + row), counted, SORTED)


def pruned_pages(
    scores: Tensor,
    tokens: Tensor,
    capacities: Tensor,
    rooms: Tensor,
    starts: Tensor | None,
    page_size: int,
    most: int,
    query: Tensor,
    codes: Tensor,
    steps: Tensor,
    scaling: float,
    softcap: float | None,
    shares: Tensor,
    counted: Tensor,
) -> Tensor:
    """See `methods.twilight.estimate.pruned_pages`; what is too much for one program is torch's."""
    lists, count = scores.shape[1:]
    slots, half = codes.shape[2:]
    heads = codes.shape[1]
    more = 0 if starts is None else SHORTER
    width = min(count, triton.cdiv(most, page_size) + more)
    if width > min(LONGEST, most) or most > MOST:
        ranges = scores, tokens, capacities, rooms, starts, page_size, most
        pruning = query, codes, steps, scaling, softcap, shares, counted
        return estimate.pruned_pages.reference(*ranges, *pruning)
    ids = torch.empty(len(scores), lists, most, dtype=torch.int64, device=scores.device)
    logits = torch.empty(ids.shape, dtype=torch.float32, device=scores.device)
    _pruned_pages[(len(scores) * lists,)](
        scores,
        tokens,
        capacities,
        rooms,
        starts,
        query.contiguous(),
        codes,
        steps,
        shares,
        counted,
        ids,
        logits,
        lists,
        heads,
        slots,
        count,
        page_size,
        most,
        half,
        float(scaling),
        softcap,
        MORE=more,
        STEP=min(16, triton.next_power_of_2(page_size)),
        WIDTH=triton.next_power_of_2(width),
        BLOCK=BLOCK,
        HALF=triton.next_power_of_2(half),
        AT_ONCE=AT_ONCE,
        SORTED=triton.next_power_of_2(most),
        num_warps=8 if most <= LONGEST else 16,
    )
    return ids
