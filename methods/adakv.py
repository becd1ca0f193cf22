"""AdaKV over SnapKV (Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget
Allocation for Efficient LLM Inference", Ada-SnapKV).

The prompt is compressed as SnapKV does, by votes, but the heads of a layer compete for its budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from methods.blocks.head_budgets import HeadBudgets, Safeguard
from methods.snapkv import SnapKV


@dataclass(eq=False)
class AdaSnapKV(SnapKV):
    """Keep C prompt tokens of each head on average, the W of the window inside.

    The heads that compete are those that choose: see `granularity` of `SnapKV`, whose options it
    has, too.

    Parameters
    ----------
    alpha, safeguard
        see `HeadBudgets`.
    """

    alpha: float = 0.2
    safeguard: Safeguard = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heads = HeadBudgets(self.alpha, self.safeguard)
