"""AdaKV over SnapKV (Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget
Allocation for Efficient LLM Inference", Ada-SnapKV).

The prompt is compressed as SnapKV does, by votes, but the heads of a layer compete for its budget.
"""

from __future__ import annotations

from methods.blocks.head_budgets import HeadBudgets, Safeguard
from methods.blocks.topk import Granularity
from methods.blocks.votes import Join, Pooling
from methods.snapkv import SnapKV


class AdaSnapKV(SnapKV):
    """Keep C prompt tokens of each head on average, the W of the window inside.

    Parameters
    ----------
    alpha, safeguard
        see `HeadBudgets`.
    window, kernel, pooling, join, granularity
        see `SnapKV`; the heads that compete are those that choose.
    """

    def __init__(
        self,
        alpha: float = 0.2,
        safeguard: Safeguard = "share",
        window: int = 32,
        kernel: int = 7,
        pooling: Pooling = "max",
        join: Join = "before",
        granularity: Granularity = "kv_head",
    ) -> None:
        super().__init__(window, kernel, pooling, join, granularity)
        self.heads = HeadBudgets(alpha, safeguard)
