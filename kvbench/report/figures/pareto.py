"""Pareto fronts, and marks whose size is a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvbench.report.data.run import missing

BARE = 70  # area of the mark of an arm without a budget
SMALLEST, LARGEST = 12, 60  # of the least and the most budget
FRONT = {"color": "#666666", "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1}


def draw_front(
    axis: Any, costs: Sequence[float], values: Sequence[float], more_is_better: bool
) -> None:
    """Draw the Pareto front to the axis' right end: the best value at a cost or less."""
    corners = front(costs, values, more_is_better)
    if len(corners) > 0:
        x_min, x_max = axis.get_xlim()
        x = [*(cost for cost, _ in corners), x_max]
        y = [*(value for _, value in corners), corners[-1][1]]
        axis.step(x, y, where="post", label="Pareto front", **FRONT)
        axis.set_xlim(x_min, x_max)


def front(
    costs: Sequence[float], values: Sequence[float], more_is_better: bool
) -> list[tuple[float, float]]:
    """The points (cost, value) of the Pareto front, by cost.

    No other point is as cheap and as good, and better in one of them.
    """
    sign = 1 if more_is_better else -1
    corners, best = [], -math.inf
    points = zip(costs, values, strict=True)
    for cost, value in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if sign * value > best:
            best = sign * value
            corners.append((cost, value))
    return corners


def areas(budgets: Sequence[Any]) -> dict[Any, float]:
    """The area of the mark of each budget, by equal steps; the largest where there is one."""
    there = sorted({budget for budget in budgets if not missing(budget)})
    step = (LARGEST - SMALLEST) / max(1, len(there) - 1)
    return {budget: LARGEST - step * index for index, budget in enumerate(reversed(there))}
