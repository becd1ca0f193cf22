"""Ranking and joining lists of ids: top-k with a count per row, and the union over a query group."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def top(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Ids of the best scores, best first.

    Args:
        scores: [B, H, n]; -inf marks what must not be chosen.
        counts: entries of each row b, at most n; rows with fewer choosable entries get what there is.

    Returns:
        [B, H, max(counts)] int64, trailing -1; equal scores stand in any order.
    """
    most = min(max(counts), scores.shape[-1])
    return _cut(*scores.topk(most, dim=-1), counts)


def top_earliest(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """As `top`, but of equal scores the smaller id is better, on any device and in any batch.

    For scores that tie by their nature, as neighbours do after max pooling: which of them `topk` takes depends on n,
    and with it a row's result on the rows beside it.
    """
    most = min(max(counts), scores.shape[-1])
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return _cut(values[..., :most], ids[..., :most], counts)


def _cut(values: torch.Tensor, ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Ranked ids [B, H, n] with -1 behind each row's count and in place of what must not be chosen."""
    wanted = torch.arange(ids.shape[-1], device=ids.device) < torch.tensor(counts, device=ids.device)[:, None, None]
    return torch.where(wanted & (values > -torch.inf), ids, -1)


def interleave(
    index: torch.Tensor, kv_heads: int, counts: Sequence[int], protected: torch.Tensor | None = None
) -> torch.Tensor:
    """Join the ranked lists of each KV head's query group by rank, without repeats, and cut.

    Rank 0 of every query head comes first, then rank 1, and so on; an id keeps its first place.

    Args:
        index: [B, Hq, M] ids, best first, -1 = none.
        counts: ids to keep in each row b.
        protected: [B, Hkv, P] ids that come before all others, -1 = none.

    Returns:
        [B, Hkv, max(counts)] int64, trailing -1.
    """
    batch, query_heads, depth = index.shape
    ranked = index.view(batch, kv_heads, query_heads // kv_heads, depth).transpose(2, 3).flatten(2)
    if protected is not None:
        ranked = torch.cat([protected, ranked], dim=2)
    order = ranked.argsort(dim=2, stable=True)
    ordered = ranked.gather(2, order)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    repeated = torch.zeros_like(repeated).scatter(2, order, repeated) | (ranked < 0)
    first = repeated.to(torch.int8).argsort(dim=2, stable=True)
    joined = torch.where(repeated, -1, ranked).gather(2, first)[..., : max(counts)]
    wanted = (
        torch.arange(joined.shape[2], device=index.device) < torch.tensor(counts, device=index.device)[:, None, None]
    )
    return torch.where(wanted, joined, -1)
