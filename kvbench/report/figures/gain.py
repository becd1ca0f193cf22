"""The figure `gain`: what a method gains over as many random tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import CONTROL, YARDSTICK, Run, Runs
from kvbench.report.data.stats import FEWEST, Estimate, intervals
from kvbench.report.data.style import BLACK, GREY
from kvbench.report.figures.charts import Mark, fold_words, tiled, with_legend
from kvbench.report.figures.panels import (
    MOST_PANELS,
    Panel,
    arms_for,
    of_budget,
    panels_of,
    ranking,
    refuse_crowd,
    series_of,
    words_below,
)

ROW, MOST = 0.14, 40  # inches of a row, and rows that a panel has room for


def gain(runs: Runs) -> Figure:
    """Scores less those of random tokens on the same samples.

    There is a panel for each task, model, protocol and budget.
    """
    arms = arms_for(runs, "gain", probed=False, scored=True)
    panels = [
        (panel._replace(title=f"{panel.title}, {of_budget(size)}", arms=group), controls)
        for panel in ranking(runs, panels_of("gain", runs, arms[arms["method"] != YARDSTICK]))
        for size, group in panel.arms.groupby("budget")
        if (controls := _controls(runs, group.index))
    ]
    if not panels:
        raise ConfigError(
            f"figure=gain: no runs here of method={CONTROL}, with which others are compared"
        )
    enough = [entry for entry in panels if entry[0].arms["n"].min() >= FEWEST]
    few = len(panels) - len(enough)
    if not enough:
        raise ConfigError(f"figure=gain: {few} panels, all of fewer than {FEWEST} samples")
    panels, notes = enough, [f"not drawn: {few} panels of fewer than {FEWEST} samples"] * bool(few)
    refuse_crowd("gain", len(panels), "tasks, models, protocols and budgets", MOST_PANELS)
    rows = max(len(panel.arms) for panel, _ in panels)
    refuse_crowd("gain", rows, "arms of one budget", MOST)
    gains = [_gains(runs, panel, controls) for panel, controls in panels]
    bars_of = intervals(estimate for group in gains for _, estimate in group)
    title = f"score less that of random tokens, paired, with {bars_of}; grey: they include 0"
    figure, axes = tiled(len(panels), title, 0.6 + ROW * rows)
    for (panel, controls), group, axis in zip(panels, gains, axes.flat, strict=False):
        _draw(axis, group)
        shares = sorted({control.protected for control in controls.values()} - {0.0})
        words = " or ".join(f"{share:g}" for share in shares)
        over = f"points over {CONTROL}" + (f" with protect={words}" if words else "")
        axis.set(title=panel.title, xlabel=over)
    fold_words(figure, axes, named=True)
    return with_legend(figure, axes, [*notes, *words_below([panel for panel, _ in panels])])


def _controls(runs: Runs, arms: Iterable[int]) -> dict[int, Run]:
    """The control of each of these arms that has one, but for the controls themselves."""
    among = [runs[index] for index in arms]
    control_by_arm = {run.index: run.control(among) for run in among}
    return {
        index: control
        for index, control in control_by_arm.items()
        if control is not None and control.index != index
    }


def _gains(runs: Runs, panel: Panel, controls: Mapping[int, Run]) -> list[tuple[str, Estimate]]:
    """The label and the difference of all others, the least first."""
    gains = [
        (series.label(), gain)
        for series in series_of(runs, panel)
        for index in series.arms.index
        if index in controls and (gain := runs[index].against([controls[index]])) is not None
    ]
    return sorted(gains, key=lambda gain: gain[1].mean)


def _draw(axis: Any, gains: list[tuple[str, Estimate]]) -> None:
    """Arms by name, which says whose they are; grey where the interval includes 0."""
    for place, (_, estimate) in enumerate(gains):
        colour = BLACK if estimate.differs else GREY
        down, up = Mark(place, *estimate[:3]).bar
        axis.errorbar([estimate.mean], [place], xerr=[[down], [up]], color=colour, marker="o")
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_yticks(range(len(gains)), [label for label, _ in gains])
    axis.grid(alpha=0.3, axis="x")
