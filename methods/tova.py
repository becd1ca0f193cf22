"""TOVA: what the newest token attends least goes (Oren et al. 2024, "Transformers are Multi-State
RNNs", section 3.2).

A transformer with a bounded cache is a recurrent network with that many states. Each step drops the
state that its query attends least, by the mean over all heads of a layer, which hold the same
tokens.
"""

from __future__ import annotations

import torch

from kvbench.method import Needs, Prompt
from methods.blocks.evictor import Evictor
from methods.blocks.held import REPLACE, Eviction
from methods.blocks.interval import Interval
from methods.blocks.scorer import Scorer
from methods.blocks.votes import window_votes


class LastQuery(Scorer):
    """Keep the C prompt tokens that its last query attends most, the same in all heads."""

    granularity = "layer"
    needs = Needs(query_window=1)

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The attention of the last query, the mean over all query heads."""
        return window_votes(prompt, 1, self.shape).mean(dim=1, keepdim=True)


class TOVA(Evictor):
    """Keep the C tokens that the query of the step attends most, one list for all heads of a layer.

    The current token is not protected: it may be the one that goes.
    """

    how = REPLACE

    def __init__(self) -> None:
        super().__init__(LastQuery(), "layer")

    def eviction(self, layer: int) -> Eviction:
        """What a token receives in this step is what it is worth."""
        return super().eviction(layer)._replace(origin=self.each(layer, 0))


class TOVADecode(Interval, LastQuery):
    """TOVA's choice among all that is held every `interval` decode steps, by the last query of
    these.
    """
