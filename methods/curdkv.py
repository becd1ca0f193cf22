"""CurDKV: the tokens stay whose keys and values carry most of their neighbourhood (Sengupta et al.
2025, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition", section 4).

Leverage scores say how much of a matrix a row carries; squared norms stand for them, of keys and
values, each as a share of a window of neighbours. No query is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.method import Prompt
from methods.blocks.scorer import Scorer


@dataclass(eq=False)
class CurDKV(Scorer):
    """Keep the sinks and the tokens with the largest product of both shares.

    Parameters
    ----------
    sinks
        first tokens, which stay.
    local
        tokens of a window.
    """

    sinks: int = 4
    local: int = 16

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The key's share times the value's; infinite for sinks."""
        scores = torch.zeros(prompt.keys.shape[:3], device=prompt.keys.device)
        for row, length in enumerate(prompt.lengths):
            keys, values = (part[row, :, :length] for part in (prompt.keys, prompt.values))
            # what overflows carries nothing
            worth = self._shares(values).nan_to_num(nan=0, posinf=0)
            scores[row, :, :length] = self._shares(keys) * worth
        scores[:, :, : self.sinks] = torch.inf
        return scores

    def _shares(self, states: torch.Tensor) -> torch.Tensor:
        """The squared norm of keys or values [H, n, D] over those of its window, [H, n]."""
        squares = states.float().square().sum(dim=-1)
        windows = torch.nn.functional.pad(squares, (0, -squares.shape[1] % self.local))
        whole = windows.unflatten(1, (-1, self.local)).sum(dim=2).repeat_interleave(self.local, 1)
        return squares / whole[:, : squares.shape[1]].clamp(min=torch.finfo(torch.float32).tiny)
