"""The figure `gain`: what a score is worth, which is what a method gains over random tokens of the same number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.control import CONTROL, control_of, protected
from kvbench.report.data.run import YARDSTICK, Run, Runs
from kvbench.report.data.stats import Estimate, intervals
from kvbench.report.data.style import Style
from kvbench.report.figures.panels import (
    MOST_PANELS,
    Panel,
    arms_for,
    bars,
    finished,
    panels_of,
    ranking,
    refuse_crowd,
    series_of,
    size_text,
    tiled,
)

ROW, MOST = 0.14, 40  # inches of a row, and rows that a panel has room for


class Gain(NamedTuple):
    """A method's difference to the control, under its label, in its style."""

    label: str
    style: Style
    found: Estimate


def gain(runs: Runs) -> Figure:
    """Scores less those of random tokens on the same samples; a panel for each task, model, protocol and budget."""
    arms = arms_for(runs, "gain", probed=False, scored=True)
    panels = [
        (panel._replace(title=f"{panel.title}, C = {size_text(size)}", arms=own), controls)
        for panel in ranking(runs, panels_of("gain", runs, arms[arms["method"] != YARDSTICK]))
        for size, own in panel.arms.groupby("budget")
        if (controls := _controls(runs, own.index))
    ]
    if not panels:
        raise ConfigError(f"figure=gain: no runs here of method={CONTROL}, with which others are compared")
    refuse_crowd("gain", len(panels), "tasks, models, protocols and budgets", MOST_PANELS)
    rows = max(len(panel.arms) for panel, _ in panels)
    refuse_crowd("gain", rows, "arms of one budget", MOST)
    gains = [_gains(runs, panel, controls) for panel, controls in panels]
    bars_of = intervals(one.found for own in gains for one in own)
    figure, axes = tiled(len(panels), f"score less that of random tokens, paired, with {bars_of}", 0.6 + ROW * rows)
    for (panel, controls), own, axis in zip(panels, gains, axes.flat, strict=False):
        _draw(axis, own)
        shares = " or ".join(f"{share:g}" for share in sorted({protected(one) for one in controls.values()} - {0.0}))
        axis.set(title=panel.title, xlabel=f"points over {CONTROL}" + (f" with protect={shares}" if shares else ""))
    return finished(figure, axes, [panel for panel, _ in panels], named=True)


def _controls(runs: Runs, arms: Iterable[int]) -> dict[int, Run]:
    """The control of each of these arms that has one, but for the controls themselves."""
    among = [runs[index] for index in arms]
    found = {run.index: control_of(run, among) for run in among}
    return {index: control for index, control in found.items() if control is not None and control.index != index}


def _gains(runs: Runs, panel: Panel, controls: Mapping[int, Run]) -> list[Gain]:
    """Those of all others, the least first."""
    each = [(one, index) for one in series_of(runs, panel) for index in one.arms.index if index in controls]
    found = [(one, runs[index].against([controls[index]])) for one, index in each]
    gains = [Gain(one.label(), one.style, estimate) for one, estimate in found if estimate is not None]
    return sorted(gains, key=lambda gain: gain.found.mean)


def _draw(axis: Any, gains: list[Gain]) -> None:
    for place, (_, style, found) in enumerate(gains):
        axis.errorbar([found.mean], [place], xerr=bars([found]), color=style.colour, marker=style.marker)
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_yticks(range(len(gains)), [one.label for one in gains])
    axis.grid(alpha=0.3, axis="x")
