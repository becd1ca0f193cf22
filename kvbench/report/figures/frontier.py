"""The figure `frontier`: where a bit buys more than a token, by the bytes that an arm holds and that its step reads.

A panel has methods, budgets and ways to hold keys and values (`kv=`), and the names of the arms on its Pareto front.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.memory.kinds import KINDS, NATIVE
from kvbench.report.data.run import Run, Runs, missing
from kvbench.report.data.sizes import bytes_held, bytes_of_step
from kvbench.report.data.stats import COVERAGE
from kvbench.report.figures.labels import GAP, SIZE, apart
from kvbench.report.figures.nearness import MEASURES, Found, at_least
from kvbench.report.figures.panels import (
    arms_for,
    finished,
    grid,
    mark_octaves,
    panels_of,
    rows_of,
    series_of,
    size_text,
)
from kvbench.report.figures.pareto import BARE, FRONT, areas, draw_front, front
from kvbench.runs.quantities import KIB, MIB, QUANTITIES

COSTS = {
    "held": (f"held for a token of the context ({KIB.name}): keys and values in both tiers, and the index", KIB.scale),
    "read": (f"a step ({MIB.name}): KV attended and scanned, and brought up from the host", MIB.scale),
}
MARKERS = "osD^vPX*<>"  # by `kv`, in the order of `KINDS`, then of those that differ by tier
WIDE, TALL = 6.8, 4.4  # inches of a panel, and of its axis
ROOM = 8  # an axis begins at the cost of the cheapest arm over this: names are written there


class Point(NamedTuple):
    """An arm in one panel."""

    run: Run
    name: str
    colour: str
    marker: str
    area: float
    costs: dict[str, float]


def frontier(runs: Runs) -> Figure:
    """Score, and KL from full attention, against bytes held and bytes of a step; two rows for each task and model."""
    arms = arms_for(runs, "frontier", probed=False, scored=True)
    costs = pd.DataFrame({"held": bytes_held(runs[run]), "read": bytes_of_step(runs[run])} for run in arms.index)
    arms = arms.join(costs.set_index(arms.index)).dropna(subset=list(COSTS))
    if not len(arms):
        raise ConfigError(
            "figure=frontier: no run with an audit that counts bytes, beside one of method=full on the same samples"
        )
    panels = panels_of("frontier", runs, arms)
    found = [
        (title, own, measure)
        for title, own in panels
        for measure in MEASURES
        if any((value := measure[1](runs[run])) and (measure[0] == "score" or value.mean > 0) for run in own.index)
    ]
    title = f"where a bit buys more than a token; with {COVERAGE} % intervals, left and up or down is better"
    figure, axes = grid(len(found), len(COSTS), title, (WIDE, TALL + 0.7))
    looks = _looks(runs, arms)
    for (title, own, measure), row in zip(found, axes, strict=True):
        points = _points(runs, own, looks)
        for axis, cost in zip(row, COSTS, strict=True):
            axis.set_title(title)
            _draw(axis, points, cost, measure)
    _explain(axes[0, 0], runs, arms, looks)
    return finished(figure, axes, [own for _, own in panels])


class _Looks(NamedTuple):
    """How arms can be known: a marker for each `kv`, an area for each budget."""

    markers: dict[str, str]
    areas: dict[Any, float]


def _looks(runs: Runs, arms: pd.DataFrame) -> _Looks:
    there = set(map(str, runs.settings.loc[arms.index, "kv"]))
    kinds = [*KINDS["device"], *sorted(there - set(KINDS["device"]))]
    markers = {kind: marker for kind, marker in zip(kinds, cycle(MARKERS), strict=False) if kind in there}
    return _Looks(markers, areas(list(arms["budget"])))


def _points(runs: Runs, arms: pd.DataFrame, looks: _Looks) -> list[Point]:
    found = []
    for one in series_of(runs, arms, without="kv"):
        for arm in rows_of(one.arms):
            kv = str(runs.settings.at[arm.name, "kv"])
            name = one.label(arm.budget) + (f", {kv}" if kv != str(NATIVE) else "")
            area = BARE if missing(arm.budget) else looks.areas[arm.budget]
            costs = {cost: arm[cost] * scale for cost, (_, scale) in COSTS.items()}
            found.append(Point(runs[arm.name], name, one.style.colour, looks.markers[kv], area, costs))
    return found


def _draw(axis: Any, points: Sequence[Point], cost: str, measure: tuple[str, Found]) -> None:
    """One measure over one cost; what is at 0 of it, as full attention is of KL, is a line at its cost."""
    name, found = measure
    more, drawn = name == "score", {}
    for point in points:
        value, x = found(point.run), point.costs[cost]
        if value is None:
            continue
        if not more and value.mean <= 0:
            axis.axvline(x, color=point.colour, linestyle="--", linewidth=1.2, label=f"{point.name}: 0")
            continue
        shown = value if more else at_least(value)
        y = shown.mean
        if shown.low is not None and shown.high is not None:
            axis.plot([x, x], [shown.low, shown.high], color=point.colour, alpha=0.3)
        axis.scatter(x, y, s=point.area, marker=point.marker, facecolor="none", edgecolor=point.colour, linewidth=1.4)
        drawn[point.name] = (x, y, point.colour)
    costs, values = [x for x, _, _ in drawn.values()], [y for _, y, _ in drawn.values()]
    axis.set(xlabel=COSTS[cost][0], ylabel=QUANTITIES[name].axis, **({} if more else {"yscale": "log"}))
    left, right = min(costs), max(point.costs[cost] for point in points)
    mark_octaves(axis, left, right)
    axis.set_xlim(left / ROOM, 1.2 * right)
    axis.margins(y=0.08)
    draw_front(axis, costs, values, more)
    corners = set(front(costs, values, more))
    _name_front(axis, {name: point for name, point in drawn.items() if point[:2] in corners})


def _name_front(axis: Any, points: dict[str, tuple[float, float, str]]) -> None:
    """Names left of the points of a front, and of those at their height: what was drawn there would be the front."""
    to_axis = axis.transData + axis.transAxes.inverted()
    there = {name: to_axis.transform((x, y)) for name, (x, y, _) in points.items()}
    placed = sorted((float(high), float(along), name) for name, (along, high) in there.items())
    for height, (_, along, name) in zip(apart([high for high, _, _ in placed], GAP / TALL), placed, strict=True):
        x, y, colour = points[name]
        beside = min([along, *(other for high, other, _ in placed if abs(high - height) < 1.5 * GAP / TALL)])
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.5, "shrinkA": 0, "shrinkB": 5}
        axis.annotate(
            name, (x, y), (beside - 0.03, height), xycoords="data", textcoords="axes fraction", arrowprops=line,
            fontsize=SIZE, color=colour, ha="right", va="center",
        )  # fmt: skip


def _explain(axis: Any, runs: Runs, arms: pd.DataFrame, looks: _Looks) -> None:
    """What colours, markers and sizes stand for, to the legend."""
    grey = {"facecolor": "none", "edgecolor": FRONT["color"]}
    for one in series_of(runs, arms, without="kv"):
        axis.scatter([], [], s=60, marker="o", color=one.style.colour, label=one.label())
    for kind, marker in looks.markers.items():
        axis.scatter([], [], s=60, marker=marker, label=f"kv={kind}", **grey)
    for budget, area in looks.areas.items():
        axis.scatter([], [], s=area, marker="o", label=f"C = {size_text(budget)}", **grey)
