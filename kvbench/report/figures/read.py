"""The figure `read`: how good a method is for the bytes that a step reads."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.data.sizes import bytes_read
from kvbench.report.figures.labels import height_for
from kvbench.report.figures.nearness import draw_curves, finish_curves, intervals_of, measured
from kvbench.report.figures.panels import (
    arms_for,
    finished,
    panels_of,
    series_of,
    tiled,
)
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
        curves = draw_curves(axis, runs, series, panel.arms["read"] * MIB.scale, name, estimate_of)
        for line, x, y in curves:
            index = panel.arms.loc[x.index, "index_bytes"].astype(float).fillna(0) * MIB.scale
            axis.hlines(y, x, x + index, color=line.style.colour, linewidth=0.6, alpha=0.6)
        finish_curves(axis, curves, curves, name, tall)
    return finished(figure, axes, [panel for panel, *_ in drawn], named=True, notes=[WHAT])
