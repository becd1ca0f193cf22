"""The figure `drift`: whether a method stays as near to full attention as it begins."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.report.data.run import Run, Runs
from kvbench.report.figures.panels import (
    curves_of,
    fidelity_panels,
    finished,
    line_look,
    log_y,
    tiled,
)
from kvbench.runs.quantities import QUANTITIES

KL = QUANTITIES["kl_mean"]
# neighbouring steps whose mean a curve shows, as single tokens differ by orders of magnitude
SMOOTHED, POINTS = 8, 64


def drift(runs: Runs) -> Figure:
    """KL from full attention over decode steps: whether a method stays as near as it begins."""
    panels = fidelity_panels(runs, "drift", "arm")
    figure, axes = tiled(len(panels), f"{KL.title}, over decode steps: means over texts", 2.6)
    for panel, axis in zip(panels, axes.flat, strict=False):
        curves = [(label, style, _over_steps(run)) for label, style, run in curves_of(runs, panel)]
        many = max(SMOOTHED, math.ceil(max(len(curve) for *_, curve in curves) / POINTS))
        for label, style, curve in curves:
            means = curve.groupby(curve.index // many).mean()
            look = line_look(style) | {"markevery": max(1, len(means) // 8)}
            axis.plot(means.index * many + (many + 1) / 2, means, label=label, **look)
        log_y(axis)
        axis.set(title=panel.title, xlabel=f"decode step (means of {many})", ylabel=KL.axis)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return finished(figure, axes, panels)


def _over_steps(run: Run) -> pd.Series:
    """KL of each decode step, the mean over a run's samples."""
    steps = [
        sample["fidelity"]["steps"]["kl"] for sample in run.samples() if sample.get("fidelity")
    ]
    return pd.DataFrame(steps).mean()
