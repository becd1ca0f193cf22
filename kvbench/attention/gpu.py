"""Triton kernels of attention: seen, see `kvbench.attention.torch`, and around FlashInfer's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels.gpu import capped

AT_ONCE = 32  # entries that a program reads
PAGES = 1024  # pages that a program lists


@triton.jit
def _attend_seen(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    slots,
    present,
    log_weights,
    out,
    weights,
    scaling,
    softcap,
    group,
    count,
    size,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < size
    asks = tl.load(query + at * size + lane, mask=inside, other=0.0).to(tl.float32)
    slots += at // group * count
    present += at // group * count
    weights += at * count
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, count, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        here = tl.load(present + entry, mask=entry < count, other=0) != 0
        slot = tl.load(slots + entry, mask=here, other=0)
        mask = here[:, None] & inside[None, :]
        key = tl.load(keys + slot[:, None] * size + lane[None, :], mask=mask, other=0.0)
        logit = capped(tl.sum(key.to(tl.float32) * asks[None, :], axis=1) * scaling, softcap)
        if log_weights is not None:
            place = log_weights + at * count + entry
            logit += tl.load(place, mask=here, other=0.0).to(tl.float32)
        logit = tl.where(here, logit, float("-inf"))
        tl.store(weights + entry, logit, mask=entry < count)
        further = tl.maximum(largest, tl.max(logit))
        safe = tl.where(further == float("-inf"), 0.0, further)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(logit - safe))
        largest = further
    tl.debug_barrier()
    attended = tl.zeros([WIDTH], tl.float32)
    for start in range(0, count, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        here = tl.load(present + entry, mask=entry < count, other=0) != 0
        logit = tl.load(weights + entry, mask=entry < count, other=float("-inf"))
        weight = tl.where(here, tl.exp(logit - largest) / total, 0.0)
        tl.debug_barrier()
        tl.store(weights + entry, weight, mask=entry < count)
        slot = tl.load(slots + entry, mask=here, other=0)
        mask = here[:, None] & inside[None, :]
        value = tl.load(values + slot[:, None] * size + lane[None, :], mask=mask, other=0.0)
        attended += tl.sum(value.to(tl.float32) * weight[:, None], axis=0)
    tl.store(out + at * size + lane, attended.to(out.dtype.element_ty), mask=inside)


def attend_seen(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    present: Tensor,
    log_weights: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """See `kvbench.attention.torch.attend_seen`."""
    batch, query_heads = query.shape[:2]
    lists, count = slots.shape[1:]
    size = query.shape[3]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    weights = torch.empty(batch, query_heads, count, dtype=torch.float32, device=query.device)
    _attend_seen[(batch * query_heads,)](
        query.contiguous(),
        keys,
        values,
        slots,
        present,
        None if log_weights is None else log_weights.contiguous(),
        out,
        weights,
        scaling,
        softcap,
        query_heads // lists,
        count,
        size,
        WIDTH=triton.next_power_of_2(size),
        AT_ONCE=AT_ONCE,
    )
    return out, weights


@triton.jit
def _list_pages(  # type: ignore[no-untyped-def]
    first, filled, listed, last, page, pages, count, PAGES: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    number = tl.minimum(tl.load(first + at) // page + entry, pages - 1)
    tl.store(listed + at * count + entry, number.to(tl.int32), mask=entry < count)
    if tl.program_id(1) == 0:
        tl.store(last + at, (tl.load(filled + at) - (count - 1) * page).to(tl.int32))


def list_pages(
    first: Tensor, filled: Tensor, listed: Tensor, last: Tensor, page: int, pages: int
) -> None:
    """See `kvbench.attention.flashinfer.list_pages`."""
    lists, count = listed.shape
    grid = lists, triton.cdiv(count, PAGES)
    _list_pages[grid](first, filled, listed, last, page, pages, count, PAGES=PAGES)


@triton.jit
def _list_slots(  # type: ignore[no-untyped-def]
    slots, present, listed, last, count, pages, PAGES: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    length = 0
    for start in range(0, count, PAGES):
        entry = start + tl.arange(0, PAGES)
        here = entry < count
        slot = tl.load(slots + at * count + entry, mask=here, other=0)
        tl.store(listed + at * pages + entry, slot.to(tl.int32), mask=here)
        if present is not None:
            here = tl.load(present + at * count + entry, mask=here, other=0) != 0
        length += tl.sum(here.to(tl.int32))
    tl.store(last + at, length - (pages - 1))


def list_slots(slots: Tensor, present: Tensor | None, listed: Tensor, last: Tensor) -> None:
    """See `kvbench.attention.flashinfer.list_slots`."""
    present = None if present is None else present.contiguous()
    count, pages = slots.shape[1], listed.shape[1]
    _list_slots[(len(slots),)](slots.contiguous(), present, listed, last, count, pages, PAGES=PAGES)


@triton.jit
def _with_extra(  # type: ignore[no-untyped-def]
    attended,
    sums,
    query,
    keys,
    values,
    log_weights,
    out,
    scaling,
    softcap,
    group,
    count,
    size,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < size
    asks = tl.load(query + at * size + lane, mask=inside, other=0.0).to(tl.float32)
    both = tl.load(attended + at * size + lane, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(sums + at) * 0.6931471805599453
    total = tl.full([], 1.0, tl.float32)
    for start in range(0, count, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        weight = tl.load(log_weights + at * count + entry, mask=entry < count, other=float("-inf"))
        place = (at // group * count + entry)[:, None] * size + lane[None, :]
        mask = (entry < count)[:, None] & inside[None, :]
        key = tl.load(keys + place, mask=mask, other=0.0).to(tl.float32)
        logit = capped(tl.sum(key * asks[None, :], axis=1) * scaling, softcap)
        logit += weight.to(tl.float32)
        further = tl.maximum(largest, tl.max(logit))
        part, before = tl.exp(logit - further), tl.exp(largest - further)
        value = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
        both = both * before + tl.sum(value * part[:, None], axis=0)
        total = total * before + tl.sum(part)
        largest = further
    tl.store(out + at * size + lane, (both / total).to(out.dtype.element_ty), mask=inside)


def with_extra(
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weights: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """See `kvbench.attention.flashinfer.with_extra`."""
    batch, query_heads, size = query.shape[0], query.shape[1], query.shape[3]
    both, count = torch.empty_like(out), keys.shape[2]
    _with_extra[(batch * query_heads,)](
        out.contiguous(),
        sums.contiguous(),
        query.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        log_weights.contiguous(),
        both,
        scaling,
        softcap,
        query_heads // keys.shape[1],
        count,
        size,
        WIDTH=triton.next_power_of_2(size),
        AT_ONCE=min(16, triton.next_power_of_2(count)),
    )
    return both
