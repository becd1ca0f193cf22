"""The Triton kernel of attention that is seen, see `kvbench.attention.torch`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 32  # entries that a program reads


@triton.jit
def _attend_seen(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    slots,
    present,
    out,
    weights,
    scaling,
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
        logit = tl.sum(key.to(tl.float32) * asks[None, :], axis=1) * scaling
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
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, present: Tensor, scaling: float
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
        out,
        weights,
        scaling,
        query_heads // lists,
        count,
        size,
        WIDTH=triton.next_power_of_2(size),
        AT_ONCE=AT_ONCE,
    )
    return out, weights
