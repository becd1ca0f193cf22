"""The figure `written`: how much a model writes.

Answers that go on, or end in a loop, cost what a budget saves.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import Run, Runs
from kvbench.report.data.stats import INTERVALS, estimate, mean_score
from kvbench.report.figures.panels import (
    BUDGET,
    arms_for,
    draw_by_budget,
    finished,
    fit_scores,
    grid,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.runs.quantities import QUANTITIES
from kvbench.runs.summary import written as output_of

LENGTH, LOOPED = QUANTITIES["new_tokens"], QUANTITIES["looped"]


def written(runs: Runs) -> Figure:
    """New tokens of an answer, and the share of answers that end in a loop, against the budget."""
    arms = arms_for(runs, "written", probed=False, scored=True)
    arms = arms[arms[LENGTH.name].notna()]
    if not len(arms):
        what = f"no run stored its outputs or how long they are among {len(runs.arms)} runs"
        raise ConfigError(f"figure=written: {what}")
    panels = panels_of("written", runs, arms, lines="method")
    title = f"what the model writes, with {INTERVALS}; level lines: without a budget"
    figure, axes = grid(len(panels), 2, title)
    for panel, row in zip(panels, axes, strict=True):
        for series in series_of(runs, panel):
            outputs = [_outputs(runs[run]) for run in series.arms.index]
            lengths = [estimate([frame["length"].to_numpy(float)]) for frame in outputs]
            looped = [mean_score([100 * frame["looped"].to_numpy(float)]) for frame in outputs]
            for axis, values in zip(row, (lengths, looped), strict=True):
                draw_by_budget(axis, series, series.arms["budget"], values)
        budgets = panel.arms["budget"].dropna().astype(float)
        for axis, measure in zip(row, (LENGTH, LOOPED), strict=True):
            axis.set(title=panel.title, ylabel=measure.axis, xlabel=BUDGET)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if len(budgets):
                mark_powers(axis, budgets)
        fit_scores(row[1])
    return finished(figure, axes, panels)


def _outputs(run: Run) -> pd.DataFrame:
    """A line for each output of a run: its length in tokens, and whether it ended in a loop."""
    answered = [record for record in run.samples() if not record.get("error")]
    return pd.DataFrame(list(filter(None, map(output_of, answered))))
