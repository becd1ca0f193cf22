"""What a layer's lists hold while tokens come and go: ids in the order of the text, and a number
beside each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from kvbench.kernels.operators import operator
from methods.blocks.ends import at_ends

GROWTH = 64  # slots added when a list is full
# What a step makes of the number of a token that received attention: nothing, the sum of both, the
# attention itself, or the time of the step where that is enough.
KEEP, ADD, REPLACE, STAMP = range(4)


class Eviction(NamedTuple):
    """How the tokens of a layer's lists gain and lose, and which of them go.

    Attributes
    ----------
    limits
        [B, 1 or H] int64; of a list of more, the token with the least number goes. None: none goes.
    most
        tokens that no list has more of afterwards.
    origin
        [B] int64; ADD does not ask for it. REPLACE is of tokens from this one on; of STAMP the
        token before which the time of steps begins.
    threshold
        [B] float32, attention above which a token is stamped; the newest is in any case.
    page_size
        tokens from the origin on that are stamped and go together.
    recent
        [B] int64, the most recent tokens, which stay; None: none for that.
    first
        [B] int64, tokens before this one stay; None: none for that.
    lengths, ends
        [B] int64, tokens of the prompt, and at either end of it those that stay; None: none.
    """

    limits: torch.Tensor | None
    most: int
    origin: torch.Tensor | None = None
    threshold: torch.Tensor | None = None
    page_size: int = 1
    recent: torch.Tensor | None = None
    first: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    ends: torch.Tensor | None = None


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

    def evict(
        self, how: int, eviction: Eviction, seen: torch.Tensor, attention: torch.Tensor
    ) -> None:
        """Note the attention [B, Hq, width] of the last of `seen` [B] tokens, and let tokens go.

        `how` is one of KEEP, ADD, REPLACE and STAMP; query heads that share a list count as their
        mean.
        """
        limits, most = eviction.limits, eviction.most
        rest: list[Any] = [*eviction[2:]]
        if self._ids.is_cuda:  # in the same memory, so that a step can be captured
            lists = self._ids, self._numbers, self.counts
            evict_tokens(*lists, attention, self.width, seen, how, limits, *rest)
        else:
            lists = self.ids, self.numbers, self.counts
            numbers = noted(*lists, attention, seen, how, *rest[:3])
            if numbers is not self.numbers:
                self.numbers.copy_(numbers)
            if limits is not None:
                gone = going(*lists, seen, limits, *rest)
                # the selection of the step still shows the ones before
                self._ids, self._numbers = closed_up(self._ids, self._numbers, *gone)
                self.counts.sub_(gone.size[..., 0])
        if limits is not None:
            self.untouched, self.width = False, min(self.width, most)


class Stretch(NamedTuple):
    """Slots of a list: the first, and how many, [B, H, 1] both."""

    first: torch.Tensor
    size: torch.Tensor


def noted(
    ids: torch.Tensor,
    numbers: torch.Tensor,
    counts: torch.Tensor,
    attention: torch.Tensor,
    seen: torch.Tensor,
    how: int,
    origin: torch.Tensor | None,
    threshold: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """Numbers of lists [B, H, n] after a step, see `TokenLists.evict` and `Eviction`."""
    if how == KEEP:
        return numbers
    received = attention.unflatten(1, (ids.shape[1], -1)).mean(dim=2)
    if how == ADD:
        return numbers + received
    assert origin is not None
    if how == REPLACE:
        return torch.where(ids >= origin[:, None, None], received, numbers)
    assert threshold is not None
    received.scatter_(2, counts[..., None] - 1, torch.inf)
    if page_size > 1:
        received = largest_of_pages(ids, origin, page_size, received)
    stamped = received > threshold[:, None, None]
    return torch.where(stamped, (seen - origin)[:, None, None].float(), numbers)


def largest_of_pages(
    ids: torch.Tensor, firsts: torch.Tensor, size: int, numbers: torch.Tensor
) -> torch.Tensor:
    """The largest number [B, H, n] of each token's page, of ids [B, H, n], ascending, trailing -1,
    which is in no page, and firsts [B], a token with which a page of `size` tokens begins.
    """
    pages = (ids - firsts[:, None, None]).div(size, rounding_mode="floor")
    begins = (pages[..., 1:] != pages[..., :-1]) | (ids[..., 1:] < 0)
    # of each token's page in its list
    number = pad(begins, (1, 0))[..., : ids.shape[2]].cumsum(dim=2)
    largest = torch.zeros_like(numbers)
    largest.scatter_reduce_(2, number, numbers, "amax", include_self=False)
    return largest.gather(2, number)


def going(
    ids: torch.Tensor,
    numbers: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    limits: torch.Tensor,
    origin: torch.Tensor | None,
    threshold: torch.Tensor | None,
    page_size: int,
    recent: torch.Tensor | None,
    first: torch.Tensor | None,
    lengths: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> Stretch:
    """What of lists [B, H, n] goes, see `Eviction`."""
    worth = numbers
    if recent is not None:
        worth = worth.masked_fill(ids >= (seen - recent)[:, None, None], torch.inf)
    if first is not None:
        worth = worth.masked_fill(ids < first[:, None, None], torch.inf)
    if ends is not None:
        assert lengths is not None
        at_an_end = at_ends(ids, lengths[:, None, None], ends[:, None, None])
        worth = worth.masked_fill(at_an_end, torch.inf)
    least = worth.argmin(dim=2, keepdim=True)
    full = (counts > limits).long()[..., None]
    if page_size == 1:
        return Stretch(least, full)
    assert origin is not None
    pages = (ids - origin[:, None, None]) // page_size
    # of a page at an end the rest stays
    goes = (pages == pages.gather(2, least)) & (ids >= 0) & worth.isfinite()
    return Stretch(least, full * goes.sum(dim=2, keepdim=True))


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
def evict_tokens(
    ids: torch.Tensor,
    numbers: torch.Tensor,
    counts: torch.Tensor,
    attention: torch.Tensor,
    width: int,
    seen: torch.Tensor,
    how: int,
    limits: torch.Tensor | None,
    origin: torch.Tensor | None,
    threshold: torch.Tensor | None,
    page_size: int,
    recent: torch.Tensor | None,
    first: torch.Tensor | None,
    lengths: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> None:
    """See `TokenLists.evict`, of lists in memory for more than `width` tokens."""
    lists = ids[..., :width], numbers[..., :width], counts
    more = origin, threshold, page_size
    if how != KEEP:
        numbers[..., :width] = noted(*lists, attention, seen, how, *more)
    if limits is not None:
        gone = going(*lists, seen, limits, *more, recent, first, lengths, ends)
        for part, moved in zip((ids, numbers), closed_up(ids, numbers, *gone), strict=True):
            part.copy_(moved)
        counts.sub_(gone.size[..., 0])
