"""Key norm: short keys are the ones attended (Devoto et al. 2024, "A Simple and Effective L2
Norm-Based Strategy for KV Cache Compression", section 3).

The prompt tokens whose keys have the smallest norm stay. No query is asked and no attention is
needed.
"""

from __future__ import annotations

import torch

from kvbench.method import Prompt
from methods.blocks.interval import Interval
from methods.blocks.scorer import Scorer


class KeyNorm(Scorer):
    """Keep the C prompt tokens whose keys have the smallest norm."""

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """Minus the norm of the key, as stored."""
        return -prompt.keys.float().norm(dim=-1)


class KeyNormDecode(Interval, KeyNorm):
    """Key norms of all that is held, every `interval` decode steps."""
