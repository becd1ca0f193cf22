"""The figure `tradeoff`: score, or nearness to full attention, against its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogFormatter, NullFormatter

from kvbench.report.data.run import Runs
from kvbench.report.data.stats import intervals
from kvbench.report.data.style import Style
from kvbench.report.figures.panels import (
    MOST_PANELS,
    Panel,
    arms_for,
    fill_of,
    finished,
    fit_scores,
    grid,
    log_y,
    panels_of,
    ranking,
    refuse_crowd,
    series_of,
    size_text,
)
from kvbench.report.figures.pareto import BARE, FRONT, areas, draw_front
from kvbench.runs.quantities import METHOD_TIME, QUANTITIES, Quantity

DEVICE_KV, INDEXED = (QUANTITIES[name] for name in ("device_kv_bytes", "device_index_bytes"))
TIME, OWN_TIME = (QUANTITIES[name] for name in ("tpot_ms_mean", "own_ms"))


def tradeoff(runs: Runs) -> Figure:
    """Score against device memory, and against the time per token.

    There is a row for each task and model (IceCache, Fig. 1), with all machines' arms over memory,
    and a further row for the times of each further machine. Where an arm of a row decoded together
    with others, the time is that of attention, search and transfers for all; where no arm of it has
    a time, memory with the index takes its place.
    """
    arms = arms_for(runs, "tradeoff", probed=False, columns=[TIME.name, OWN_TIME.name], scored=True)
    panels = ranking(runs, panels_of("tradeoff", runs, arms, lines="method"))
    scores = {run: runs[run].score() for panel in panels for run in panel.arms.index}
    bars = intervals(scores.values())
    rows = [row for panel in panels for row in _by_machine(panel)]
    refuse_crowd("tradeoff", len(rows), "tasks, models, protocols and machines", MOST_PANELS)
    seconds = [_second(timed.arms) for _, timed in rows]
    costs = ["time" if quantity.is_time else "memory with the index" for quantity in seconds]
    against = " and ".join(dict.fromkeys(["memory", *costs]))
    figure, axes = grid(
        len(rows), 2, f"score against {against}, with {bars}; up and left is better"
    )
    sizes = areas([budget for panel in panels for budget in panel.arms["budget"]])
    for whole_and_timed, second, row in zip(rows, seconds, axes, strict=True):
        for panel, axis, cost in zip(whole_and_timed, row, (DEVICE_KV, second), strict=True):
            if panel is None:
                axis.set_axis_off()
                continue
            lines = list(series_of(runs, panel))
            points = pd.concat([series.arms.assign(label=series.label()) for series in lines])
            points["low"], points["high"] = (
                [scores[run][end] for run in points.index] for end in (1, 2)
            )
            styles = {series.label(): series.style for series in lines}
            draw_cost(axis, points, styles, cost, sizes=sizes)
            axis.set(ylabel=QUANTITIES["score"].axis, title=panel.title)
    for budget, area in sizes.items():
        look = {"marker": "o", "facecolor": "none", "edgecolor": FRONT["color"]}
        axes[0, 0].scatter([], [], s=area, label=f"C = {size_text(budget)}", **look)
    notes = [METHOD_TIME] if any(axis.get_xlabel() == OWN_TIME.axis for axis in axes[:, 1]) else []
    return finished(figure, axes, panels, times=True, notes=notes)


def _by_machine(panel: Panel) -> Iterator[tuple[Panel | None, Panel]]:
    """What stands in each row of a panel: all its arms, once, and those timed on one machine."""
    groups = list(panel.arms.groupby(panel.arms["device_name"].map(str), sort=False))
    for index, (machine, arms) in enumerate(groups):
        title = f"{panel.title}, {machine}" if len(groups) > 1 else panel.title
        yield None if index else panel, panel._replace(title=title, arms=arms)


def _second(arms: pd.DataFrame) -> Quantity:
    """What the second axis of these arms shows."""
    if arms[TIME.name].notna().all():
        return TIME
    return OWN_TIME if arms[OWN_TIME.name].notna().any() else INDEXED


def draw_tradeoff(
    axes: Sequence[Any],
    points: pd.DataFrame,
    styles: dict[str, Style],
    second: Quantity,
    y: str = "score",
) -> None:
    """Mark arms on two axes: a quantity against KV bytes on the device, and against a second cost.

    See `draw_cost`.
    """
    for axis, cost in zip(axes, (DEVICE_KV, second), strict=True):
        draw_cost(axis, points, styles, cost, y)


def draw_cost(
    axis: Any,
    points: pd.DataFrame,
    styles: dict[str, Style],
    cost: Quantity,
    y: str = "score",
    sizes: dict[Any, float] | None = None,
) -> None:
    """Mark arms on an axis of matplotlib's: a quantity against its cost, a time or bytes.

    Parameters
    ----------
    points
        a line an arm with method, label, budget (None: no budget), the cost, and what is marked,
        with the low and high of its interval if it has them. Budgets of one label are joined by a
        line; an arm without the cost is left out.
    styles
        of each label.
    y
        "score" (0-100), or a quantity that is best at 0 and drawn on a log axis: an arm that has 0
        of it, as full attention has, is a line at its cost.
    sizes
        the area of the mark of each budget.
    """
    with_cost = points[points[cost.name].notna()]
    if not len(with_cost):
        axis.set_axis_off()
        axis.set_title("")
        return
    with_cost = with_cost.assign(
        x=with_cost[cost.name].astype(float) * cost.unit.scale, y=with_cost[y].astype(float)
    )
    for label, arms in with_cost.groupby("label", sort=False):
        if y != "score" and not arms["y"].any():
            look = {"color": styles[label].colour, "linestyle": "--", "linewidth": 1}
            axis.axvline(arms["x"].iloc[0], label=label, **look)
        else:
            _mark(axis, label, styles[label], arms, sizes or {})
    scale = "linear" if cost.is_time else "log"
    axis.set(xlabel=cost.axis, xscale=scale)
    axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.xaxis.set_minor_formatter(LogFormatter() if scale == "log" else NullFormatter())
    axis.margins(x=0.1, y=0.12)
    (fit_scores if y == "score" else log_y)(axis)
    axis.grid(alpha=0.3)
    drawn = with_cost[with_cost["y"] != 0] if y != "score" else with_cost
    draw_front(axis, drawn["x"], drawn["y"], y == "score")


def _mark(
    axis: Any, label: str, style: Style, arms: pd.DataFrame, sizes: Mapping[Any, float]
) -> None:
    """Arms of one label as marks at x and y that a line joins, each with its interval."""
    x, y = arms["x"], arms["y"]
    line = {"color": style.colour, "linestyle": style.line}
    axis.plot(x, y, linewidth=0.8, alpha=0.5, zorder=2, **line)
    if "low" in arms:
        ends = arms["low"].fillna(y), arms["high"].fillna(y)
        axis.vlines(x, *ends, style.colour, linewidth=0.8)
    # Arms that score alike at like cost lie on one another: outlines leave both to be seen.
    area = [sizes.get(budget, BARE) for budget in arms["budget"]]
    look = {"marker": style.marker, "facecolor": fill_of(style), "edgecolor": style.colour}
    axis.scatter(x, y, s=area, label=label, zorder=3, linewidth=1.1, **look)
