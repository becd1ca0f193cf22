"""Keys in four bits, and the attention that is estimated with them.

As in the published code a key has a step s = (max - min) / 15 over its numbers, and codes round((k
- min) / s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvbench.kernels.library import CppFile
from kvbench.kernels.operators import operator
from kvbench.method import Shape, capped
from methods.blocks.kernels import is_compiled
from methods.blocks.pages import Ranges, page_tokens, take_in_page

KERNELS = CppFile(Path(__file__).with_name("kernels.cpp"), is_exact=True)

SPARE = 256  # keys to make room for when the last ones have taken what there was
WORTH_A_THREAD = 1 << 16  # multiplications; fewer are done before another thread has begun
LEVELS = 15


class FourBitKeys:
    """The keys of a layer, two numbers to a byte, the first in the low half.

    Parameters
    ----------
    keys
        [B, Hkv, N, D] of the prompt; D is even.
    new_tokens
        keys to come at most; None: unknown.

    Attributes
    ----------
    codes
        [B, Hkv, capacity, D / 2] uint8.
    steps
        [B, Hkv, capacity, 2] float32, the step and the smallest number of each key.
    counted
        [2] int64, tokens weighed and tokens kept so far, of all query heads.
    """

    def __init__(self, keys: torch.Tensor, new_tokens: int | None) -> None:
        codes, steps = quantised(keys)
        room = SPARE if new_tokens is None else new_tokens
        self.codes, self.steps = _with_room(codes, room), _with_room(steps, room)
        self.counted = torch.zeros(2, dtype=torch.int64, device=keys.device)
        self._enough: tuple[Sequence[float], torch.Tensor] | None = None

    def write(
        self,
        tokens: Sequence[int],
        key: torch.Tensor,
        seen: torch.Tensor | None = None,
        bounds: Sequence[torch.Tensor | None] = (None, None, None),
    ) -> None:
        """Code the next key [B, Hkv, 1, D] of each row, whose token id is tokens[b].

        Parameters
        ----------
        seen
            [B] on the device, one more than each; not asked for on a CPU.
        bounds
            on a device, those that the key widens, as of `take_in_coded`.
        """
        if max(tokens) >= self.codes.shape[2]:
            self.codes, self.steps = _with_room(self.codes, SPARE), _with_room(self.steps, SPARE)
        if is_compiled(key):
            numbers = key[:, :, 0].float().contiguous()
            KERNELS.write_codes(numbers, np.array(tokens), self.codes, self.steps)
            return
        if seen is None:
            seen = torch.tensor(tokens) + 1
        take_in_coded(key, seen, self.codes, self.steps, *bounds)

    def top_p(
        self, query: torch.Tensor, index: torch.Tensor, shape: Shape, p: Sequence[float]
    ) -> torch.Tensor:
        """Of the tokens index [B, Hs, M] the fewest whose estimated weights sum to p or more, of
        each query head.

        Parameters
        ----------
        query
            [B, Hq, 1, D].
        p
            of each row.

        Returns
        -------
        torch.Tensor
            [B, Hq, n] int64, the largest weight first, trailing -1. With p = 1 all tokens.
        """
        if is_compiled(query):
            return self.top_p_compiled(query, index, shape, p)
        return self.top_p_in_torch(query, index, shape, p)

    def top_p_in_torch(
        self, query: torch.Tensor, index: torch.Tensor, shape: Shape, p: Sequence[float]
    ) -> torch.Tensor:
        """As `top_p`, on any device."""
        shares = self._shares(p, query.device)
        coded, logits = (query, self.codes, self.steps), (shape.scaling, shape.softcap)
        return largest_shares(*coded, index, *logits, shares, self.counted)

    def top_p_of_pages(
        self, query: torch.Tensor, ranges: Ranges, shape: Shape, p: Sequence[float]
    ) -> torch.Tensor:
        """As `top_p`, of the tokens that `page_tokens` chooses, on a device in one launch."""
        coded, logits = (query, self.codes, self.steps), (shape.scaling, shape.softcap)
        shares = self._shares(p, query.device)
        ids: torch.Tensor = pruned_pages(*ranges, *coded, *logits, shares, self.counted)
        return ids

    def _shares(self, p: Sequence[float], device: torch.device) -> torch.Tensor:
        """What is enough of each row, in the same memory in every step."""
        if self._enough is None or self._enough[0] is not p:
            shares = [math.inf if share == 1 else share for share in p]
            self._enough = p, torch.tensor(shares, dtype=torch.float64, device=device)
        return self._enough[1]

    def top_p_compiled(
        self, query: torch.Tensor, index: torch.Tensor, shape: Shape, p: Sequence[float]
    ) -> torch.Tensor:
        """As `top_p`, on a CPU."""
        scaled = (query[:, :, 0].float() * shape.scaling).contiguous()
        ids = torch.empty(*scaled.shape[:2], index.shape[2], dtype=torch.int64)
        coded = self.codes, self.steps, index.contiguous()
        threads = max(1, ids.numel() * scaled.shape[2] // WORTH_A_THREAD)
        threads = min(torch.get_num_threads(), threads)
        wanted = float(shape.softcap or 0), np.array(p, float)
        most = KERNELS.top_p(threads, scaled, *coded, *wanted, ids, self.counted)
        return ids[..., :most]

    def counts(
        self,
        row: int,
        queries: torch.Tensor,
        length: int,
        most: int,
        shape: Shape,
        p: torch.Tensor,
    ) -> torch.Tensor:
        """How many of the `most` best tokens hold each share p [S] of their estimated weights: [S],
        means over queries.

        Parameters
        ----------
        queries
            [Hq, W, D], the last of the row's `length` tokens, each of which sees those up to its
            own.
        """
        codes, steps = self.codes[row, :, :length], self.steps[row, :, :length]
        grouped = queries.float().unflatten(0, (codes.shape[0], -1))
        logits = shape.logits(grouped @ restored(codes, steps)[:, None].transpose(2, 3))
        position = torch.arange(length, device=logits.device)
        logits = logits.masked_fill(position > position[-queries.shape[1] :, None], -torch.inf)
        weights = logits.topk(min(most, length), dim=3).values.double().softmax(dim=3)
        before = (weights.cumsum(dim=3) - weights).flatten(0, 2)
        there = weights.flatten(0, 2) > 0
        smallest = torch.searchsorted(before, p.expand(len(before), -1).contiguous())
        return torch.minimum(smallest, there.sum(dim=1, keepdim=True)).double().mean(dim=0)


def largest_shares(
    query: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    index: torch.Tensor,
    scaling: float,
    softcap: float | None,
    shares: torch.Tensor,
    counted: torch.Tensor,
) -> torch.Tensor:
    """`FourBitKeys.top_p` in torch; `shares` [B] float64, infinite where all tokens are kept."""
    lists = index.repeat_interleave(query.shape[1] // index.shape[1], dim=1)  # [B, Hq, M]
    at = lists.clamp(min=0).unflatten(1, (codes.shape[1], -1)).flatten(2)[..., None]
    coded = (part.gather(2, at.expand(-1, -1, -1, part.shape[3])) for part in (codes, steps))
    keys = restored(*coded).view(*lists.shape, -1)
    logits = capped((keys @ query.float().transpose(2, 3)).squeeze(3) * scaling, softcap)
    weights = logits.masked_fill(lists < 0, -torch.inf).double().softmax(dim=2)
    ranked, order = weights.sort(dim=2, descending=True, stable=True)
    ranked_ids = lists.gather(2, order)
    enough = ranked.cumsum(dim=2) - ranked >= shares[:, None, None]
    ids = ranked_ids.masked_fill(enough, -1)
    counted += torch.stack([(ranked_ids >= 0).sum(), (ids >= 0).sum()])
    return ids


@operator("methods.twilight.gpu", writes=("counted",))
def pruned_pages(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    capacities: torch.Tensor,
    rooms: torch.Tensor,
    starts: torch.Tensor | None,
    page_size: int,
    most: int,
    query: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    scaling: float,
    softcap: float | None,
    shares: torch.Tensor,
    counted: torch.Tensor,
) -> torch.Tensor:
    """The tokens of the best pages, see `page_tokens`, and of them `largest_shares`, [B, Hq, most];
    scores are of each query head.
    """
    ranges = Ranges(scores, tokens, capacities, rooms, starts, page_size, most)
    ids = page_tokens.reference(*ranges)
    return largest_shares(query, codes, steps, ids, scaling, softcap, shares, counted)


@operator("methods.twilight.gpu", writes=("codes", "steps", "low", "high"))
def take_in_coded(
    key: torch.Tensor,
    seen: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    page: torch.Tensor | None,
) -> None:
    """Code the key [B, Hkv, 1, D] of the last of `seen` [B] tokens, and widen bounds by it.

    Parameters
    ----------
    codes, steps
        as of `FourBitKeys`.
    low, high, page
        as of `take_in`; None: there are no bounds.
    """
    slot = (seen - 1).view(-1, 1, 1, 1)
    for part, coded in zip((codes, steps), quantised(key), strict=True):
        part.scatter_(2, slot.expand_as(coded), coded)
    if low is not None:
        take_in_page.reference(key, low, high, page)


def quantised(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., D / 2] uint8 of keys [..., D], and their steps and smallest numbers [..., 2]
    float32.
    """
    keys = keys.float()
    low, high = keys.amin(dim=-1, keepdim=True), keys.amax(dim=-1, keepdim=True)
    step = ((high - low) / LEVELS).clamp(min=1e-9)
    codes = ((keys - low) / step).round().clamp(0, LEVELS).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, torch.cat([step, low], dim=-1)


def restored(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """What `quantised` keys [..., D] were, as far as it is known."""
    numbers = torch.stack([codes & LEVELS, codes >> 4], dim=-1).flatten(-2)
    return numbers.float() * steps[..., :1] + steps[..., 1:]


def _with_room(block: torch.Tensor, slots: int) -> torch.Tensor:
    """A copy of block [B, H, n, w] with so many slots more."""
    return torch.cat([block, block.new_zeros(*block.shape[:2], slots, block.shape[3])], dim=2)
