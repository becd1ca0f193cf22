"""What a layer's lists hold while tokens come and go: ids in the order of the text, and a number
beside each.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

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

    def append(self, tokens: torch.Tensor, number: float = 0.0) -> None:
        """Token ids [B], later ones than all before, come to every list of their row."""
        if self.width + 1 == self._ids.shape[2]:  # the last slot is always free
            self._ids = pad(self._ids, (0, GROWTH), value=-1)
            self._numbers = pad(self._numbers, (0, GROWTH), value=torch.inf)
        slot = self.counts[..., None]
        self._ids.scatter_(2, slot, tokens[:, None, None].expand_as(slot))
        self._numbers.scatter_(2, slot, number)
        self.counts.add_(1)
        self.width += 1

    def drop(self, first: torch.Tensor, count: torch.Tensor, most: int) -> None:
        """The tokens of `count` slots from `first` on go, both [B, H, 1]; those after them close
        up.

        Parameters
        ----------
        most
            tokens that no list has more of afterwards.
        """
        self.untouched = False
        slot = torch.arange(self._ids.shape[2], device=first.device)
        source = (slot + count * (slot >= first)).clamp(max=len(slot) - 1)
        ids, numbers = self._ids.gather(2, source), self._numbers.gather(2, source)
        if ids.is_cuda:  # in the same memory, so that a step can be captured
            self._ids.copy_(ids)
            self._numbers.copy_(numbers)
        else:  # the selection of the step still shows the ones before
            self._ids, self._numbers = ids, numbers
        self.counts.sub_(count[..., 0])
        self.width = min(self.width, most)
