"""OmniKV: a few layers choose tokens for those after them (Hao et al. 2025, "OmniKV: Dynamic
Context Selection for Efficient Long-Context LLMs", section 4).

Consecutive layers attend much the same tokens. At every step a filter layer, which attends
everything, finds the prompt tokens with the largest logits; the layers after it, up to the next
filter, attend these and what was generated. Their prompt lives on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Selection, Shape, View
from methods.blocks.products import products
from methods.blocks.ragged import stacked
from methods.blocks.topk import top_earliest

PUBLISHED_FILTERS, PUBLISHED_LAYERS = (2, 8, 18), 32


@dataclass(eq=False)
class OmniKV(Method):
    """Attend, in the layers that follow a filter, its C prompt tokens and all generated ones; in
    the others everything.

    A filter scores a token by its largest product with the query of any head, and has one list for
    all of them. Whole stay the layers before the first filter, the filters, and the `wait` layers
    after each, during which the published code brings tokens up. Where generated tokens count, up
    to C / 4 are always attended; older ones compete with the prompt's.

    Parameters
    ----------
    filters
        layers that choose, ascending; None: the published 2, 8 and 18 of 32, as deep in this model.
        For one that stays dense for all methods, or has a window, the next one chooses.
    wait
        layers after each filter that attend everything.

    Raises
    ------
    ValueError
        the filters are not ascending, or (in `begin`) the model has fewer layers.
    """

    needs = Needs(home="by_layer")

    filters: Sequence[int] | None = None
    wait: int = 1

    def __post_init__(self) -> None:
        if self.filters is not None and not ascending(self.filters):
            raise ValueError(
                f"filters={self.filters}: expected ascending layers, such as [2,8,18], or null"
            )

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Find out which layers follow which filter."""
        super().begin(shape, budget, view, context)
        layers, configured = shape.sparse_layers, self.filters
        if configured is not None and configured[-1] >= shape.layers:
            raise ValueError(f"filters={configured}: the model has {shape.layers} layers")
        filters = next_layers(
            as_deep_as_published(shape.layers) if configured is None else configured, layers
        )
        indexes = [layers.index(layer) for layer in filters]
        self.filter_of: dict[int, int] = {}  # of each layer that attends what a filter chose
        for index, stop in zip(indexes, [*indexes, len(layers)][1:], strict=True):
            self.filter_of |= dict.fromkeys(layers[index + 1 + self.wait : stop], layers[index])
        self.chosen: dict[int, Selection] = {}

    def home(self, layer: int) -> Literal["device", "host"]:
        """The host, of layers that attend what a filter chose."""
        return "host" if layer in self.filter_of else "device"

    def select(self, layer: int, query: torch.Tensor) -> Selection | None:
        """What the filter before this layer chose, or everything; a filter chooses."""
        if layer in self.filter_of:
            return Selection(self.chosen[self.filter_of[layer]].index.to(query.device))
        if layer in self.filter_of.values():
            self.chosen[layer] = self._choose(layer, query)
        return None

    def _choose(self, layer: int, query: torch.Tensor) -> Selection:
        """The tokens with the largest products in any head, then the generated ones that are always
        attended.
        """
        largest = products(query, self.view.keys(layer)).flatten(1, 2).amax(dim=1)  # [B, n]
        lists = []
        for row, length in enumerate(self.view.lengths(layer)):
            always, capacity = length - self.shape.lengths[row], self.capacities[row]
            if self.budget.counts_generated:
                always = min(always, capacity // 4)
                capacity -= always
            best = top_earliest(largest[row, : length - always].view(1, 1, -1), capacity)[0]
            newest = torch.arange(length - always, length, device=best.device)
            lists.append(torch.cat([best, newest[None]], dim=1))
        return Selection(stacked(lists))

    def rule(self, layer: int, length: int, generated: int) -> int | None:
        """C and the generated tokens, or C alone where they count; no limit in a layer that attends
        everything.
        """
        if layer not in self.filter_of:
            return None
        capacity = self.budget.tokens(length)
        return capacity if self.budget.counts_generated else capacity + generated

    def report(self) -> dict[str, float]:
        """Share of the layers, of those it was asked about, that attended everything."""
        return {"whole_share": 1 - len(self.filter_of) / len(self.shape.sparse_layers)}


def ascending(layers: object) -> bool:
    """Whether these are layers, one or more, each above the one before it."""
    if not isinstance(layers, Sequence) or not all(
        type(layer) is int and layer >= 0 for layer in layers
    ):
        return False
    return len(layers) > 0 and list(layers) == sorted(set(layers))


def as_deep_as_published(layers: int) -> list[int]:
    """The published filters at the same share of a model's depth."""
    return [round(layer * layers / PUBLISHED_LAYERS) for layer in PUBLISHED_FILTERS]


def next_layers(filters: Sequence[int], layers: Sequence[int]) -> list[int]:
    """The next of `layers` from each filter on, both ascending; two that meet are one, beyond the
    last is none.
    """
    matches = []
    for filter_layer in filters:
        matches += [layer for layer in layers if layer >= filter_layer][:1]
    return list(dict.fromkeys(matches))
