"""The Triton kernel of CAKE's eviction, see `methods.cake`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods import cake
from methods.blocks.gpu.ranks import LONGEST, ranked

BLOCK = 1024  # entries that a program reads at once


@triton.jit
def _keep_received(  # type: ignore[no-untyped-def]
    held,
    ids,
    attention,
    scores,
    of_query,
    older,
    scored,
    window,
    kernel,
    length,
    end,
    group,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    held += at * (scored + window)
    ids += at * (older + window)
    attention += at * group * of_query
    scores += at * older
    for start in range(0, older, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        pooled = tl.zeros([BLOCK], tl.float32)
        for step in range(kernel):
            near = slot + step - kernel // 2
            received = tl.zeros([BLOCK], tl.float32)
            for member in range(group):
                inside = (near >= 0) & (near < older)
                received += tl.load(attention + member * of_query + near, mask=inside, other=0.0)
            pooled += received / group
        token = tl.load(ids + slot, mask=slot < older, other=-1)
        ends = (token < end) | ((token >= length - end) & (token < length))
        worth = tl.where(ends & (end > 0), float("inf"), pooled / kernel)
        tl.store(scores + slot, worth, mask=slot < older)
    tl.debug_barrier()  # they are there to be read
    best = ranked(scores, older, scored, held, WIDTH, BLOCK)
    slot = tl.arange(0, WIDTH)
    chosen = tl.load(ids + best, mask=(slot < scored) & (best >= 0), other=-1)
    tl.store(held + slot, chosen, mask=slot < scored)
    for start in range(0, window, BLOCK):
        recent = start + tl.arange(0, BLOCK)
        token = tl.load(ids + older + recent, mask=recent < window, other=-1)
        tl.store(held + scored + recent, token, mask=recent < window)


def keep_received(
    held: Tensor,
    ids: Tensor,
    attention: Tensor,
    window: int,
    kernel: int,
    length: int,
    end: int,
) -> None:
    """See `methods.cake.keep_received`; what is too much for one program is torch's."""
    heads, count = held.shape
    scored, older = count - window, ids.shape[1] - window
    if scored > LONGEST:
        cake.keep_received.reference(held, ids, attention, window, kernel, length, end)
        return
    attention = attention.contiguous()
    scores = torch.empty(heads, older, dtype=torch.float32, device=held.device)
    _keep_received[(heads,)](
        held,
        ids.contiguous(),
        attention,
        scores,
        attention.shape[1],
        older,
        scored,
        window,
        kernel,
        length,
        end,
        len(attention) // heads,
        WIDTH=triton.next_power_of_2(scored),
        BLOCK=BLOCK,
        num_warps=8,
    )
