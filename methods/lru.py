"""LRU: the token that was needed longest ago goes first.

A token is needed in the step in which it comes, and in those that attend it with more than an even
share of the budget. It is the plain cache policy beside the clever ones; RaaS is its relative, with
pages, and a prompt that stays.
"""

from __future__ import annotations

import torch

from kvbench.budget import Budget
from kvbench.method import Context, Prompt, Shape, View
from methods.blocks.evictor import Evictor
from methods.blocks.held import STAMP, Eviction
from methods.blocks.scorer import Scorer


class Newest(Scorer):
    """Keep the last C tokens of the prompt."""

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The position, which is the step in which a token came."""
        position = torch.arange(prompt.keys.shape[2], device=prompt.keys.device)
        return position.float().expand(prompt.keys.shape[:3])


class LRU(Evictor):
    """Keep the C tokens with the latest stamps: positions of the token that last attended them with
    more than 1 / C.

    The attention of a group is averaged. Of equal stamps the earlier token goes first.
    """

    how = STAMP

    def __init__(self) -> None:
        super().__init__(Newest())

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Note 1 / C of each row."""
        super().begin(shape, budget, view, context)
        self.share = shape.for_layers(1 / torch.tensor(self.capacities))

    def eviction(self, layer: int) -> Eviction:
        """The stamp is the position of the current token, for what it attends with more than
        1 / C.
        """
        share, first = self.share[layer], self.each(layer, 1)
        return super().eviction(layer)._replace(origin=first, threshold=share)
