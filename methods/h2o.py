"""H2O: heavy hitters and recent tokens (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient
Generative Inference of Large Language Models", section 4 and Algorithm 1).

A heavy hitter is a token that has received much attention, summed over all queries so far. Half of
the budget is for them, the other half for the most recent tokens; each step evicts the lightest of
the others, and its sum is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.blocks.evictor import Evictor
from methods.blocks.held import ADD, Eviction, TokenLists
from methods.blocks.scorer import Scorer
from methods.blocks.topk import Granularity


@dataclass(eq=False)
class HeavyHitters(Scorer):
    """Keep the C - W prompt tokens that received most attention from the prompt, and the last W
    (KVCache-Factory).

    Parameters
    ----------
    window
        last tokens of the prompt that stay, W.
    group
        of a group that chooses as one its "mean" or its "max" counts.
    granularity
        "kv_head", a set for the group; "query_head", each query head its own.
    """

    needs = Needs(attention_sums=True)

    window: int = 8
    group: Literal["mean", "max"] = "mean"
    granularity: Granularity = "kv_head"

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The attention that each token received, summed over the queries."""
        assert prompt.attention_sums is not None
        if self.granularity == "query_head":
            return prompt.attention_sums
        grouped = prompt.attention_sums.unflatten(1, (self.shape.kv_heads, -1))
        return grouped.mean(dim=2) if self.group == "mean" else grouped.amax(dim=2)


@dataclass(eq=False)
class RecentAndHeavy(HeavyHitters):
    """Heavy hitters beside a share of the budget that is the most recent tokens'."""

    share: float = 0.5

    def recent(self, capacity: int) -> int:
        """The share of the budget in tokens; at least one, and one less than all."""
        return min(max(1, int(self.share * capacity)), capacity - 1)


@dataclass(eq=False)
class H2O(Evictor):
    """Keep C tokens: the most recent ones, and of the others those that received most attention so
    far.

    Where generated tokens count, the current token is one of the recent ones.

    Parameters
    ----------
    recent
        share of the budget that is the most recent tokens'.
    granularity
        "kv_head", a set for the group, by its mean; "query_head", each query head its own (as
        published).

    Raises
    ------
    ValueError
        the share leaves nothing to heavy hitters, or nothing to recent tokens.
    """

    how = ADD

    recent: float = 0.5
    granularity: Granularity = "kv_head"

    def __post_init__(self) -> None:
        if not 0 < self.recent < 1:
            raise ValueError(
                f"recent={self.recent}: expected a share of the budget above 0 and below 1"
            )
        super().__init__(RecentAndHeavy(share=self.recent), self.granularity)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Note how much of what stays of each row is recent."""
        super().begin(shape, budget, view, context)
        counts = [self.reserved(capacity) - budget.counts_generated for capacity in self.capacities]
        self.recent_counts = shape.for_layers(torch.tensor(counts))

    def reserved(self, capacity: int) -> int:
        """The recent ones."""
        return self.scorer.recent(capacity)

    def note_prompt(self, layer: int, tokens: TokenLists, prompt: Prompt) -> None:
        """The sums begin with the prompt's, recent tokens' too."""
        sums = self.scorer.score(layer, prompt).gather(2, tokens.ids.clamp(min=0))
        tokens.numbers.copy_(sums.masked_fill(tokens.ids < 0, torch.inf))

    def eviction(self, layer: int) -> Eviction:
        """Recent tokens stay."""
        return super().eviction(layer)._replace(recent=self.recent_counts[layer])
