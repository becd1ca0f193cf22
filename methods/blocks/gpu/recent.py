"""The Triton kernel that lists both ends of a row, see `methods.blocks.recent`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024  # ids that a program writes


@triton.jit
def _recent_and_sinks(  # type: ignore[no-untyped-def]
    lengths, counts, sinks, ids, lists, most, AT_ONCE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    newest = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    length, count = tl.load(lengths + at // lists), tl.load(counts + at)
    recent = length - 1 - newest
    first = tl.minimum(recent, count - 1 - newest)
    token = tl.where(newest < count - tl.load(sinks + at // lists), recent, first)
    token = tl.where(newest < tl.minimum(length, count), token, -1)
    tl.store(ids + at * most + newest, token, mask=newest < most)


def recent_and_sinks(lengths: Tensor, counts: Tensor, sinks: Tensor, most: int) -> Tensor:
    """See `methods.blocks.recent.recent_and_sinks`."""
    ids = torch.empty(*counts.shape, most, dtype=torch.int64, device=counts.device)
    grid = counts.numel(), triton.cdiv(most, AT_ONCE)
    lists = counts.shape[1]
    _recent_and_sinks[grid](lengths, counts.contiguous(), sinks, ids, lists, most, AT_ONCE=AT_ONCE)
    return ids
