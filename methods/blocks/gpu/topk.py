"""The Triton kernel that ranks lists of scores, see `methods.blocks.topk`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.blocks import topk
from methods.blocks.gpu.ranks import LONGEST, ranked

BLOCK = 2048  # scores that a program reads at once


@triton.jit
def _ranked_ids(  # type: ignore[no-untyped-def]
    scores, counts, ids, count, most, lists, groups, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    wanted = tl.minimum(most, count)
    if counts is not None:
        of_list = at // lists * groups + at % lists * groups // lists
        wanted = tl.minimum(tl.load(counts + of_list), wanted).to(tl.int32)
    room = ids + at * most
    best = ranked(scores + at * count, count, wanted, room, WIDTH, BLOCK)
    slot = tl.arange(0, WIDTH)
    tl.store(room + slot, best, mask=slot < most)


def ranked_ids(scores: Tensor, counts: Tensor | None, most: int) -> Tensor:
    """See `methods.blocks.topk.ranked_ids`; what is too much for one program is torch's."""
    if most > LONGEST:
        return topk.ranked_ids.reference(scores, counts, most)
    ids = torch.empty(*scores.shape[:2], most, dtype=torch.int64, device=scores.device)
    if not ids.numel():
        return ids
    lists, groups = scores.shape[1], 1 if counts is None else counts.shape[1]
    _ranked_ids[(len(scores) * lists,)](
        scores.float().contiguous(),
        counts,
        ids,
        scores.shape[2],
        most,
        lists,
        groups,
        WIDTH=triton.next_power_of_2(most),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return ids
