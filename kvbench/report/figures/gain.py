"""The figure `gain`: what a score is worth, which is what a method gains over random tokens of the same number."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import YARDSTICK, Run, Runs
from kvbench.report.data.stats import COVERAGE, Estimate
from kvbench.report.data.style import Style
from kvbench.report.figures.panels import (
    MOST_PANELS,
    arms_for,
    finished,
    panels_of,
    refuse_crowd,
    series_of,
    size_text,
    tiled,
)

CONTROL = "random"
ROW = 0.22  # inches


class Gain(NamedTuple):
    """A method's difference to the control, under its label, in its style."""

    label: str
    style: Style
    found: Estimate


def gain(runs: Runs) -> Figure:
    """Scores less those of random tokens on the same samples; a panel for each task, model, protocol and budget."""
    arms = arms_for(runs, "gain", probed=False, scored=True)
    panels = [
        (f"{title}, C = {size_text(size)}", own, control)
        for title, alike in panels_of("gain", runs, arms[arms["method"] != YARDSTICK])
        for size, own in alike.groupby("budget")
        if (control := _control(runs, own)) is not None
    ]
    if not panels:
        raise ConfigError(f"figure=gain: no runs here of method={CONTROL}, with which others are compared")
    refuse_crowd("gain", len(panels), "tasks, models, protocols and budgets", MOST_PANELS)
    named = f"score less that of random tokens, paired, with {COVERAGE} % intervals"
    height = 1 + ROW * max(len(own) for _, own, _ in panels)
    figure, axes = tiled(len(panels), min(2, len(panels)), named, (6.5, height))
    for (title, own, control), axis in zip(panels, axes.flat, strict=False):
        _draw(axis, _gains(runs, own, control))
        protect = control.settings.get("method.protect") or 0
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=f"points over {CONTROL}" + (f" with protect={protect:g}" if protect else ""))
    return finished(figure, axes, [own for _, own, _ in panels], named=True)


def _control(runs: Runs, arms: pd.DataFrame) -> Run | None:
    """The run of random tokens; of several that which protects most of the prompt's ends."""
    found = [runs[index] for index in arms.index if arms.at[index, "method"] == CONTROL]
    return max(found, key=lambda run: run.settings.get("method.protect") or 0, default=None)


def _gains(runs: Runs, arms: pd.DataFrame, control: Run) -> list[Gain]:
    """Those of all others, the least first."""
    each = [(one, runs[index]) for one in series_of(runs, arms) for index in one.arms.index]
    found = [(one, run.against([control])) for one, run in each if run is not control]
    gains = [Gain(one.label(), one.style, estimate) for one, estimate in found if estimate is not None]
    return sorted(gains, key=lambda gain: gain.found.mean)


def _draw(axis: Any, gains: list[Gain]) -> None:
    for place, (_, style, found) in enumerate(gains):
        ends = [[max(0.0, found.mean - (found.low or 0.0))], [max(0.0, (found.high or 0.0) - found.mean)]]
        axis.errorbar([found.mean], [place], xerr=ends, color=style.colour, marker=style.marker, markersize=5)
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_yticks(range(len(gains)), [one.label for one in gains], fontsize=8)
    axis.grid(alpha=0.3, axis="x")
