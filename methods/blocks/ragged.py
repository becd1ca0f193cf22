"""Lists of different lengths in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from methods.blocks.kernels import KERNELS, is_compiled

STEPS = 64  # on a GPU lists that grow are made longer by so many entries at once


def padded(size: int) -> int:
    """The size of a list that grows by an entry a step, so that most steps have equal sizes."""
    return -(-size // STEPS) * STEPS


def entries(
    starts: torch.Tensor, counts: torch.Tensor, most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers starts, starts + 1, ..., starts + counts - 1 of every range, in the order of the
    ranges.

    Parameters
    ----------
    starts, counts
        [..., K], K >= 1; a range may be empty.
    most
        what a list has more is cut off. With it a GPU is not asked how long they are.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        the numbers, [..., T] int64 with trailing -1; and the range that each is from, [..., T]. T
        is the longest list, or `most` on a GPU.
    """
    ends = counts.long().cumsum(dim=-1)
    longest = most if most is not None and starts.is_cuda else int(ends[..., -1].max())
    if most is not None:
        longest = min(longest, most)
    if is_compiled(starts):
        numbers, source = torch.empty(2, *starts.shape[:-1], longest, dtype=torch.int64)
        if longest:
            lists = (
                part.reshape(-1, part.shape[-1]).contiguous()
                for part in (starts.long(), ends, numbers, source)
            )
            KERNELS.entries(*lists)
        return numbers, source
    return ranges(starts, counts, longest)


def ranges(
    starts: torch.Tensor, counts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`entries` in torch, [..., most] each."""
    ends = counts.long().cumsum(dim=-1)
    index = torch.arange(most, device=starts.device).expand(*starts.shape[:-1], most).contiguous()
    source = torch.searchsorted(ends, index, right=True).clamp(max=starts.shape[-1] - 1)
    numbers = index + (starts - ends + counts).gather(-1, source)
    return torch.where(index < ends[..., -1:], numbers, -1), source


def without_gaps(ids: torch.Tensor) -> torch.Tensor:
    """Lists [H, n] of ids in their order, with what is -1 behind the others."""
    return ids.gather(1, (ids < 0).long().argsort(dim=1, stable=True))


def stacked(lists: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ids [H, n] of each row, packed, as one [B, H, longest n] with trailing -1."""
    if len(lists) == 1:
        return lists[0][None]
    longest = max(ids.shape[1] for ids in lists)
    if all(ids.shape[1] == longest for ids in lists):
        return torch.stack([*lists])
    return torch.stack([pad(ids, (0, longest - ids.shape[1]), value=-1) for ids in lists])
