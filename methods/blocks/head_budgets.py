"""A layer's budget shared out between its heads by what their best scores are worth (Feng et al.
2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", Algorithm 1).

The best tokens of all heads together are found; a head whose attention is spread wide has many
among them and gets more of the budget, one whose attention is gathered on few gets less. For any
`methods.blocks.scorer.Scorer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

Safeguard = Literal["share", "top"]


@dataclass(frozen=True)
class HeadBudgets:
    """How H heads that keep C tokens on average share these out; a head's protected tokens are its
    best.

    Attributes
    ----------
    alpha
        how much of C is a head's whatever the others score, 0 to 1.
    safeguard
        "share", a head gets (1 - alpha) of its tokens among the H C best, and alpha C (the paper);
        "top", its best alpha C tokens are safe, and the rest are the best of all heads (kvpress).

    Raises
    ------
    ValueError
        alpha is no share.
    """

    alpha: float = 0.2
    safeguard: Safeguard = "share"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: expected a share from 0 to 1")

    def counts(self, scores: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
        """Tokens that each head keeps of its best ones, [B, H] int64, H C in each row.

        Parameters
        ----------
        scores
            [B, H, N]; inf is a protected token, -inf none.
        capacity
            [B] int64, C of each row, no more than it has tokens.
        """
        if self.safeguard == "top":
            return _among_the_best(self._safe(scores, capacity), capacity)
        protected = scores.isposinf().sum(dim=-1)  # rounded are the others, as in the official code
        among = _among_the_best(scores, capacity) - protected
        mean = capacity[:, None] - protected
        shares = (1 - self.alpha) * among.double() + self.alpha * mean.double()
        return protected + rounded(shares, mean.sum(dim=-1))

    def most(self, capacity: int, protected: int, length: int, heads: int) -> int:
        """Tokens that one of the heads may keep at most, where they keep `capacity` on average.

        Parameters
        ----------
        capacity, protected
            of a row with `length` tokens, the protected ones inside.
        heads
            H.
        """
        shared = self.safeguard == "share"
        safe = protected if shared else max(protected, int(self.alpha * capacity))
        # the others keep what is safe
        among = min(length, capacity + (heads - 1) * max(capacity - safe, 0))
        if shared:
            among = math.ceil((1 - self.alpha) * among + self.alpha * capacity)
        return max(capacity, among)

    def _safe(self, scores: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
        """Scores with inf for the best alpha C tokens of each head."""
        order = scores.argsort(dim=-1, descending=True, stable=True)
        safe = (self.alpha * capacity.double()).floor()[:, None, None]
        first = (torch.arange(scores.shape[2], device=scores.device) < safe).expand_as(scores)
        return scores.masked_fill(torch.zeros_like(first).scatter(2, order, first), torch.inf)


def _among_the_best(scores: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    """How many of the H C best scores of a row are each head's, [B, H] int64; of equal ones those
    of the first head.
    """
    heads, length = scores.shape[1:]
    head = scores.flatten(1).argsort(dim=-1, descending=True, stable=True) // length
    best = torch.arange(heads * length, device=scores.device) < heads * capacity[:, None]
    counts = torch.zeros(scores.shape[:2], dtype=torch.int64, device=scores.device)
    return counts.scatter_add(1, head, best.long())


def rounded(shares: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Shares [B, H], to whole numbers that sum to the totals [B]: the nearest, but for those where
    rounding takes most.

    The official code takes the nearest (and drops the fraction of alpha C), which sum to a few more
    or less.
    """
    nearest = shares.round()
    missing = totals[:, None] - nearest.sum(dim=-1, keepdim=True)
    error = (shares - nearest).round(decimals=6) * missing.sign()
    rank = error.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (nearest + missing.sign() * (rank < missing.abs())).long()
