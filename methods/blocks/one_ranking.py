"""One ranking of the pairs of keys and values of all layers and heads, for scorers whose scores can
be compared across these, such as KVzip's.
"""

from __future__ import annotations

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Shape, View
from methods.blocks.ragged import stacked
from methods.blocks.scorer import ROLLING_WINDOW, Scorer


class OneRanking(Scorer):
    """Keep C prompt tokens of each KV head on average over the sparse layers; a head may keep all,
    or next to none.

    The tokens before the context, such as the chat template's, stay whatever their scores, inside
    C: `Needs.prefix` tells of them, and `score` makes them infinite.

    Attributes
    ----------
    layerwise
        each layer keeps C on average, and only its heads compete.
    threshold
        what scores less goes even where C has room; None: nothing.
    """

    layerwise: bool = False
    threshold: float | None = None

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """No layer has scores yet."""
        super().begin(shape, budget, view, context)
        self.scores: dict[int, torch.Tensor] = {}

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Score the layer's tokens; what is kept shows once all layers have scores.

        Raises
        ------
        ValueError
            there is nothing before the context and in it to choose from, or no room for it.
        """
        for length, before, capacity in zip(
            prompt.lengths, prompt.prefixes, self.capacities, strict=True
        ):
            check_context(length, before, capacity, self.fixed(capacity) - self.end(capacity))
        self.scores[layer] = self.score(layer, prompt).masked_fill(
            self.protected(prompt), torch.inf
        )

    def end_prefill(self) -> None:
        """Keep the best pairs of all layers and heads."""
        retained = [
            self._retained_mask(row, length) for row, length in enumerate(self.shape.lengths)
        ]
        whole = all(bool(row.all()) for row in retained)
        older = [
            row.index_fill(2, torch.arange(*recent, device=row.device), False)
            for row, recent in zip(retained, self.recents, strict=True)
        ]
        for at, layer in enumerate(self.scores):
            device = self.shape.device_of(layer)
            if not whole:
                room = ROLLING_WINDOW if self.budget.counts_generated else None
                self.view.keep(layer, stacked([_ids(row[at]).to(device) for row in retained]), room)
            if not self.at_rest:
                self.scored[layer] = [_ids(row[at]).to(device) for row in older]
        self.scores = {}

    def _retained_mask(self, row: int, length: int) -> torch.Tensor:
        """[layers, Hkv, length] bool, which tokens of a row stay: of equal scores the first in that
        order.
        """
        layers = [scores[row, :, :length] for scores in self.scores.values()]
        scores = torch.stack([of_layer.to(self.shape.device) for of_layer in layers])
        ranked = scores.view(len(scores) if self.layerwise else 1, -1)
        count = self.capacities[row] * ranked.shape[1] // max(length, 1)
        best = ranked.argsort(dim=1, descending=True, stable=True)[:, :count]
        retained = torch.zeros_like(ranked, dtype=torch.bool).scatter(1, best, True)
        if self.threshold is not None:
            retained &= ranked >= self.threshold
        return retained.view_as(scores)

    def _most_of_head(self, capacity: int, length: int) -> int:
        """All others may keep next to nothing."""
        competing = self.shape.kv_heads * (1 if self.layerwise else len(self.shape.sparse_layers))
        return max(capacity, min(length, capacity * competing))


def check_context(length: int, before: int, capacity: int, recent: int) -> None:
    """Refuse a prompt of `length` tokens without a context, or a budget without room for any of it.

    Parameters
    ----------
    before
        tokens before the context, which stay, as the `recent` last ones do.

    Raises
    ------
    ValueError
        says what would be right.
    """
    if before >= length:
        raise ValueError(
            f"prompt of {length} tokens: {before} come before the context; expected a text after"
            " them"
        )
    if before + recent >= capacity < length:
        newest = f", and the last {recent}" if recent else ""
        raise ValueError(
            f"budget={capacity}: the {before} tokens before the context stay{newest}; expected"
            f" {before + recent + 1} tokens or more"
        )


def _ids(chosen: torch.Tensor) -> torch.Tensor:
    """Ids [H, n] of what is chosen of each list [H, N], ascending, trailing -1."""
    length = chosen.shape[1]
    ids = torch.where(chosen, torch.arange(length, device=chosen.device), length).sort(dim=1).values
    return torch.where(ids < length, ids, -1)[:, : int(chosen.sum(dim=1).max())]
