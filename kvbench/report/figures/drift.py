"""The figure `drift`: whether a method stays as near to full attention as it begins."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.report.data.run import Run, Runs
from kvbench.report.figures.panels import curves_of, fidelity_panels, finished, grid, line_look
from kvbench.runs.quantities import QUANTITIES

KL = QUANTITIES["kl_mean"]
SMOOTHED, POINTS = 8, 64  # neighbouring steps whose mean a curve shows, as single tokens differ by orders of magnitude


def drift(runs: Runs) -> Figure:
    """KL from full attention over decode steps: whether a method stays as near as it begins."""
    panels = fidelity_panels(runs, "drift")
    figure, axes = grid(len(panels), 1, f"{KL.title}, over decode steps", (8.0, 4.2))
    for (title, arms), (axis,) in zip(panels, axes, strict=True):
        curves = [(label, style, _over_steps(run)) for label, style, run in curves_of(runs, arms)]
        many = max(SMOOTHED, math.ceil(max(len(curve) for *_, curve in curves) / POINTS))
        for label, style, curve in curves:
            means = curve.groupby(curve.index // many).mean()
            axis.plot(means.index * many + (many + 1) / 2, means, label=label, **line_look(style))
        axis.set(title=title, yscale="log", xlabel=f"decode step (means of {many})", ylabel=KL.axis)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return finished(figure, axes, [arms for _, arms in panels])


def _over_steps(run: Run) -> pd.Series:
    """KL of each decode step, the mean over a run's samples."""
    steps = [sample["fidelity"]["steps"]["kl"] for sample in run.samples() if sample.get("fidelity")]
    return pd.DataFrame(steps).mean()
