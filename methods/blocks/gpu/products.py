"""The Triton kernel of products of queries with keys, see `methods.blocks.products`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 64  # keys that a program reads


@triton.jit
def _past_products(  # type: ignore[no-untyped-def]
    query,
    keys,
    seen,
    logits,
    heads,
    group,
    count,
    size,
    of_row,
    of_head,
    apart,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = at // heads
    token, lane = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, WIDTH)
    past = (token < tl.load(seen + row)) & (token < count)
    place = row * of_row + at % heads * of_head + token.to(tl.int64) * apart
    mask = past[:, None] & (lane < size)[None, :]
    key = tl.load(keys + place[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    for member in range(group):
        asks = tl.load(query + (at * group + member) * size + lane, mask=lane < size, other=0.0)
        product = tl.sum(key * asks.to(tl.float32)[None, :], axis=1)
        product = tl.where(past, product, float("-inf"))
        tl.store(logits + (at * group + member) * count + token, product, mask=token < count)


def past_products(query: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """See `methods.blocks.products.past_products`."""
    heads, count = keys.shape[1:3]
    size, group = keys.shape[3], query.shape[1] // heads
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    logits = torch.empty(len(keys), heads, group, count, dtype=torch.float32, device=keys.device)
    _past_products[(len(keys) * heads, triton.cdiv(count, AT_ONCE))](
        query.contiguous(),
        keys,
        seen,
        logits,
        heads,
        group,
        count,
        size,
        *keys.stride()[:3],
        WIDTH=triton.next_power_of_2(size),
        AT_ONCE=AT_ONCE,
    )
    return logits
