"""SnapKV: prompt compression by the votes of an observation window (Li et al. 2024, "SnapKV: LLM
Knows What You Are Looking for Before Generation", section 4).

The last prompt queries vote for the prompt keys they attend; the votes are smoothed, and only the
best keys and the window itself stay. All else is gone for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvbench.method import Needs, Prompt
from methods.blocks.interval import Interval
from methods.blocks.scorer import Scorer, last_tokens
from methods.blocks.topk import Granularity
from methods.blocks.votes import Join, Pooling, pooled_votes, window_votes


@dataclass(eq=False)
class SnapKV(Scorer):
    """Keep the C - W prompt tokens with most votes and the W of the window.

    Parameters
    ----------
    window
        queries that vote, W.
    kernel
        width of the smoothing, odd.
    pooling
        "max" or "mean".
    join
        the group's mean is taken "before" (KVCache-Factory) or "after" pooling (kvpress).
    granularity
        "kv_head", a set for the group, by its mean; "query_head", each query head its own (as
        published).
    """

    window: int = 32
    kernel: int = 7
    pooling: Pooling = "max"
    join: Join = "before"
    granularity: Granularity = "kv_head"

    def __post_init__(self) -> None:
        self.needs = Needs(query_window=self.window)

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        """The smoothed votes; the window does not vote for itself, nor smooth its votes over its
        neighbours.
        """
        in_window = last_tokens(prompt, self.windows)
        votes = window_votes(prompt, self.window, self.shape).masked_fill(in_window, 0)
        heads = self.shape.kv_heads if self.granularity == "kv_head" else self.shape.query_heads
        return pooled_votes(votes, heads, self.kernel, self.pooling, self.join)


@dataclass(eq=False)
class SnapKVDecode(Interval, SnapKV):
    """SnapKV over all that is held, every `interval` decode steps; a group chooses as one."""

    granularity: Granularity = field(default="kv_head", init=False)
