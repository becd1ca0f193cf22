"""RaaS: what no step looks at any more goes first (Hu et al. 2025, "RaaS: Reasoning-Aware Attention
Sparsity for Efficient LLM Reasoning").

Reasoning has milestones, tokens that matter for some steps and then never again. A page gets the
time of a step as its stamp when the step attends it with more than alpha, and the page with the
oldest stamp is evicted. The prompt stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Shape, View
from methods.blocks.evictor import Evictor
from methods.blocks.held import STAMP, Eviction, TokenLists, largest_of_pages
from methods.blocks.topk import Granularity
from methods.snapkv import SnapKV


class _Prompt(SnapKV):
    """SnapKV that protects a quarter of a small C, as where generated tokens count, so that votes
    have the rest.
    """

    def recent(self, capacity: int) -> int:
        """Last tokens that are protected in a budget of `capacity` tokens."""
        return min(self.window, capacity // 4)

    def check_budget(self) -> None:
        """RaaS checks its own; that of a pinned prompt is none of a user's."""


@dataclass(eq=False)
class RaaS(Evictor):
    """Attend the prompt and C generated tokens, those whose pages were looked at last.

    The paper estimates what a page receives from its representative, as Quest does; here it is the
    most that any of its tokens received. No official code is known, and what becomes of a prompt
    beyond the budget is not said.

    Parameters
    ----------
    alpha
        attention probability above which a page is stamped, of a group the mean.
    page_size
        tokens that share a stamp and go together; 1: each token has its own. Generated tokens begin
        a page.
    pin_prompt
        the prompt stays, outside C. Otherwise, and where generated tokens count, it is cut to C as
        SnapKV does, and its pages age as others do, the ones with fewest votes first.
    granularity
        "kv_head", a list for the group; "query_head", one for each query head.
    """

    how = STAMP

    alpha: float = 1e-4
    page_size: int = 16
    pin_prompt: bool = True
    granularity: Granularity = "kv_head"

    def __post_init__(self) -> None:
        super().__init__(_Prompt(), self.granularity)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle whether the prompt is pinned."""
        self.pinned = self.pin_prompt and not budget.counts_generated
        super().begin(shape, budget, view, context)

    def reserved(self, capacity: int) -> int:
        """The page of the current token."""
        return self.page_size

    def stays(self, capacity: int, length: int) -> int:
        """The current token is one of the C; a pinned prompt is outside."""
        return capacity - 1 + (length if self.pinned else 0)

    def first_cut(self, length: int) -> int:
        """C tokens are generated before one goes, where the prompt is pinned."""
        pinned = self.pin_prompt and not self.budget.counts_generated
        return self.budget.tokens(length) + 1 if pinned else 1

    def prompt_budget(self) -> Budget:
        """A pinned prompt stays whole."""
        return Budget(max(self.shape.lengths)) if self.pinned else super().prompt_budget()

    def note_prompt(self, layer: int, tokens: TokenLists, prompt: Prompt) -> None:
        """Stamps before those of the steps, between -1 and 0: later ones for pages with
        more votes.
        """
        stamps, ids = -1 / (1 + tokens.numbers), tokens.ids
        latest = largest_of_pages(ids, self.lengths[layer], self.page_size, stamps)
        tokens.numbers.copy_(latest.masked_fill(ids < 0, torch.inf))

    def eviction(self, layer: int) -> Eviction:
        """The page with the oldest stamp goes; a pinned prompt stays.

        Stamped with the time of the step are the pages that were looked at, and the one that the
        current token is in.
        """
        first = self.lengths[layer] if self.pinned else None
        alpha = self.each(layer, self.alpha)
        return (
            super()
            .eviction(layer)
            ._replace(
                origin=self.lengths[layer], threshold=alpha, page_size=self.page_size, first=first
            )
        )
