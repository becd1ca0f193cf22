"""Random eviction: what a score is worth is what it gains over this.

Each KV head keeps tokens by lot, those of a prompt once, or one token goes with each that comes.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Selection, Shape, View
from methods.blocks.evictor import Evictor
from methods.blocks.scorer import Scorer


class RandomTokens(Scorer):
    """Keep C prompt tokens of each KV head by lot, in each layer others.

    Attributes
    ----------
    generators
        of each layer and row; a row draws as many numbers as it has tokens, whatever stands beside
        it.
    """

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Nothing is drawn yet."""
        super().begin(shape, budget, view, context)
        self.generators: dict[int, list[torch.Generator]] = {}

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """A number between 0 and 1 for each token and KV head."""
        rows = self.generators[layer] = [
            self.context.generator(layer, row=row) for row in range(self.shape.batch)
        ]
        scores = torch.zeros(prompt.keys.shape[:3])
        for row, (length, generator) in enumerate(zip(prompt.lengths, rows, strict=True)):
            scores[row, :, :length] = torch.rand(scores.shape[1], length, generator=generator)
        return scores.to(prompt.keys.device)


class RandomEviction(Evictor):
    """Give each token a random number as it comes, for each KV head, and let the smallest go once C
    are held.
    """

    host_step = True
    scorer: RandomTokens

    def __init__(self) -> None:
        super().__init__(RandomTokens())

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        """Draw the number of the current token; attention changes nothing."""
        generators, tokens = self.scorer.generators[layer], self.token_lists[layer]
        drawn = torch.stack([torch.rand(self.lists, 1, generator=row) for row in generators])
        tokens.numbers.scatter_(2, tokens.counts[..., None] - 1, drawn.to(probabilities.device))
        super().observe(layer, selection, probabilities)


def random(evict: Literal["once", "always"] = "once") -> RandomTokens | RandomEviction:
    """The method: it evicts "once", after the prompt, or "always", a token a step.

    Parameters
    ----------
    evict
        which of the two.
    """
    return RandomTokens() if evict == "once" else RandomEviction()
