"""Votes of an observation window: which prompt keys do the last prompt queries look at? (SnapKV,
section 3)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.method import Prompt, Shape

Pooling = Literal["max", "mean"]
Join = Literal["before", "after"]


def window_probabilities(prompt: Prompt, window: int, shape: Shape) -> Iterator[torch.Tensor]:
    """Attention probabilities of the last `window` queries over the prompt, causal inside the
    window.

    Yields
    ------
    Iterator[torch.Tensor]
        of each KV head, one at a time, [B, G, W, N] fp32; 0 for queries of a row that is shorter
        than the window.
    """
    queries = prompt.queries[:, :, -window:]
    kv_heads, count = prompt.keys.shape[1:3]
    group, device = queries.shape[1] // kv_heads, queries.device
    lengths = torch.tensor(prompt.lengths, device=device)
    # position of each window query in its row; negative where the row is shorter than the window
    position = lengths[:, None] - queries.shape[2] + torch.arange(queries.shape[2], device=device)
    hidden = torch.arange(count, device=device) > position[..., None]
    valid = (position >= 0)[:, None, :, None]
    for head in range(kv_heads):
        head_queries = queries[:, head * group : (head + 1) * group].float()
        logits = shape.logits(head_queries @ prompt.keys[:, head, None].float().transpose(2, 3))
        probabilities = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
        yield torch.where(valid, probabilities, 0)


def window_votes(prompt: Prompt, window: int, shape: Shape) -> torch.Tensor:
    """Attention probability each prompt key gets from the last `window` queries, summed.

    Returns
    -------
    torch.Tensor
        [B, Hq, N] fp32, 0 at and beyond a row's length.
    """
    return torch.cat(
        [attention.sum(dim=2) for attention in window_probabilities(prompt, window, shape)], dim=1
    )


def pooled_votes(
    votes: torch.Tensor, heads: int, kernel: int, pooling: Pooling, join: Join
) -> torch.Tensor:
    """Smooth votes along the sequence and take the mean over the query heads that choose as one.

    Mean pooling counts the zeros beyond both ends, as the published codes do.

    Parameters
    ----------
    votes
        [B, Hq, N].
    heads
        H, lists to come out: KV heads where a group chooses as one, query heads where each does for
        itself.
    kernel
        odd width.
    join
        take the group's mean before or after pooling (the same for mean pooling, not for max).

    Returns
    -------
    torch.Tensor
        [B, H, N].
    """

    def smooth(scores: torch.Tensor) -> torch.Tensor:
        pool = max_pool1d if pooling == "max" else avg_pool1d
        smoothed: torch.Tensor = pool(scores, kernel, stride=1, padding=kernel // 2)
        return smoothed

    def join_group(scores: torch.Tensor) -> torch.Tensor:
        return scores.view(scores.shape[0], heads, -1, scores.shape[2]).mean(dim=2)

    return smooth(join_group(votes)) if join == "before" else join_group(smooth(votes))
