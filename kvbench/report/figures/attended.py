"""The figure `attended`: what a budget came to, by the audit of the entries that were read."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import Runs
from kvbench.report.figures.labels import End, height_for, name_ends
from kvbench.report.figures.panels import (
    arms_for,
    finished,
    line_look,
    mark_powers,
    panels_of,
    series_of,
    tiled,
)
from kvbench.report.figures.pareto import FRONT
from kvbench.runs.quantities import QUANTITIES

SHARE = QUANTITIES["attended_share"]
MEAN = f"{SHARE.title}, mean over KV heads, layers and steps"


def attended(runs: Runs) -> Figure:
    """What was attended over the budget, against the budget: 1 is what was asked for."""
    arms = arms_for(runs, "attended", probed=False, scored=True)
    arms = arms[arms[SHARE.name].notna()]
    if not len(arms):
        raise ConfigError(f"figure=attended: no run with a budget among {len(runs.arms)} runs")
    panels = panels_of("attended", runs, arms, lines="method")
    lines = [list(series_of(runs, panel)) for panel in panels]
    tall = height_for(max(map(len, lines)))
    figure, axes = tiled(len(panels), "measured over nominal budget", tall)
    for axis, panel, series in zip(axes.flat, panels, lines, strict=False):
        axis.axhline(1, color=FRONT["color"], linewidth=0.8, linestyle="--", zorder=1)
        axis.set(title=panel.title, xlabel="budget C (tokens)", ylabel=MEAN)
        ends = []
        for curve in series:
            x, y = curve.arms["budget_tokens"].astype(float), curve.arms[SHARE.name].astype(float)
            axis.plot(x, y, **line_look(curve.style))
            ends.append(End(curve.label(), curve.style, x.iloc[-1], y.iloc[-1]))
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        mark_powers(axis, panel.arms["budget_tokens"].astype(float))
        name_ends(axis, ends, tall)
    return finished(figure, axes, panels, named=True)
