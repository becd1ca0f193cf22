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
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from math import floor
from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Selection, Shape, View
from methods.streaming_llm import StreamingLLM

CLASSES = 3


@dataclass(eq=False)
class SqueezeAttention(StreamingLLM):
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

    p: float = 0.38
    base: Literal["streaming_llm", "window"] = "streaming_llm"
    positions: Literal["cache", "original"] = "original"

    def __post_init__(self) -> None:
        if self.base not in ("streaming_llm", "window"):
            raise ValueError(f"base={self.base}: streaming_llm or window")
        if self.base == "window":
            self.sinks = 0
        self.needs = Needs(layer_similarity=True, positions=self.positions, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No layer has its share yet."""
        super().begin(shape, budget, view, context)
        self.squeezed = 0.0

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Nothing is dropped before all layers have their shares."""

    def observe_layers(self, similarity: torch.Tensor) -> None:
        """Share the budget of each row out between the layers."""
        rows = []
        for row, cosines in enumerate(similarity.T.tolist()):
            mean, length = self.capacities[row], self.shape.lengths[row]
            least_changed = highest_class(cosines) if length > mean else []
            rows.append(shared_out(mean, self.p, len(cosines), least_changed))
            self.squeezed += len(least_changed) / len(self.shape.lengths)
        for layer, *shares in zip(self.shape.sparse_layers, *rows, strict=True):
            self._share(layer, torch.tensor(shares)[:, None])

    def end_prefill(self) -> None:
        """Drop what no layer's share holds."""
        for layer in self.shape.sparse_layers:
            self._drop(layer)

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        """The recent tokens, newest first, and the sinks."""
        return Selection(self._attended(layer), sinks=self.sinks)

    def rule(self, layer: int, length: int, generated: int) -> int:
        """The layer's share, of rows with such a prompt the largest."""
        rows = zip(self.counts[layer][:, 0].tolist(), self.shape.lengths, strict=True)
        return max(count for count, row_length in rows if row_length == length)

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
    sums = [0.0, *accumulate(ordered)]
    squares = [0.0, *accumulate(value**2 for value in ordered)]

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
