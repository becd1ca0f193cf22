"""The figure `read`: how good a method is for the bytes that a step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.data.sizes import bytes_read
from kvbench.report.figures.labels import End, height_for, name_ends
from kvbench.report.figures.nearness import LEAST_KL, EstimateOf, at_least, intervals_of, measured
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
    bars = intervals_of(runs, drawn)
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
    """One measure of arms over the bytes they read, with names and the Pareto front."""
    more, ends = name == "score", []
    costs: list[float] = []
    values: list[float] = []
    for curve in series:
        estimates = {run: value for run in curve.arms.index if (value := estimate_of(runs[run]))}
        if not more:
            estimates = {run: at_least(kl) for run, kl in estimates.items() if kl.mean > 0}
        if not estimates:
            continue
        near, arms = list(estimates.values()), curve.arms.loc[list(estimates)]
        x, y = MIB.scale * arms["read"], [value.mean for value in near]
        with_index = x + MIB.scale * arms["index_bytes"].astype(float).fillna(0)
        draw_intervals(axis, curve, x, near)
        axis.hlines(y, x, with_index, color=curve.style.colour, linewidth=0.6, alpha=0.6)
        last = int(x.to_numpy().argmax())
        below = f" (below {LEAST_KL:g})" if not more and y[last] == LEAST_KL else ""
        ends.append(End(f"{curve.label()}{below}", curve.style, x.iloc[last], y[last]))
        costs += list(x)
        values += y
    (fit_scores if more else log_y)(axis)
    right = axis.get_xlim()[1]
    octaves = range(math.floor(math.log2(min(costs))), math.ceil(math.log2(right)))
    mark_powers(axis, [2.0**octave for octave in octaves])
    draw_front(axis, costs, values, more_is_better=more)
    name_ends(axis, ends, tall)
