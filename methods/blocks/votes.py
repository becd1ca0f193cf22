"""Votes of an observation window: which prompt keys do the last prompt queries look at? (SnapKV, section 3)"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.method import Prompt

Pooling = Literal["max", "mean"]
Join = Literal["before", "after"]


def window_votes(prompt: Prompt, window: int, scaling: float) -> torch.Tensor:
    """Attention probability each prompt key gets from the last `window` queries, summed; causal inside the window.

    Returns:
        [B, Hq, N] fp32, 0 at and beyond a row's length.
    """
    queries = prompt.queries[:, :, -window:]
    batch, kv_heads, count, _ = prompt.keys.shape
    group, device = queries.shape[1] // kv_heads, queries.device
    lengths = torch.tensor(prompt.lengths, device=device)
    # position of each window query in its row; negative where the row is shorter than the window
    position = lengths[:, None] - queries.shape[2] + torch.arange(queries.shape[2], device=device)
    hidden = torch.arange(count, device=device) > position[..., None]
    votes = []
    for head in range(kv_heads):  # one KV head at a time: [B, G, W, N] is the largest tensor alive
        own = queries[:, head * group : (head + 1) * group].float()
        logits = own @ prompt.keys[:, head, None].float().transpose(2, 3) * scaling
        probabilities = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
        asked = (position >= 0)[:, None, :, None]
        votes.append(torch.where(asked, probabilities, 0).sum(dim=2))
    return torch.cat(votes, dim=1).view(batch, -1, count)


def pooled_votes(votes: torch.Tensor, heads: int, kernel: int, pooling: Pooling, join: Join) -> torch.Tensor:
    """Smooth votes along the sequence and take the mean over the query heads that choose as one.

    Mean pooling counts the zeros beyond both ends, as the published codes do.

    Args:
        votes: [B, Hq, N].
        heads: H, lists to come out: KV heads where a group chooses as one, query heads where each does for itself.
        kernel: odd width.
        join: take the group's mean before or after pooling (the same for mean pooling, not for max).

    Returns:
        [B, H, N].
    """

    def smooth(scores: torch.Tensor) -> torch.Tensor:
        pool = max_pool1d if pooling == "max" else avg_pool1d
        smoothed: torch.Tensor = pool(scores, kernel, stride=1, padding=kernel // 2)
        return smoothed

    def join_group(scores: torch.Tensor) -> torch.Tensor:
        return scores.view(scores.shape[0], heads, -1, scores.shape[2]).mean(dim=2)

    return smooth(join_group(votes)) if join == "before" else join_group(smooth(votes))
