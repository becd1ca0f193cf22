"""The figure `budget`: scores against the budget, and against what was attended."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.report.data.run import Runs
from kvbench.report.data.stats import intervals
from kvbench.report.figures.panels import (
    BUDGET,
    arms_for,
    draw_by_budget,
    finished,
    fit_scores,
    grid,
    mark_octaves,
    mark_powers,
    panels_of,
    ranking,
    series_of,
)
from kvbench.report.figures.pareto import draw_front
from kvbench.runs.quantities import QUANTITIES


def budget(runs: Runs) -> Figure:
    """Score against the budget, and against what was attended; a row for each task and model."""
    arms = arms_for(runs, "budget", probed=False, scored=True)
    panels = ranking(runs, panels_of("budget", runs, arms, lines="method"))
    bars = intervals(runs[run].score() for panel in panels for run in panel.arms.index)
    title = f"score against budget, and against what was attended, with {bars}"
    figure, axes = grid(len(panels), 2, title)
    for panel, row in zip(panels, axes, strict=True):
        arms = panel.arms
        with_budget = arms[arms["budget"].notna()]
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            for series in series_of(runs, panel):
                scores = [runs[run].score() for run in series.arms.index]
                draw_by_budget(axis, series, series.arms[x], scores)
            axis.set_title(panel.title)
            axis.grid(alpha=0.3)
            fit_scores(axis)
        row[0].set(ylabel=QUANTITIES["score"].axis, xlabel=BUDGET)
        row[1].set_xlabel(QUANTITIES["attended_mean"].axis)
        entries = with_budget["attended_mean"].astype(float).dropna()
        if len(entries):
            mark_powers(row[0], with_budget["budget"].astype(float))
            mark_octaves(row[1], entries.min(), entries.max())
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            plotted = with_budget[with_budget[x].notna()]
            costs, scores = plotted[x].astype(float), plotted["score"].astype(float)
            draw_front(axis, costs, scores, more_is_better=True)
    return finished(figure, axes, panels)
