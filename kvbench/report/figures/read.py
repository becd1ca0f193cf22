"""The figure `read`: how good a method is for the bytes that a step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.data.sizes import bytes_read
from kvbench.report.data.stats import intervals
from kvbench.report.figures.labels import End, height_for, name_ends
from kvbench.report.figures.nearness import LEAST_KL, EstimateOf, at_least, measured
from kvbench.report.figures.panels import (
    Series,
    arms_for,
    draw_intervals,
    finished,
    fit_scores,
    log_y,
    mark_powers,
    panels_of,
    series_of,
    tiled,
)
from kvbench.report.figures.pareto import draw_front
from kvbench.runs.quantities import MIB, QUANTITIES

READ = f"KV read per step ({MIB.name})"
WHAT = (
    "KV read: attended in all layers, and scanned to choose; thin lines: with all of the index;"
    " dashed: the front"
)


def read(runs: Runs) -> Figure:
    """Score, and KL from full attention, against the bytes of KV that a decode step reads."""
    arms = arms_for(runs, "read", probed=False, scored=True)
    arms = arms.assign(read=[bytes_read(runs[run]) for run in arms.index])
    arms = arms[arms["read"].notna()]
    if (arms["method"] == YARDSTICK).all():
        raise ConfigError(
            "figure=read: no run of a sparse method whose audit has attended_bytes_per_step"
        )
    drawn = measured(runs, panels_of("read", runs, arms, lines="method"))
    bars = intervals(
        value
        for panel, _, estimate_of in drawn
        for run in panel.arms.index
        if (value := estimate_of(runs[run]))
    )
    lines = [list(series_of(runs, panel)) for panel, *_ in drawn]
    tall = height_for(max(map(len, lines)))
    better = " or ".join(dict.fromkeys("up" if name == "score" else "down" for _, name, _ in drawn))
    title = f"nearness over bytes read, with {bars}; left and {better} is better"
    figure, axes = tiled(len(drawn), title, tall + 0.6)
    for (panel, name, estimate_of), axis, series in zip(drawn, axes.flat, lines, strict=False):
        axis.set(title=panel.title, xlabel=READ, ylabel=QUANTITIES[name].axis)
        _draw(axis, runs, series, name, estimate_of, tall)
    return finished(figure, axes, [panel for panel, *_ in drawn], named=True, notes=[WHAT])


def _draw(
    axis: Any, runs: Runs, series: Sequence[Series], name: str, estimate_of: EstimateOf, tall: float
) -> None:
    """One measure of arms over the bytes they read, with names beside the lines and the Pareto
    front.
    """
    ends, costs, values = [], [], []
    for curve in series:
        values_of = ((run, estimate_of(runs[run])) for run in curve.arms.index)
        estimates = {
            run: value for run, value in values_of if value and (name == "score" or value.mean > 0)
        }
        if not estimates:
            continue
        near = [value if name == "score" else at_least(value) for value in estimates.values()]
        curve_arms = curve.arms.loc[list(estimates)]
        x, index = (
            MIB.scale * curve_arms["read"],
            MIB.scale * curve_arms["index_bytes"].astype(float).fillna(0),
        )
        draw_intervals(axis, curve, x, near)
        axis.hlines(
            [value.mean for value in near],
            x,
            x + index,
            color=curve.style.colour,
            linewidth=0.6,
            alpha=0.6,
        )
        last = int(x.to_numpy().argmax())
        below = f" (below {LEAST_KL:g})" if name != "score" and near[last].mean == LEAST_KL else ""
        ends.append(End(f"{curve.label()}{below}", curve.style, x.iloc[last], near[last].mean))
        costs += list(x)
        values += [value.mean for value in near]
    if name == "score":
        fit_scores(axis)
    else:
        log_y(axis)
    right = axis.get_xlim()[1]
    mark_powers(
        axis,
        [
            2.0**octave
            for octave in range(math.floor(math.log2(min(costs))), math.ceil(math.log2(right)))
        ],
    )
    draw_front(axis, costs, values, more_is_better=name == "score")
    name_ends(axis, ends, tall)
