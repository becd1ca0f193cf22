"""Curves of probes over decode steps, of the figures `recall` and `stability`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.figures.panels import arms_for, curves_of, finished, grid, line_look, panels_of
from kvbench.runs.quantities import QUANTITIES

POINTS = 100  # of a curve, at most


def probes_over_steps(runs: Runs, figure_name: str, probes: Sequence[str]) -> Figure:
    """Means of probes over decode steps.

    There is a column for each probe, a row for each task and model, a curve for each arm.
    """
    arms = arms_for(runs, figure_name, probed=True)
    drawn = []
    for panel in panels_of(figure_name, runs, arms[arms["method"] != YARDSTICK], lines="arm"):
        curves = [
            (label, style, means(run.samples())) for label, style, run in curves_of(runs, panel)
        ]
        if any(len(curve) for _, _, curve in curves):
            end = _last_of_half([curve for _, _, curve in curves])
            if any(curve.index.max() > end for _, _, curve in curves):
                note = f"to step {end:g}: fewer than half of the arms generate for longer"
                panel = panel._replace(notes=(*panel.notes, note))
            drawn.append(
                (panel, [(label, style, curve.loc[:end]) for label, style, curve in curves])
            )
    if not drawn:
        what = "of the runs with probes none is sparse and has values of each step"
        raise ConfigError(f"figure={figure_name}: {what}")
    measures = [QUANTITIES[name].axis for name in probes]
    title = f"{' and '.join(measures)}, over decode steps: means over samples"
    figure, axes = grid(len(drawn), len(probes), title)
    for (panel, curves), row in zip(drawn, axes, strict=True):
        for label, style, of_arm in curves:
            for axis, name in zip(row, probes, strict=True):
                if name in of_arm and of_arm[name].notna().any():
                    curve = thinned(of_arm[name].dropna())
                    look = line_look(style) | {"markevery": max(1, len(curve) // 8)}
                    axis.plot(curve.index, curve, label=label, **look)
        for axis, label in zip(row, measures, strict=True):
            axis.set(title=panel.title, xlabel="decode step", ylabel=label, ylim=(-0.03, 1.03))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
    return finished(figure, axes, [panel for panel, _ in drawn])


def _last_of_half(curves: Sequence[pd.DataFrame]) -> float:
    """The last step that half of these arms reach: one that loops makes no axis longer."""
    lasts = sorted(curve.index.max() for curve in curves if len(curve))
    return float(lasts[len(lasts) // 2])


def means(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The mean over samples of each measure by decode step, as far as half of the samples go."""
    steps = [(sample.get("probe") or {}).get("steps") for sample in samples]
    frames = [pd.DataFrame(sample_steps, dtype=float) for sample_steps in steps if sample_steps]
    if not frames:
        return pd.DataFrame()
    by_step = pd.concat(frames).groupby("step")
    return by_step.mean()[by_step.size() >= len(frames) / 2]


def thinned(curve: pd.Series) -> pd.Series:
    """The mean of neighbouring steps where there are more than a picture can show."""
    blocks = np.arange(len(curve)) * min(POINTS, len(curve)) // len(curve)
    return pd.Series(
        curve.groupby(blocks).mean().to_numpy(),
        curve.index.to_series().groupby(blocks).mean().to_numpy(),
    )
