"""Twilight: adaptive attention sparsity by top-p pruning (Lin et al. 2025, "Twilight: Adaptive
Attention Sparsity with Hierarchical Top-p Pruning", section 4).

A selector, such as Quest, proposes generously. For every query head the weights of what it proposes
are estimated with keys of four bits, and the fewest tokens that hold a share p of them are
attended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Prompt, Selection, Shape, View
from methods.quest import Quest
from methods.topk import TopK
from methods.twilight.estimate import FourBitKeys

# tokens that are proposed for one of the budget, where the budget says how many are attended
PROPOSED = 4
WINDOW = 8  # last queries of the prompt, by which a budget is met
SHARES = 1000  # p is a whole number of thousandths


class ProposingQuest(Quest):
    """Quest as Twilight's code has it: of a budget that is no whole number of pages, the rest is a
    page, too.
    """

    def share(self, capacity: int) -> int:
        """C / page_size pages, rounded up; down under unified accounting, where C is the most."""
        return super().share(capacity) if self.budget.unified else -(-capacity // self.page_size)


class ProposingTopK(TopK):
    """The oracle, which has no bounds of pages."""

    def last_bounds(self, layer: int) -> tuple[None, None, None]:
        """None, as `Quest.last_bounds`."""
        return None, None, None


SELECTORS = {"quest": ProposingQuest, "topk": ProposingTopK}


@dataclass(eq=False)
class Twilight(Method):
    """Attend, of each query head, the fewest of the selector's tokens that hold a share p of their
    estimated attention.

    The budget C is the selector's: what is attended is at most that, and as a rule far less. With
    unified accounting the query heads of a group choose from one list of C tokens.

    Calibrated, the budget is what a query head attends on average, by what the prompt's last
    queries attend: the selector proposes 4 C, and p is the largest with which these queries, in all
    layers, would keep no more than C of the best 4 C. Under unified accounting, where C is the
    most, nothing is left to prune then: p = 1.

    Parameters
    ----------
    selector
        what proposes tokens: "quest", or "topk", the oracle.
    p
        share of the estimated attention that is enough; 1 keeps whatever is proposed.
    calibrated
        each prompt has a p of its own, which follows from the budget.

    Raises
    ------
    ValueError
        p is outside of (0, 1].
    """

    selector: Literal["quest", "topk"] = "quest"
    p: float = 0.85
    calibrated: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(
                f"p={self.p}: a share of the attention; expected a number above 0, at most 1"
            )
        self.proposer: ProposingQuest | ProposingTopK = SELECTORS[self.selector]()
        self.needs = Needs(query_window=WINDOW if self.calibrated else 0, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """The selector begins, and no key is coded yet."""
        super().begin(shape, budget, view, context)
        self.calibrates = self.calibrated and not budget.unified
        proposed = _times(budget, PROPOSED) if self.calibrates else budget
        self.proposer.begin(shape, proposed, view, context)
        self.coded: dict[int, FourBitKeys] = {}
        self.shares = [1.0 if self.calibrated else self.p] * shape.batch  # p of each row
        # over layers, of what each p would keep
        self.sums = torch.zeros(shape.batch, SHARES, dtype=torch.float64)

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """The selector's index, and every key in four bits."""
        self.proposer.prefill(layer, prompt)
        self.coded[layer] = coded = FourBitKeys(prompt.keys, self.context.new_tokens)
        if not self.calibrates:
            return
        thousandths = torch.arange(1, SHARES + 1, dtype=torch.float64, device=prompt.keys.device)
        for row, (length, capacity) in enumerate(zip(prompt.lengths, self.capacities, strict=True)):
            queries, most = prompt.queries[row, :, -length:], PROPOSED * capacity
            shares = thousandths / SHARES
            self.sums[row] += coded.counts(row, queries, length, most, self.shape, shares).cpu()

    def end_prefill(self) -> None:
        """Where p follows from the budget, find it."""
        self.proposer.end_prefill()
        if self.calibrates:
            means = self.sums / len(self.shape.sparse_layers)
            within = (means <= torch.tensor(self.capacities)[:, None]).sum(dim=1)
            self.shares = (within.clamp(min=1) / SHARES).tolist()

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """The new key, in the selector's index and in four bits."""
        coded, tokens = self.coded[layer], [length - 1 for length in self.view.lengths(layer)]
        if key.is_cuda:
            bounds = self.proposer.last_bounds(layer)
            coded.write(tokens, key, self.view.seen(layer), bounds)
        else:
            self.proposer.append(layer, key, value)
            coded.write(tokens, key)

    def end_step(self) -> None:
        """The proposer's."""
        self.proposer.end_step()

    @property
    def layout(self) -> object:
        """The proposer's, and keys that there is memory for."""
        layer = self.shape.sparse_layers[0]
        room, proposed = self.coded[layer].codes.shape[2], self.proposer.layout
        full = max(self.view.lengths(layer)) >= room
        return None if full or proposed is None else (proposed, room)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """What the selector proposes, pruned."""
        asked = self.shape, self.shares
        if query.is_cuda and not self.budget.unified:
            ranges = self.proposer.ranges(layer, query)
            return Selection(self.coded[layer].top_p_of_pages(query, ranges, *asked))
        proposed = self.proposer.select(layer, query)
        assert proposed is not None, "a selector of Twilight names its tokens"
        return Selection(self.coded[layer].top_p(query, proposed.index, *asked))

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """The selector's."""
        return self.proposer.rule(layer, length, generated)

    def report(self) -> dict[str, float]:
        """Share of the proposed tokens that was attended, the mean over query heads, layers and
        steps; and p.
        """
        counts = [coded.counted.tolist() for coded in self.coded.values()]
        proposed, attended = map(sum, zip(*counts, strict=True))
        return {"kept_share": attended / max(proposed, 1), "p": sum(self.shares) / len(self.shares)}


def _times(budget: Budget, factor: int) -> Budget:
    """So many times the budget; a share at most 1."""
    size = budget.size
    if size is not None:
        size = min(1.0, factor * size) if isinstance(size, float) else factor * size
    return replace(budget, size=size)
