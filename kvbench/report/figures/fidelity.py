"""The figure `fidelity`: KL divergence from full attention against what it costs."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import Runs
from kvbench.report.data.stats import intervals
from kvbench.report.figures.panels import (
    draw_intervals,
    fidelity_panels,
    finished,
    grid,
    log_y,
    mark_octaves,
    mark_powers,
    series_of,
)
from kvbench.report.figures.pareto import draw_front
from kvbench.runs.quantities import QUANTITIES

KL = QUANTITIES["kl_mean"]
KV = QUANTITIES["device_kv_bytes"]
COSTS = ("attended_mean", KV.name)
BUDGET = "budget C: tokens, or below 1 a share"


def fidelity(runs: Runs) -> Figure:
    """Mean KL from full attention against the budget, what was attended and device memory."""
    panels = [
        panel
        for panel in fidelity_panels(runs, "fidelity", "method")
        if panel.arms["budget"].notna().any()
    ]
    if not panels:
        raise ConfigError("figure=fidelity: no run with a budget among those of task=fidelity")
    bars = intervals(kl for panel in panels for run in panel.arms.index if (kl := runs[run].kl()))
    figure, axes = grid(len(panels), 1 + len(COSTS), f"{KL.title}, with {bars}: lower is nearer")
    for panel, row in zip(panels, axes, strict=True):
        for axis, x in zip(row, ("budget", *COSTS), strict=True):
            for series in series_of(runs, panel):
                near = {run: kl for run in series.arms.index if (kl := runs[run].kl())}
                costs = _costs(series.arms.loc[list(near)], x)
                draw_intervals(axis, series, costs, list(near.values()))
            axis.set_title(panel.title)
            log_y(axis)
            axis.set_xlabel(QUANTITIES[x].axis if x in COSTS else BUDGET)
            axis.grid(alpha=0.3)
        mark_powers(row[0], _costs(panel.arms, "budget").dropna())
        kv_bytes = _costs(panel.arms, KV.name)
        mark_octaves(row[-1], kv_bytes.min(), kv_bytes.max())
        row[0].set_ylabel(KL.axis)
        for axis, x in zip(row, ("budget", *COSTS), strict=True):
            plotted = panel.arms.dropna(subset=[x, KL.name])
            values = plotted[KL.name].astype(float)
            draw_front(axis, _costs(plotted, x), values, more_is_better=False)
    return finished(figure, axes, panels)


def _costs(arms: pd.DataFrame, name: str) -> pd.Series:
    """A column of arms, in the unit of its axis."""
    return arms[name].astype(float) * (QUANTITIES[name].unit.scale if name in COSTS else 1.0)
