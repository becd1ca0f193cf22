"""The figure `read`: how good a method is for the bytes that a step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.data.sizes import bytes_read
from kvbench.report.data.stats import COVERAGE
from kvbench.report.figures.labels import WIDE, End, height_for, name_ends
from kvbench.report.figures.nearness import KL, LEAST_KL, MEASURES, Found, at_least
from kvbench.report.figures.panels import (
    Series,
    arms_for,
    draw_intervals,
    finished,
    grid,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.report.figures.pareto import draw_front
from kvbench.runs.quantities import MIB, QUANTITIES

READ = f"KV read per step ({MIB.name})"
WHAT = (
    "KV read: attended in all layers, and scanned to choose; thin lines: with all of the method's index; dashed: front"
)


def read(runs: Runs) -> Figure:
    """Score, and KL from full attention, against the bytes of KV that a decode step reads; a row for each panel."""
    arms = arms_for(runs, "read", probed=False, scored=True)
    arms = arms.assign(read=[bytes_read(runs[run]) for run in arms.index])
    arms = arms[arms["read"].notna()]
    if (arms["method"] == YARDSTICK).all():
        raise ConfigError("figure=read: no run of a sparse method whose audit has attended_bytes_per_step")
    panels = panels_of("read", runs, arms)
    lines = [list(series_of(runs, own)) for _, own in panels]
    both = arms[KL.name].notna().any()
    measures = MEASURES if both else MEASURES[:1]
    title = (
        f"nearness over bytes read, with {COVERAGE} % intervals; left and {'up or down' if both else 'up'} is better"
    )
    tall = height_for(max(map(len, lines)))
    figure, axes = grid(len(panels), len(measures), f"{title}\n{WHAT}", (WIDE, tall + 0.9))
    for (title, _), row, series in zip(panels, axes, lines, strict=True):
        for axis, (name, found) in zip(row, measures, strict=False):
            axis.set(title=title, xlabel=READ, ylabel=QUANTITIES[name].axis)
            _draw(axis, runs, series, name, found, tall)
    return finished(figure, axes, [own for _, own in panels], named=True)


def _draw(axis: Any, runs: Runs, series: Sequence[Series], name: str, found: Found, tall: float) -> None:
    """One measure of arms over the bytes they read, with names beside the lines and the Pareto front."""
    ends, costs, values = [], [], []
    for one in series:
        values_of = ((run, found(runs[run])) for run in one.arms.index)
        known = {run: value for run, value in values_of if value and (name == "score" or value.mean > 0)}
        if not known:
            continue
        near = [value if name == "score" else at_least(value) for value in known.values()]
        own = one.arms.loc[list(known)]
        x, index = MIB.scale * own["read"], MIB.scale * own["index_bytes"].astype(float).fillna(0)
        draw_intervals(axis, one, x, near)
        axis.hlines([value.mean for value in near], x, x + index, color=one.style.colour, linewidth=0.6, alpha=0.6)
        last = int(x.to_numpy().argmax())
        below = f" (below {LEAST_KL:g})" if name != "score" and near[last].mean == LEAST_KL else ""
        ends.append(End(f"{one.label()}{below}", one.style, x.iloc[last], near[last].mean))
        costs += list(x)
        values += [value.mean for value in near]
    if not costs:
        axis.set_title("")
        axis.set_axis_off()  # a task without this measure
        return
    axis.set(**({"ylim": (-5, 105)} if name == "score" else {"yscale": "log"}))
    right = axis.get_xlim()[1]
    mark_powers(axis, [2.0**octave for octave in range(math.floor(math.log2(min(costs))), math.ceil(math.log2(right)))])
    draw_front(axis, costs, values, more_is_better=name == "score")
    name_ends(axis, ends, tall)
