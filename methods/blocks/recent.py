"""Attention sinks and the most recent tokens, as lists of ids (StreamingLLM, section 3.2)."""

from __future__ import annotations

import torch

from methods.blocks import list_kernels


def sinks_and_recent(
    lengths: torch.Tensor, counts: torch.Tensor, sinks: int, most: int
) -> torch.Tensor:
    """Ids of the first `sinks` tokens and of the most recent ones, `counts` in all; of fewer tokens
    all.

    Parameters
    ----------
    lengths
        [B], tokens of each row.
    counts
        [B, H].
    sinks
        below every count.
    most
        the largest count, or what a row has seen where that is less.

    Returns
    -------
    torch.Tensor
        [B, H, most], the newest first, the sinks last, trailing -1.
    """
    if lengths.device.type == "cpu":
        ids = torch.empty(*lengths.shape, counts.shape[1], most, dtype=torch.int64)
        list_kernels.sinks_and_recent(lengths.numpy(), counts.numpy(), sinks, ids.numpy())
        return ids
    newest = torch.arange(most, device=lengths.device)  # 0 is the current token
    lengths, counts = lengths[:, None, None], counts[..., None]
    recent = lengths - 1 - newest
    # after the recent tokens come the sinks, or what is left of a row that is shorter than its
    # count
    index = torch.where(newest < counts - sinks, recent, torch.minimum(recent, counts - 1 - newest))
    return torch.where(newest < torch.minimum(lengths, counts), index, -1)
