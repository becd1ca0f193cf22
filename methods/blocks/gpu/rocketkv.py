"""Triton kernels of RocketKV's second stage, see `methods.rocketkv`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods import rocketkv
from methods.blocks.gpu.ranks import LONGEST, ranked, write_ranges

AT_ONCE = 32  # pages that a program looks at
BLOCK = 1024  # pages or ids that a program reads at once


@triton.jit
def _page_logits(  # type: ignore[no-untyped-def]
    query,
    low,
    high,
    tokens,
    page_sizes,
    channels,
    logits,
    scaling,
    heads,
    group,
    pages,
    size,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // heads
    page, lane = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, WIDTH)
    inside = lane < size
    summed, absolute = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for member in range(group):
        place = query + (at * group + member) * size + lane
        asks = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        summed += asks
        absolute += tl.abs(asks)
    # the channels with the largest sums; of equal ones the first
    absolute = tl.where(inside, absolute, -1.0)
    wanted = tl.load(channels + row).to(tl.int32)
    least = tl.sum(tl.where(lane == wanted - 1, tl.sort(absolute, descending=True), 0.0))
    above, equal = absolute > least, absolute == least
    left = wanted - tl.sum(above.to(tl.int32))
    looked = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= left))
    there = page * tl.load(page_sizes + row) < tl.load(tokens + row)
    slot = (at * pages + page)[:, None] * size + lane[None, :]
    mask = there[:, None] & (page < pages)[:, None] & (looked & inside)[None, :]
    upper = tl.load(high + slot, mask=mask & (summed > 0)[None, :], other=0.0).to(tl.float32)
    lower = tl.load(low + slot, mask=mask & (summed <= 0)[None, :], other=0.0).to(tl.float32)
    bound = tl.where((summed > 0)[None, :], upper, lower)
    for member in range(group):
        place = query + (at * group + member) * size + lane
        asks = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        whole = tl.sum(tl.abs(asks))
        covered = tl.sum(tl.where(looked, tl.abs(asks), 0.0))
        share = tl.where(whole == 0, 1.0, covered / tl.where(whole == 0, 1.0, whole))
        share = tl.sqrt(tl.maximum(share, 1e-6))
        product = tl.sum(bound * asks[None, :], axis=1) * scaling / share
        product = tl.where(there, product, float("-inf"))
        tl.store(logits + (at * group + member) * pages + page, product, mask=page < pages)


def page_logits(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    tokens: Tensor,
    page_sizes: Tensor,
    channels: Tensor,
    scaling: float,
) -> Tensor:
    """See `methods.rocketkv.page_logits`."""
    heads, count = low.shape[1:3]
    size, group = low.shape[3], query.shape[1] // heads
    logits = torch.empty(len(low), heads, group, count, dtype=torch.float32, device=query.device)
    _page_logits[(len(low) * heads, triton.cdiv(count, AT_ONCE))](
        query.contiguous(),
        low,
        high,
        tokens,
        page_sizes,
        channels,
        logits,
        scaling,
        heads,
        group,
        count,
        size,
        WIDTH=triton.next_power_of_2(size),
        AT_ONCE=AT_ONCE,
    )
    return logits


@triton.jit
def _best_entries(  # type: ignore[no-untyped-def]
    logits,
    tokens,
    page_sizes,
    limits,
    prompt_ids,
    scores,
    room_of,
    ids,
    heads,
    group,
    pages,
    batch,
    of_prompt,
    most,
    width,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // heads
    held, page_size = tl.load(tokens + row), tl.load(page_sizes + row)
    scores += at * pages
    for member in range(group):
        of_member = logits + (at * group + member) * pages
        largest = tl.full([], float("-inf"), tl.float32)
        for start in range(0, pages, BLOCK):
            page = start + tl.arange(0, BLOCK)
            here = tl.load(of_member + page, mask=page < pages, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(here))
        total = tl.zeros([], tl.float32)
        for start in range(0, pages, BLOCK):
            page = start + tl.arange(0, BLOCK)
            here = tl.load(of_member + page, mask=page < pages, other=float("-inf"))
            sizes = tl.maximum(tl.minimum(held - page * page_size, page_size), 0)
            total += tl.sum(tl.exp(here - largest) * sizes.to(tl.float32))
        all_tokens = largest + tl.log(total)
        for start in range(0, pages, BLOCK):
            page = start + tl.arange(0, BLOCK)
            here = tl.load(of_member + page, mask=page < pages, other=float("-inf"))
            part = tl.exp(here - all_tokens)
            if member > 0:
                part += tl.load(scores + page, mask=page < pages, other=0.0)
            part = tl.where(page * page_size < held, part, float("-inf"))
            tl.store(scores + page, part, mask=page < pages)
        tl.debug_barrier()
    room = tl.load(limits + batch + row)
    room = tl.where(held <= tl.load(limits + row), held, room)
    room = tl.minimum(room, most).to(tl.int32)
    retained, length = tl.load(limits + 2 * batch + row), tl.load(limits + 3 * batch + row)
    wanted = tl.minimum((room + page_size - 1) // page_size + 1, tl.minimum(width, pages))
    wanted = wanted.to(tl.int32)
    best = ranked(scores, pages, wanted, room_of + at * width, WIDTH, BLOCK)
    sizes = tl.maximum(tl.minimum(held - best * page_size, page_size), 0)
    sizes = tl.where(best >= 0, sizes, 0).to(tl.int32)
    out = ids + at * most
    write_ranges(out, best * page_size, sizes, room, most, 8, BLOCK)
    tl.debug_barrier()  # slots, of which each becomes an id
    for start in range(0, most, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        slot = tl.load(out + entry, mask=entry < most, other=-1)
        prompt = (slot >= 0) & (slot < retained)
        token = tl.load(prompt_ids + at * of_prompt + slot, mask=prompt, other=-1)
        token = tl.where(slot >= retained, slot - retained + length, token)
        tl.debug_barrier()
        tl.store(out + entry, token, mask=entry < most)


def best_entries(
    logits: Tensor,
    tokens: Tensor,
    page_sizes: Tensor,
    limits: Tensor,
    prompt_ids: Tensor,
    most: int,
    pages: int,
) -> Tensor:
    """See `methods.rocketkv.best_entries`; what is too much for one program is torch's."""
    batch, heads = logits.shape[:2]
    group, count = logits.shape[2:]
    width = min(pages, count)
    if width > LONGEST:
        return rocketkv.best_entries.reference(
            logits, tokens, page_sizes, limits, prompt_ids, most, pages
        )
    ids = torch.empty(batch, heads, most, dtype=torch.int64, device=logits.device)
    scores = torch.empty(batch * heads, count, dtype=torch.float32, device=logits.device)
    room = torch.empty(batch * heads, width, dtype=torch.int64, device=logits.device)
    _best_entries[(batch * heads,)](
        logits,
        tokens,
        page_sizes,
        limits,
        prompt_ids,
        scores,
        room,
        ids,
        heads,
        group,
        count,
        batch,
        prompt_ids.shape[2],
        most,
        width,
        WIDTH=triton.next_power_of_2(width),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return ids
