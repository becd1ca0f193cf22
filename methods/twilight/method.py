"""Twilight: adaptive attention sparsity by top-p pruning (Lin et al. 2025, "Twilight: Adaptive Attention Sparsity with
Hierarchical Top-p Pruning", section 4).

A selector, such as Quest, proposes generously. For every query head the weights of what it proposes are estimated with
keys of four bits, and the fewest tokens that hold a share p of them are attended.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Prompt, Selection, Shape, View
from methods.quest import Quest
from methods.topk import TopK
from methods.twilight.estimate import FourBitKeys, compile_kernels

SELECTORS = {"quest": Quest, "topk": TopK}


class Twilight(Method):
    """Attend, of each query head, the fewest of the selector's tokens that hold a share p of their estimated attention.

    The budget C is the selector's: what is attended is at most that, and as a rule far less. With unified accounting
    the query heads of a group choose from one list of C tokens.

    Args:
        selector: what proposes tokens: "quest", or "topk", the oracle.
        p: share of the estimated attention that is enough; 1 keeps whatever is proposed.

    Raises:
        ValueError: p is outside of (0, 1].
    """

    def __init__(self, selector: Literal["quest", "topk"] = "quest", p: float = 0.85) -> None:
        if not 0 < p <= 1:
            raise ValueError(f"p={p}: a share of the attention; expected a number above 0, at most 1")
        self.selector, self.p = SELECTORS[selector](), p

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """The selector begins, and no key is coded yet."""
        super().begin(shape, budget, view, context)
        self.selector.begin(shape, budget, view, context)
        if shape.device.type == "cpu":
            compile_kernels(context.pool)
        self.coded: dict[int, FourBitKeys] = {}
        self.counted = shape.for_layers(torch.zeros(2, dtype=torch.int64))  # tokens proposed, and tokens kept, so far

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """The selector's index, and every key in four bits."""
        self.selector.prefill(layer, prompt)
        self.coded[layer] = FourBitKeys(prompt.keys, self.context.new_tokens)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The new key, in the selector's index and in four bits."""
        self.selector.append(layer, key, value)
        self.coded[layer].write([length - 1 for length in self.view.lengths(layer)], key)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """What the selector proposes, pruned."""
        proposed = self.selector.select(layer, query)
        assert proposed is not None, "a selector of Twilight names its tokens"
        kept = self.coded[layer].top_p(query, proposed.index, self.shape.scaling, self.p, self.context.pool)
        share = self.shape.query_heads // proposed.index.shape[1]
        counts = torch.stack([share * (proposed.index >= 0).sum(), (kept >= 0).sum()])
        self.counted[layer] = self.counted[layer] + counts
        return Selection(kept)

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """The selector's."""
        return self.selector.rule(layer, length, generated)

    def report(self) -> dict[str, float]:
        """Share of the proposed tokens that was attended, the mean over query heads, layers and steps."""
        proposed, kept = map(sum, zip(*(counts.tolist() for counts in self.counted.values()), strict=True))
        return {"kept_share": kept / max(proposed, 1)}
