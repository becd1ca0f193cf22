"""Pareto fronts, and marks whose size is a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvbench.report.data.run import missing

# area of a mark: of an arm without a budget, and of the least and most budget
BARE, SMALLEST, LARGEST = 70, 12, 60
FRONT = {"color": "#666666", "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1}


def draw_front(
    axis: Any, costs: Sequence[float], values: Sequence[float], more_is_better: bool
) -> None:
    """Draw the Pareto front: the best value that is to be had at a cost or less, to the axis' right
    end.
    """
    corners = front(costs, values, more_is_better)
    if len(corners) > 0:
        x_min, x_max = axis.get_xlim()
        axis.step(
            [*(cost for cost, _ in corners), x_max], [*(value for _, value in corners), corners[-1][1]],
            where="post", label="Pareto front", **FRONT,
        )  # fmt: skip
        axis.set_xlim(x_min, x_max)


def front(
    costs: Sequence[float], values: Sequence[float], more_is_better: bool
) -> list[tuple[float, float]]:
    """The points (cost, value) to which no other is at once as cheap and as good, and better in
    one; by cost.
    """
    sign, corners, best = (1 if more_is_better else -1), [], -math.inf
    for cost, value in sorted(
        zip(costs, values, strict=True), key=lambda point: (point[0], -sign * point[1])
    ):
        if sign * value > best:
            best = sign * value
            corners.append((cost, value))
    return corners


def areas(budgets: Sequence[Any]) -> dict[Any, float]:
    """The area of the mark of each budget, by equal steps; the largest where there is one."""
    there = sorted({budget for budget in budgets if not missing(budget)})
    step = (LARGEST - SMALLEST) / max(1, len(there) - 1)
    return {budget: LARGEST - step * index for index, budget in enumerate(reversed(there))}
