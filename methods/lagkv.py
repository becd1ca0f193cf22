"""LagKV: a token is worth what sets it apart from the tokens that come after it (Liang et al. 2025,
"LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", section 3).

Each stretch of the prompt is normalised, channel by channel, by the least and the largest of the
next stretch: tokens whose channels then spread most stay. No query is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.method import Prompt
from methods.blocks.scorer import Scorer


@dataclass(eq=False)
class LagKV(Scorer):
    """Keep the sinks, the last stretches, which nothing comes after, and the best of each other
    stretch; as many of each, as kvpress has it.

    Parameters
    ----------
    sinks
        first tokens, which stay.
    lag
        tokens of a stretch; of a prompt without two of them the newest tokens stay.
    """

    sinks: int = 4
    lag: int = 128

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The rank of a token in its stretch, over the stretch; 1 for what always stays."""
        scores = torch.ones(prompt.keys.shape[:3], device=prompt.keys.device)
        for row, length in enumerate(prompt.lengths):
            if length < self.sinks + 2 * self.lag:
                newer = torch.arange(max(0, length - self.sinks), device=scores.device)
                scores[row, :, self.sinks : length] = newer / max(1, len(newer))
                continue
            stretches = (length - self.sinks) // self.lag
            end = self.sinks + stretches * self.lag
            inside = slice(self.sinks, end)
            keys, values = prompt.keys[row, :, inside], prompt.values[row, :, inside]
            apart = (self._apart(keys) + self._apart(values)) / 2
            ranks = apart.argsort(dim=-1).argsort(dim=-1) / self.lag
            scores[row, :, self.sinks : end - self.lag] = ranks.flatten(1)
        return scores

    def _apart(self, states: torch.Tensor) -> torch.Tensor:
        """How far the channels of keys or values [H, n, D] spread, as shares of a stretch: [H,
        stretches but the last, lag].
        """
        parts = states.float().unflatten(1, (-1, self.lag))
        least, most = parts[:, 1:].amin(dim=2, keepdim=True), parts[:, 1:].amax(dim=2, keepdim=True)
        tiny = torch.finfo(torch.float32).tiny
        return (
            ((parts[:, :-1] - least) / (most - least).clamp(min=tiny)).std(dim=-1).softmax(dim=-1)
        )
