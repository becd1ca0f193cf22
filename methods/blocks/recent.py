"""Attention sinks and the most recent tokens, as lists of ids (StreamingLLM, section 3.2)."""

from __future__ import annotations

import torch

from methods.blocks import list_kernels


def sinks_and_recent(seen: torch.Tensor, counts: torch.Tensor, sinks: int, most: int) -> torch.Tensor:
    """Ids of the first `sinks` tokens and of the most recent ones, `counts` in all; of fewer tokens all.

    Args:
        seen: [B], tokens of each row.
        counts: [B, H].
        sinks: below every count.
        most: the largest count, or what a row has seen where that is less.

    Returns:
        [B, H, most], the newest first, the sinks last, trailing -1.
    """
    if seen.device.type == "cpu":
        found = torch.empty(*seen.shape, counts.shape[1], most, dtype=torch.int64)
        list_kernels.sinks_and_recent(seen.numpy(), counts.numpy(), sinks, found.numpy())
        return found
    newest = torch.arange(most, device=seen.device)  # 0 is the current token
    seen, counts = seen[:, None, None], counts[..., None]
    recent = seen - 1 - newest
    # after the recent tokens come the sinks, or what is left of a row that is shorter than its count
    index = torch.where(newest < counts - sinks, recent, torch.minimum(recent, counts - 1 - newest))
    return torch.where(newest < torch.minimum(seen, counts), index, -1)
