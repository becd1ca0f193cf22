"""From which context length a method is faster than full attention: a picture of timed runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogFormatter

from kvbench.config import ConfigError
from kvbench.report.data.crossing import TIME, Times, crossing
from kvbench.report.data.run import CELL, Run, Runs, missing
from kvbench.report.data.style import Style
from kvbench.report.figures.panels import (
    MOST_PANELS,
    NOT_COMPARED,
    Panel,
    arms_for,
    curves_of,
    finished,
    line_look,
    mark_powers,
    panels_of,
    refuse_crowd,
    thousands,
    tiled,
)

WITHOUT = "a line without a length in its name is faster, or slower, at all lengths"
# label, style, and milliseconds a token by prompt tokens
_Curve = tuple[str, Style, Run, dict[int, float]]


def breakeven(runs: Runs) -> Figure:
    """Time per token against context length, with marks where methods become faster than full."""
    arms = arms_for(runs, "breakeven", probed=False, columns=["floor_ms"], task="latency")
    panels = [
        (panel._replace(title=f"{panel.title}, {place}"), drawn)
        for panel in panels_of("breakeven", runs, arms, NOT_COMPARED | CELL, lines="arm")
        for place, drawn in _curves(runs, panel).items()
        if len(drawn) > 1 and any(run.is_full for _, _, run, _ in drawn)
    ]
    if not panels:
        raise ConfigError(
            "figure=breakeven: no method and method=full at several lengths among these runs;"
            " task.lengths sets them"
        )
    refuse_crowd("breakeven", len(panels), "models, protocols, batches and machines", MOST_PANELS)
    figure, axes = tiled(len(panels), "time per token against context length", 2.8)
    for axis, (panel, drawn) in zip(axes.flat, panels, strict=False):
        for label, style, run, times in drawn:
            full = _full_times(run, drawn)
            start = None if times is full else crossing(times, full)
            if start is None or start <= min(times):  # the lines cross at no length that was timed
                axis.plot(*zip(*times.items(), strict=True), label=label, **line_look(style))
            else:
                label = f"{label}: faster from {thousands(round(start))}"
                axis.plot(*zip(*times.items(), strict=True), label=label, **line_look(style))
                axis.plot(start, _at(full, start), "o", color=style.colour, markersize=8, zorder=4)
        axis.set(title=panel.title, xlabel="prompt tokens", ylabel=TIME.axis, yscale="log")
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(LogFormatter())
        mark_powers(axis, [tokens for *_, times in drawn for tokens in times])
    return finished(figure, axes, [panel for panel, _ in panels], times=True, notes=[WITHOUT])


def _full_times(run: Run, drawn: Sequence[_Curve]) -> dict[int, float]:
    """The times of full attention; of several the run with the most settings in common counts."""
    fulls = [(candidate, times) for _, _, candidate, times in drawn if candidate.is_full]

    def shared(full: Run) -> int:
        return sum(full.label(key) == run.label(key) for key in run.settings)

    return max(fulls, key=lambda candidate: shared(candidate[0]))[1]


def _curves(runs: Runs, panel: Panel) -> dict[str, list[_Curve]]:
    """The curves by batch and machine: of each arm that was timed at several lengths, in one run or
    in several; of a length that several have the median.
    """
    cells_of = {run: runs[run].cells() for run in panel.arms.index}
    several = len({cell.machine for cells in cells_of.values() for cell in cells}) > 1
    arms: dict[str, tuple[str, Style, Run]] = {}  # the first run that differs in cells alone
    measured: dict[str, dict[str, dict[int, list[float]]]] = {}
    for label, style, run in curves_of(runs, panel):
        settings = {key: value for key, value in run.settings.items() if key not in CELL}
        arm = f"{label} {settings}"
        arms.setdefault(arm, (label, style, run))
        for cell, line in cells_of[run.index].items():
            if missing(line[TIME.name]) or line["disturbed"] in (True,):
                continue
            place = f"batch {cell.batch}" + (f", on {cell.machine}" if several else "")
            by_tokens = measured.setdefault(place, {}).setdefault(arm, {})
            by_tokens.setdefault(cell.tokens, []).append(float(line[TIME.name]))
    return {
        place: [
            (*arms[arm], {tokens: median(times[tokens]) for tokens in sorted(times)})
            for arm, times in by_arm.items()
            if len(times) > 1
        ]
        for place, by_arm in measured.items()
    }


def _at(times: Times, tokens: float) -> float:
    """The time at a length, interpolated as `crossing` does."""
    lengths = sorted(times)
    logs = np.log([times[length] for length in lengths])
    return float(np.exp(np.interp(np.log(tokens), np.log(lengths), logs)))
