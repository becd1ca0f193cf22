"""The figure `budget`: what a score comes to with more of the budget, and with more of what was
attended.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.report.data.run import Runs
from kvbench.report.data.stats import intervals
from kvbench.report.figures.panels import (
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
    figure, axes = grid(
        len(panels), 2, f"score against budget, and against what was attended, with {bars}"
    )
    for panel, row in zip(panels, axes, strict=True):
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            for series in series_of(runs, panel):
                draw_by_budget(
                    axis, series, series.arms[x], [runs[run].score() for run in series.arms.index]
                )
            axis.set_title(panel.title)
            axis.grid(alpha=0.3)
            fit_scores(axis)
        row[0].set(
            ylabel=QUANTITIES["score"].axis,
            xlabel="budget C: tokens, or below 1 a share of the prompt",
        )
        row[1].set_xlabel(QUANTITIES["attended_mean"].axis)
        arms = panel.arms
        entries = arms.loc[arms["budget"].notna(), "attended_mean"].astype(float).dropna()
        if len(entries):
            mark_powers(row[0], arms["budget"].dropna().astype(float))
            mark_octaves(row[1], entries.min(), entries.max())
        for axis, x in zip(row, ("budget", "attended_mean"), strict=True):
            plotted = arms[arms["budget"].notna() & arms[x].notna()]
            draw_front(
                axis, plotted[x].astype(float), plotted["score"].astype(float), more_is_better=True
            )
    return finished(figure, axes, panels)
