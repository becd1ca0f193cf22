"""The figure `budget`: what a score comes to with more of the budget, and with more of what was attended."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.report.data.run import Runs
from kvbench.report.data.stats import COVERAGE
from kvbench.report.figures.panels import (
    arms_for,
    draw_by_budget,
    finished,
    grid,
    mark_octaves,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.report.figures.pareto import draw_front
from kvbench.runs.quantities import QUANTITIES


def budget(runs: Runs) -> Figure:
    """Score against the budget, and against what was attended; a row for each task and model."""
    panels = panels_of("budget", runs, arms_for(runs, "budget", probed=False, scored=True))
    bars = f"{COVERAGE} % intervals"
    figure, axes = grid(len(panels), 2, f"score against budget, and against what was attended, with {bars}")
    for (title, arms), row in zip(panels, axes, strict=True):
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            for one in series_of(runs, arms):
                draw_by_budget(axis, one, one.arms[x], [runs[run].score() for run in one.arms.index])
            axis.set(ylim=(-5, 105), title=title)
        row[0].set(ylabel=QUANTITIES["score"].axis, xlabel="budget C: tokens, or below 1 a share of the prompt")
        row[1].set_xlabel(QUANTITIES["attended_mean"].axis)
        entries = arms.loc[arms["budget"].notna(), "attended_mean"].astype(float).dropna()
        if len(entries):
            mark_powers(row[0], arms["budget"].dropna().astype(float))
            mark_octaves(row[1], entries.min(), entries.max())
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            known = arms[arms["budget"].notna() & arms[x].notna()]
            draw_front(axis, known[x].astype(float), known["score"].astype(float), more_is_better=True)
    return finished(figure, axes, [arms for _, arms in panels])
