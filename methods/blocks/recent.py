"""Attention sinks and the most recent tokens, as lists of ids (StreamingLLM, section 3.2)."""

from __future__ import annotations

import torch

from kvbench.kernels.operators import operator
from methods.blocks.kernels import KERNELS, is_compiled


def sinks_and_recent(
    lengths: torch.Tensor, counts: torch.Tensor, sinks: int, most: int
) -> torch.Tensor:
    """Ids of the first `sinks` tokens and of the most recent ones, `counts` in all, on a CPU; of
    fewer tokens all.

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
    if not is_compiled(lengths):
        return recent_and_sinks(lengths, counts, torch.full_like(lengths, sinks), most)
    ids = torch.empty(*lengths.shape, counts.shape[1], most, dtype=torch.int64)
    KERNELS.sinks_and_recent(lengths, counts.contiguous(), sinks, ids)
    return ids


@operator("methods.blocks.gpu.recent")
def recent_and_sinks(
    lengths: torch.Tensor, counts: torch.Tensor, sinks: torch.Tensor, most: int
) -> torch.Tensor:
    """`sinks_and_recent` of rows that have `sinks` [B] each."""
    newest = torch.arange(most, device=lengths.device)  # 0 is the current token
    lengths, counts = lengths[:, None, None], counts[..., None]
    recent = lengths - 1 - newest
    # after the recent tokens come the sinks, or what is left of a row that is shorter than its
    # count
    is_recent = newest < counts - sinks[:, None, None]
    index = torch.where(is_recent, recent, torch.minimum(recent, counts - 1 - newest))
    return torch.where(newest < torch.minimum(lengths, counts), index, -1)


class BothEnds:
    """First and last tokens of each row, the same in all layers of a step: on a GPU made once in
    it.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, torch.device], tuple[tuple[int, int, int], torch.Tensor]] = {}

    def of(
        self, row: int, sinks: int, start: int, length: int, device: torch.device
    ) -> torch.Tensor:
        """[n], the tokens below `sinks`, and those from `start` to `length` - 1."""
        ranges, cached = (sinks, start, length), self._ends.get((row, device))
        if cached is not None and cached[0] == ranges:
            return cached[1]
        first = torch.arange(sinks, device=device)
        tokens = torch.cat([first, torch.arange(start, length, device=device)])
        if device.type == "cuda":
            self._ends[row, device] = ranges, tokens
        return tokens
