"""What a layer's lists hold while tokens come and go: ids in the order of the text, and a number
beside each.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kvbench.kernels.operators import operator

GROWTH = 64  # slots added when a list is full


class TokenLists:
    """The tokens of each list of a layer, and what each of them is worth.

    Parameters
    ----------
    ids
        [B, H, M] distinct, in any order, -1 = none.
    numbers
        [B, H, M], one for each.

    Attributes
    ----------
    counts
        [B, H] int64 on the device, tokens of each list.
    width
        no list has more; nothing waits for the device to know it.
    untouched
        no token has gone yet.
    """

    def __init__(self, ids: torch.Tensor, numbers: torch.Tensor) -> None:
        order = torch.where(ids < 0, torch.iinfo(torch.int64).max, ids).argsort(dim=2)
        ids, numbers = ids.gather(2, order), numbers.gather(2, order)
        self.counts, self.width = (ids >= 0).sum(dim=2), ids.shape[2]
        self.untouched = True
        numbers = numbers.float().masked_fill(ids < 0, torch.inf)
        self._ids = pad(ids, (0, GROWTH), value=-1)
        self._numbers = pad(numbers, (0, GROWTH), value=torch.inf)

    @property
    def ids(self) -> torch.Tensor:
        """[B, H, width] int64, ascending, trailing -1."""
        return self._ids[:, :, : self.width]

    @property
    def numbers(self) -> torch.Tensor:
        """[B, H, width] fp32, to be changed in place; infinite where there is no token."""
        return self._numbers[:, :, : self.width]

    def append(self, seen: torch.Tensor) -> None:
        """The last of `seen` [B] tokens comes to every list of its row, with the number 0."""
        if self.width + 1 == self._ids.shape[2]:  # the last slot is always free
            self._ids = pad(self._ids, (0, GROWTH), value=-1)
            self._numbers = pad(self._numbers, (0, GROWTH), value=torch.inf)
        append_token(self._ids, self._numbers, self.counts, seen, 0.0)
        self.width += 1

    def drop_least(self, worth: torch.Tensor, limits: torch.Tensor, most: int) -> None:
        """The token with the least `worth` [B, H, width] goes from each list of more than `limits`
        [B, 1 or H].

        Parameters
        ----------
        most
            tokens that no list has more of afterwards.
        """
        if self._ids.is_cuda:  # in the same memory, so that a step can be captured
            drop_least(self._ids, self._numbers, self.counts, worth, limits)
            self._dropped(most)
        else:
            over = (self.counts > limits).long()[..., None]
            self.drop(worth.argmin(dim=2, keepdim=True), over, most)

    def drop(self, first: torch.Tensor, count: torch.Tensor, most: int) -> None:
        """The tokens of `count` slots from `first` on go, both [B, H, 1]; those after them close
        up. `most` as above.
        """
        ids, numbers = closed_up(self._ids, self._numbers, first, count)
        if ids.is_cuda:
            self._ids.copy_(ids)
            self._numbers.copy_(numbers)
        else:  # the selection of the step still shows the ones before
            self._ids, self._numbers = ids, numbers
        self.counts.sub_(count[..., 0])
        self._dropped(most)

    def _dropped(self, most: int) -> None:
        self.untouched, self.width = False, min(self.width, most)


def closed_up(
    ids: torch.Tensor, numbers: torch.Tensor, first: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists [B, H, n] without `count` slots from `first` on, both [B, H, 1]; the last entry fills
    the end.
    """
    slot = torch.arange(ids.shape[2], device=first.device)
    source = (slot + count * (slot >= first)).clamp(max=len(slot) - 1)
    return ids.gather(2, source), numbers.gather(2, source)


@operator("methods.blocks.gpu.held", writes=("ids", "numbers", "counts"))
def append_token(
    ids: torch.Tensor,
    numbers: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    number: float,
) -> None:
    """Put the last of `seen` [B] tokens behind the `counts` [B, H] of each list, with a number."""
    slot = counts[..., None]
    ids.scatter_(2, slot, (seen - 1)[:, None, None].expand_as(slot))
    numbers.scatter_(2, slot, number)
    counts.add_(1)


@operator("methods.blocks.gpu.held", writes=("ids", "numbers", "counts"))
def drop_least(
    ids: torch.Tensor,
    numbers: torch.Tensor,
    counts: torch.Tensor,
    worth: torch.Tensor,
    limits: torch.Tensor,
) -> None:
    """See `TokenLists.drop_least`; `worth` may be `numbers`."""
    over = (counts > limits).long()
    first = worth.argmin(dim=2, keepdim=True)
    moved = closed_up(ids, numbers, first, over[..., None])
    ids.copy_(moved[0])
    numbers.copy_(moved[1])
    counts.sub_(over)
