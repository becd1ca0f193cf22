"""The figure `question`: what a method loses when the question comes after compression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pandas as pd
from matplotlib.figure import Figure

from kvbench.backends.protocol import Question
from kvbench.config import ConfigError
from kvbench.report.data.run import Runs
from kvbench.report.data.shared import on_shared_samples
from kvbench.report.data.stats import intervals
from kvbench.report.figures.panels import (
    MOST_PANELS,
    NOT_COMPARED,
    Panel,
    arms_for,
    draw_intervals,
    finished,
    fit_scores,
    panels_of,
    ranking,
    refuse_crowd,
    series_of,
    size_text,
    tiled,
)
from kvbench.runs.quantities import QUANTITIES

KEY = "protocol.question"
OFFSET = 0.015  # so that no bar hides another
PLACES = {word: place for place, word in enumerate(get_args(Question))}
WORDS = {"with": "with the context", "after": "after it", "decode": "after it, by tokens"}


def question(runs: Runs) -> Figure:
    """Score by when the question is read; a panel for each task, model and budget.

    Full attention is in all of them.
    """
    paired = _paired(runs, arms_for(runs, "question", probed=False, scored=True))
    runs = on_shared_samples(runs.only(map(runs.__getitem__, paired.index)), ignoring={KEY})
    arms = arms_for(runs, "question", probed=False, scored=True) if len(paired) else paired
    arms = arms.assign(**{KEY: runs.settings.loc[arms.index, KEY].map(str)})
    panels = [
        budget_panel
        for panel in panels_of("question", runs, arms, free={*NOT_COMPARED, KEY}, lines="method")
        for budget_panel in _by_budget(panel)
    ]
    if not panels:
        raise ConfigError(
            f"figure=question: no runs here differ in {KEY} alone; -m {KEY}=with,after makes such"
        )
    refuse_crowd("question", len(panels), "tasks, models, protocols and budgets", MOST_PANELS)
    panels = ranking(runs, panels)
    bars = intervals(runs[run].score() for panel in panels for run in panel.arms.index)
    figure, axes = tiled(len(panels), f"score by when the question is read, with {bars}", 2.6)
    for panel, axis in zip(panels, axes.flat, strict=False):
        # of no score
        for aside, series in enumerate(series_of(runs, panel, without="shared_prefill")):
            places = series.arms[KEY].map(PLACES) + OFFSET * aside
            draw_intervals(axis, series, places, [runs[run].score() for run in series.arms.index])
        words = [word for word in PLACES if word in set(panel.arms[KEY])]
        axis.set_xticks([PLACES[word] for word in words], [WORDS[word] for word in words])
        axis.set(title=panel.title, xlabel="the question is read", ylabel=QUANTITIES["score"].axis)
        axis.grid(alpha=0.3)
        fit_scores(axis)
    return finished(figure, axes, panels)


def _paired(runs: Runs, arms: pd.DataFrame) -> pd.DataFrame:
    """The arms that ran under several protocols of the question, and differ in nothing else."""
    apart = [key for key in runs.differing if key not in (KEY, "seed", "shared_prefill", "decode")]
    settings = pd.Series(list(map(tuple, runs.differing.loc[arms.index, apart].values)), arms.index)
    questions = runs.settings.loc[arms.index, KEY].map(str)
    return arms[questions.groupby(settings).transform("nunique") > 1]


def _by_budget(panel: Panel) -> Iterator[Panel]:
    """A panel of the arms of each budget, with those that have none."""
    none = panel.arms[panel.arms["budget"].isna()]
    for size, group in panel.arms.groupby("budget"):
        yield panel._replace(
            title=f"{panel.title}, C\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{size_text(size)}",
            arms=pd.concat([none, group]),
        )
