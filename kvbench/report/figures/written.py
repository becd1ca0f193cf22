"""How much a model writes under each method: answers that go on, or end in a loop, cost what a budget saves."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.frame import Runs
from kvbench.report.data.stats import COVERAGE, estimate, proportion
from kvbench.report.figures.panels import (
    arms_for,
    draw_intervals,
    draw_level,
    finished,
    grid,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.runs.quantities import QUANTITIES
from kvbench.runs.summary import written as told_of

LENGTH, LOOPED = QUANTITIES["new_tokens"], QUANTITIES["looped"]


def written(runs: Runs) -> Figure:
    """New tokens of an answer, and the share of answers that end in a loop, against the budget."""
    arms = arms_for(runs, "written", probed=False, scored=True)
    arms = arms[arms[LENGTH.name].notna()]
    if not len(arms):
        raise ConfigError(f"figure=written: no run stored its outputs or how long they are among {len(runs.arms)} runs")
    panels = panels_of("written", runs, arms)
    title = f"what the model writes, with {COVERAGE} % intervals; level lines: without a budget"
    figure, axes = grid(len(panels), 2, title)
    for (title, own), row in zip(panels, axes, strict=True):
        for one in series_of(runs, own):
            outputs = [_outputs(runs, run) for run in one.arms.index]
            lengths = [estimate([found["length"].to_numpy(float)]) for found in outputs]
            looped = [proportion([100 * found["looped"].to_numpy(float)]) for found in outputs]
            for axis, values in zip(row, (lengths, looped), strict=True):
                if one.arms["budget"].isna().all():
                    draw_level(axis, one, values)
                else:
                    draw_intervals(axis, one, one.arms["budget"].astype(float), values)
        for axis, measure in zip(row, (LENGTH, LOOPED), strict=True):
            axis.set(title=title, ylabel=measure.axis, xlabel="budget C: tokens, or below 1 a share of the prompt")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if own["budget"].notna().any():
                mark_powers(axis, own["budget"].dropna().astype(float))
        row[1].set_ylim(-5, 105)
    return finished(figure, axes, [own for _, own in panels])


def _outputs(runs: Runs, run: int) -> pd.DataFrame:
    """A line for each output of a run: its length in tokens, and whether it ended in a loop."""
    records = runs.samples(runs.arms.loc[run])
    return pd.DataFrame([told for record in records if not record.get("error") and (told := told_of(record))])
