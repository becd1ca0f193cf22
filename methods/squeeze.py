"""SqueezeAttention: less for layers whose attention changes little (Wang et al. 2024,
"SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget",
Algorithm 1).

The cosine of the hidden states before and after a layer's attention, over the prompt, says how much
the layer matters. Layers fall into three classes by it; the class that attention changes least
gives most of its budget to the others. In each layer another method then keeps tokens: here sinks
and recent ones. The current token is one of a layer's share, as in the published code of Mistral;
that of Llama attends it on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from math import floor
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Method, Needs, Selection, Shape, View
from methods.blocks.recent import sinks_and_recent

CLASSES = 3
# decode steps between two evictions: between them memory holds up to this many tokens more
DROP_EVERY = 32


class SqueezeAttention(Method):
    """Attend in each layer sinks and recent tokens, as many as its share of the budget; the mean
    over layers is C.

    Each row has classes of its own. A prompt of C tokens or fewer leaves nothing to share out:
    every layer has C.

    Parameters
    ----------
    p
        of C, what the layers of the highest class keep.
    base
        "streaming_llm", sinks and recent tokens at the positions of the text; "window", recent
        tokens alone.
    sinks
        first tokens that always stay, with base "streaming_llm".
    positions
        "original", keys keep the positions of the text; "cache", they are rotated to their index in
        what the layer attends, as in the published code of Llama.
    """

    evicts = "always"

    def __init__(
        self,
        p: float = 0.38,
        base: Literal["streaming_llm", "window"] = "streaming_llm",
        sinks: int = 4,
        positions: Literal["original", "cache"] = "original",
    ) -> None:
        if base not in ("streaming_llm", "window"):
            raise ValueError(f"base={base}: streaming_llm or window")
        self.p = p
        self.sinks = sinks if base == "streaming_llm" else 0
        self.needs = Needs(layer_similarity=True, positions=positions)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No layer has its share yet."""
        super().begin(shape, budget, view, context)
        self.shares: dict[int, list[int]] = {}  # of each layer and row
        self.squeezed = 0.0
        self.steps = 0

    def observe_layers(self, similarity: torch.Tensor) -> None:
        """Share the budget of each row out between the layers."""
        rows = []
        for mean, length, cosines in zip(
            self.capacities, self.shape.lengths, similarity.T.tolist(), strict=True
        ):
            least_changed = highest_class(cosines) if length > mean else []
            rows.append(shared_out(mean, self.p, len(cosines), least_changed))
            self.squeezed += len(least_changed) / len(self.shape.lengths)
        self.shares = dict(
            zip(self.shape.sparse_layers, map(list, zip(*rows, strict=True)), strict=True)
        )
        self.counts = {
            layer: torch.tensor(shares)[:, None] for layer, shares in self.shares.items()
        }

    def end_prefill(self) -> None:
        """Drop what no layer's share holds."""
        for layer in self.shape.sparse_layers:
            self._drop(layer)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The recent tokens, newest first, and the sinks."""
        return Selection(self._attended(layer))

    def end_step(self) -> None:
        """Now and then drop what has left the recent tokens; between two drops it is not
        attended.
        """
        self.steps += 1
        if self.steps % DROP_EVERY == 0:
            for layer in self.shape.sparse_layers:
                self._drop(layer)

    def _drop(self, layer: int) -> None:
        if any(
            length > share
            for length, share in zip(self.view.lengths(layer), self.shares[layer], strict=True)
        ):
            self.view.keep(layer, self._attended(layer), DROP_EVERY)

    def _attended(self, layer: int) -> torch.Tensor:
        """Token ids [B, 1, M] on the CPU."""
        lengths = self.view.lengths(layer)
        most = max(map(min, zip(self.shares[layer], lengths, strict=True)))
        return sinks_and_recent(torch.tensor(lengths), self.counts[layer], self.sinks, most)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """The layer's share, of rows with such a prompt the largest."""
        rows = zip(self.shares[layer], self.shape.lengths, strict=True)
        return max(share for share, row_length in rows if row_length == length)

    def mean_rule(self, length: int, generated: int) -> int:
        """C, the mean of the layers' shares."""
        return self.budget.tokens(length)

    def report(self) -> dict[str, float]:
        """Layers of the highest class, a row."""
        return {"squeezed_layers": self.squeezed}


def shared_out(mean: int, p: float, layers: int, squeezed: Sequence[int]) -> list[int]:
    """Tokens of each layer, layers * mean in all: p * mean of those squeezed, and equal shares of
    the rest.

    What does not divide goes to the lowest layers. The published code rounds every share down.
    """
    small = floor(round(p * mean, 9))
    others = [layer for layer in range(layers) if layer not in squeezed]
    share, more = divmod(layers * mean - len(squeezed) * small, len(others))
    counts = [small] * layers
    for index, layer in enumerate(others):
        counts[layer] = share + (index < more)
    return counts


def highest_class(values: Sequence[float]) -> list[int]:
    """Indices of the class with the largest values, of the best three by k-means; none where all
    values are equal.

    On a line the best classes are intervals, so all cuts are tried: the published code's k-means
    finds them, or a local optimum, by chance. Equal values are never apart. Fewer than three
    different values are classes of their own.
    """
    centre = sum(values) / len(values)
    ordered = sorted(value - centre for value in values)
    sums, squares = (
        [0.0, *accumulate(powers)] for powers in (ordered, [value**2 for value in ordered])
    )

    def spread(cuts: Sequence[int]) -> float:
        """Sum of squared distances from the means of the classes."""
        return sum(
            squares[stop] - squares[start] - (sums[stop] - sums[start]) ** 2 / (stop - start)
            for start, stop in pairwise((0, *cuts, len(ordered)))
        )

    between = [at for at in range(1, len(ordered)) if ordered[at] > ordered[at - 1]]
    if not between:
        return []
    best = min(combinations(between, min(CLASSES - 1, len(between))), key=spread)
    least = ordered[best[-1]]
    return [index for index, value in enumerate(values) if value - centre >= least]
