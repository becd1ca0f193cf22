"""Ranking and joining lists of ids: top-k with a count per row, and the union over a
query group.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvbench.kernels.operators import operator
from methods.blocks.kernels import KERNELS, is_compiled

# whose choice it is: the group's, or that of each query head
Granularity = Literal["kv_head", "query_head"]
Lists = Granularity | Literal["layer"]  # whose lists there are: one for all heads of a layer, too
WORTH_A_THREAD = 1 << 15  # scores; fewer are ranked before another thread has begun


def top_earliest(
    scores: torch.Tensor, most: int, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Ids of the best scores, best first; of equal ones the smaller id, in any batch.

    Rows with fewer choosable entries than asked for get what there is.

    Parameters
    ----------
    scores
        [B, H, n]; -inf marks what must not be chosen.
    most
        entries of a row at most.
    counts
        [B] or [B, H] int64 on the device of the scores, entries of each row or list; None: `most`
        of all.

    Returns
    -------
    torch.Tensor
        [B, H, min(most, n)] int64, trailing -1.
    """
    most, rows = min(most, scores.shape[2]), len(scores)
    if not is_compiled(scores) or scores.dtype != torch.float32:
        return ranked_ids(scores, None if counts is None else counts.view(rows, -1), most)
    best = torch.empty(*scores.shape[:2], most, dtype=torch.int64)
    if counts is None:
        limits = torch.full((rows, 1), most)
    else:
        limits = counts.view(rows, -1).contiguous()
    threads = min(torch.get_num_threads(), max(1, scores.numel() // WORTH_A_THREAD))
    KERNELS.best_lists(threads, scores.contiguous(), limits, best)
    return best


@operator("methods.blocks.gpu.topk")
def ranked_ids(scores: torch.Tensor, counts: torch.Tensor | None, most: int) -> torch.Tensor:
    """`top_earliest` with counts [B, 1 or H]; what is no number is not chosen."""
    if scores.is_floating_point():
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    ids = torch.where(ranked.values[..., :most] > -torch.inf, ranked.indices[..., :most], -1)
    return _limited(ids, counts)


def _limited(ids: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Ids [B, H, n] with -1 after each row's count, or each list's."""
    if counts is None:
        return ids
    limits = counts.view(counts.shape[0], -1, 1)
    return torch.where(torch.arange(ids.shape[-1], device=ids.device) < limits, ids, -1)


def interleave(
    index: torch.Tensor,
    kv_heads: int,
    most: int,
    counts: torch.Tensor | None = None,
    protected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join the ranked lists of each KV head's query group by rank, without repeats, and cut.

    Rank 0 of every query head comes first, then rank 1, and so on; an id keeps its first rank.

    Parameters
    ----------
    index
        [B, Hq, M] ids, best first, -1 = none.
    most
        ids to keep in a row at most.
    counts
        [B] or [B, Hkv] int64 on the device of the ids, those to keep; None: `most` in all.
    protected
        [B, Hkv, P] ids that come before all others, -1 = none.

    Returns
    -------
    torch.Tensor
        [B, Hkv, most] int64, or fewer where the lists hold fewer, trailing -1.
    """
    ranked = index.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(2)
    if protected is not None:
        ranked = torch.cat([protected, ranked], dim=2)
    order = ranked.argsort(dim=2, stable=True)
    ordered = ranked.gather(2, order)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    repeated = torch.zeros_like(repeated).scatter(2, order, repeated) | (ranked < 0)
    first = repeated.to(torch.int8).argsort(dim=2, stable=True)
    return _limited(torch.where(repeated, -1, ranked).gather(2, first)[..., :most], counts)
