"""Triton kernels of what is attended after a prompt was scored, see `methods.blocks.scorer`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024  # entries that a program writes


@triton.jit
def _newest(seen, limits, row, batch):  # type: ignore[no-untyped-def]
    """The first token of a row that is attended without a score, and how many are."""
    now, first = tl.load(seen + row), tl.load(limits + row)
    pushed = tl.maximum(now - tl.load(limits + 3 * batch + row), 0)
    return first + pushed, now - tl.load(limits + 2 * batch + row) - first - pushed


@triton.jit
def _newest_and_scored(  # type: ignore[no-untyped-def]
    scored, seen, limits, ids, batch, heads, size, most, AT_ONCE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    row = at // heads
    begin, count = _newest(seen, limits, row, batch)
    place = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = begin + place
    last, end = tl.load(limits + batch + row), tl.load(limits + 2 * batch + row)
    token += tl.where(token >= last, end, 0)
    older = place - count
    there = (older >= 0) & (older < size)
    id = tl.load(scored + at * size + older, mask=there, other=-1)
    tl.store(ids + at * most + place, tl.where(older < 0, token, id), mask=place < most)


def newest_and_scored(scored: Tensor, seen: Tensor, limits: Tensor, most: int) -> Tensor:
    """See `methods.blocks.scorer.newest_and_scored`."""
    batch, (heads, size) = len(scored), scored.shape[1:]
    ids = torch.empty(batch, heads, most, dtype=torch.int64, device=scored.device)
    grid = batch * heads, triton.cdiv(most, AT_ONCE)
    sizes = batch, heads, size, most
    _newest_and_scored[grid](scored.contiguous(), seen, limits, ids, *sizes, AT_ONCE=AT_ONCE)
    return ids


@triton.jit
def _scored_weights(  # type: ignore[no-untyped-def]
    weights, seen, limits, out, batch, heads, group, size, most, AT_ONCE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    begin, count = _newest(seen, limits, at // heads, batch)
    place = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    there = (place >= count) & (place - count < size)
    weight = tl.load(weights + at * size + place - count, mask=there, other=0.0)
    for member in range(group):
        tl.store(out + (at * group + member) * most + place, weight, mask=place < most)


def scored_weights(weights: Tensor, seen: Tensor, limits: Tensor, group: int, most: int) -> Tensor:
    """See `methods.blocks.scorer.scored_weights`."""
    batch, (heads, size) = len(weights), weights.shape[1:]
    out = torch.empty(batch, heads * group, most, dtype=weights.dtype, device=weights.device)
    grid = batch * heads, triton.cdiv(most, AT_ONCE)
    sizes = batch, heads, group, size, most
    _scored_weights[grid](weights.contiguous(), seen, limits, out, *sizes, AT_ONCE=AT_ONCE)
    return out
