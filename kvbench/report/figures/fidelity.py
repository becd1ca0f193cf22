"""Pictures of `task=fidelity`: KL divergence from full attention against what it costs, and over decode steps."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.config import ConfigError
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.evidence import Evidence
from kvbench.report.data.frame import YARDSTICK, Runs
from kvbench.report.data.stats import COVERAGE
from kvbench.report.figures.panels import (
    arms_for,
    curves_of,
    draw_intervals,
    finished,
    grid,
    line_look,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.report.figures.tradeoff import draw_front
from kvbench.runs.quantities import QUANTITIES

KL = QUANTITIES["kl_mean"]
KV = QUANTITIES["device_kv_bytes"]
COSTS = ("attended_mean", KV.name)
SMOOTHED, POINTS = 8, 64  # neighbouring steps whose mean a curve shows, as single tokens differ by orders of magnitude


def fidelity(runs: Runs) -> Figure:
    """Mean KL from full attention, with its interval, against the budget, what was attended and device memory."""
    panels = [(title, arms) for title, arms in _panels(runs, "fidelity") if arms["budget"].notna().any()]
    if not panels:
        raise ConfigError("figure=fidelity: no run with a budget among those of task=fidelity")
    evidence = Evidence(runs)
    title = f"{KL.title}, with {COVERAGE} % intervals: lower is nearer"
    figure, axes = grid(len(panels), 1 + len(COSTS), title, (4.6, 3.6))
    for (title, arms), row in zip(panels, axes, strict=True):
        for axis, x in zip(row, ("budget", *COSTS), strict=True):
            for one in series_of(runs, arms):
                scale = QUANTITIES[x].unit.scale if x in QUANTITIES else 1.0
                near = {run: kl for run in one.arms.index if (kl := evidence.kl(run))}
                draw_intervals(axis, one, one.arms.loc[list(near), x].astype(float) * scale, list(near.values()))
            axis.set(yscale="log", title=title)
            axis.set_xlabel(QUANTITIES[x].axis if x in QUANTITIES else "budget C: tokens, or below 1 a share")
            axis.grid(alpha=0.3)
        mark_powers(row[0], arms["budget"].dropna().astype(float))
        held = KV.unit.scale * arms[KV.name].astype(float)
        low, high = math.floor(math.log2(held.min())), math.ceil(math.log2(held.max()))
        mark_powers(row[-1], [2.0**octave for octave in range(low, high + 1)])
        row[0].set_ylabel(KL.axis)
        for axis, x in zip(row, ("budget", *COSTS), strict=True):
            known = arms.dropna(subset=[x, KL.name])
            costs = known[x].astype(float) * (QUANTITIES[x].unit.scale if x in QUANTITIES else 1.0)
            draw_front(axis, costs, known[KL.name].astype(float), more_is_better=False)
    return finished(figure, axes, [arms for _, arms in panels])


def drift(runs: Runs) -> Figure:
    """KL from full attention over decode steps: whether a method stays as near as it begins."""
    panels = _panels(runs, "drift")
    figure, axes = grid(len(panels), 1, f"{KL.title}, over decode steps", (8.0, 4.2))
    for (title, arms), (axis,) in zip(panels, axes, strict=True):
        curves = [(label, style, _over_steps(runs, arm)) for label, style, arm in curves_of(runs, arms)]
        many = max(SMOOTHED, math.ceil(max(len(curve) for *_, curve in curves) / POINTS))
        for label, style, curve in curves:
            means = curve.groupby(curve.index // many).mean()
            axis.plot(means.index * many + (many + 1) / 2, means, label=label, **line_look(style))
        axis.set(title=title, yscale="log", xlabel=f"decode step (means of {many})", ylabel=KL.axis)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    return finished(figure, axes, [arms for _, arms in panels])


def _over_steps(runs: Runs, arm: pd.Series) -> pd.Series:
    """KL of each decode step, the mean over an arm's samples."""
    steps = [sample["fidelity"]["steps"]["kl"] for sample in runs.samples(arm) if sample.get("fidelity")]
    return pd.DataFrame(steps).mean()


def _panels(runs: Runs, name: str) -> list[tuple[str, pd.DataFrame]]:
    """The arms of `task=fidelity` that are not full attention itself, those that can be compared together.

    Raises:
        ConfigError: there is none.
    """
    arms = arms_for(runs, name, probed=False, task="fidelity")
    coded = runs.settings.loc[arms.index, "kv"] != str(NATIVE)
    others = arms[(arms["method"] != YARDSTICK) | coded]
    if not len(others):
        raise ConfigError(f"figure={name}: of the runs of task=fidelity none is sparse")
    return panels_of(name, runs, others)
