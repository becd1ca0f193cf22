"""The figure `latency`: the time to the second token, per token, and the parts of a step."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import CELL, Runs, TimedCell, framed, missing
from kvbench.report.figures.charts import (
    LOOK,
    SMALL,
    TO_AN_INCH,
    Picture,
    fold_words,
    with_legend,
)
from kvbench.report.figures.panels import (
    MOST_PANELS,
    NOT_COMPARED,
    Panel,
    Series,
    arms_for,
    panels_of,
    refuse_crowd,
    rows_of,
    series_of,
    undisturbed,
    words_below,
)
from kvbench.runs.quantities import JOINTLY, QUANTITIES, Quantity

# Parts of a decode step in the order they are stacked, each with a colour and a hatch for print
# without colour. The colours are Paul Tol's light scheme, in which no method is drawn. Parts that
# only a method has a name for (IceCache's query, insert) take those of SPARE_LOOKS.
PARTS = {
    "index_build": ("#77AADD", "xx"),
    "index_update": ("#99DDFF", "//"),
    "select": ("#44BB99", ""),
    "transfer": ("#EE8866", ".."),
    "attention": ("#EEDD88", ""),
    "model": ("#DDDDDD", "\\\\"),
    "other": ("#FFFFFF", ""),
}
SPARE_LOOKS = (("#BBCC33", ""), ("#FFAABB", "--"), ("#AAAA00", ""), ("#FFAABB", "||"))
HEADINGS = {"tt2t_s": "time to the second token", "tpot_ms_mean": "time per token"}
OUTLINED = {"edgecolor": "black", "linewidth": 0.6, "height": 0.7}  # of a bar
PAGE = 9.0  # inches of height that a page has room for; the legend stands below
HEAD, BAR = 0.62, 0.19  # inches of height of a panel without bars, and of a bar
LEAST = 0.1  # of a bar that can be read


def latency(runs: Runs) -> Figure:
    """Time to the second token, time per token, and its parts.

    (IceCache, Fig. 7; LycheeCluster, Fig. 5.) Runs that shared their prefill have no time to the
    second token, those that decoded together none of a token; where all did, it is left out. Timed
    runs have a panel for each length and batch, the floor of each step, and on a GPU how long it is
    busy; a line in a bar goes from the least to the largest of its repeats.
    """
    arms = arms_for(runs, "latency", probed=False, columns=["tpot_ms_mean", "own_ms"])
    every = _latency_panels(runs, arms)
    untimed = len(every)
    every = [panel for panel in every if _is_timed(panel.arms)]
    untimed -= len(every)
    if not every:
        raise ConfigError("figure=latency: no times but of runs beside other work")
    panels = [panel for panel in every if len(panel.arms) > 1] or every
    alone = len(every) - len(panels)
    notes = [f"not drawn: {alone} lengths and batches of one arm alone"] * bool(alone)
    notes += [f"not drawn: {untimed} panels of times beside other work"] * bool(untimed)
    bar = _bar([len(panel.arms) for panel in panels])
    size = min(7.0, 72 * 0.9 * bar)  # points
    heights = [HEAD + bar * len(panel.arms) for panel in panels]
    figure = Picture(
        figsize=(rcParams["figure.figsize"][0], 0.5 + sum(heights)), layout="constrained"
    )
    times = {
        name: words
        for name, words in HEADINGS.items()
        if any(panel.arms[name].notna().any() for panel in panels)
    }
    shape = (len(panels), len(times) + 1)
    axes = figure.subplots(*shape, squeeze=False, sharey="row", height_ratios=heights)
    figure.suptitle(", ".join([*times.values(), "parts of a step"]))
    looks = _looks(panels)
    for panel, row in zip(panels, axes, strict=True):
        bars = [(series, arm) for series in series_of(runs, panel) for arm in rows_of(series.arms)]
        names = [series.label(arm.budget) for series, arm in bars]
        row[0].set_yticks(range(len(bars)), names, fontsize=size)
        row[0].set_ylim(len(bars) - 0.4, -0.6)
        for axis, name in zip(row, times, strict=False):
            _time(axis, bars, QUANTITIES[name], min(SMALL, size))
        _stack(row[-1], pd.DataFrame([arm for _, arm in bars]), looks)
        _limits(row[-2:], [arm for _, arm in bars])
    fold_words(figure, axes, named=False)
    with_legend(figure, axes, [*notes, *words_below(panels, times=True)])
    for panel, row in zip(panels, axes, strict=True):
        _head(row[0], textwrap.fill(panel.title, int(TO_AN_INCH * figure.get_figwidth() * 0.8)))
    return figure


def _is_timed(arms: pd.DataFrame) -> bool:
    """Whether any of these arms has a time, or parts of one."""
    return bool(arms[[*HEADINGS]].notna().any(axis=None) or len(_parts(arms).columns))


def _head(axis: Any, words: str) -> None:
    """A title that stands over all columns, and of which only the first has to be wide enough."""
    axis.set_title("\n" * words.count("\n") + " ")
    at = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axis.annotate(words, (0, 1), (0, 4), fontsize=LOOK["axes.titlesize"], **at).set_in_layout(False)


def _time(axis: Any, bars: Sequence[tuple[Series, Any]], time: Quantity, size: float) -> None:
    """A bar of each arm's time with its number, or why it has none."""
    if all(missing(arm[time.name]) for _, arm in bars):
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        words = f"{HEADINGS[time.name]}:\n{_why_untimed(bars[0][1])}"
        look = {"va": "center", "ha": "center", "color": "#666666", "fontsize": size}
        axis.text(0.5, 0.5, words, transform=axis.transAxes, **look)
        return
    for place, (series, arm) in enumerate(bars):
        value = arm[time.name]
        if missing(value):
            why = f" {_why_untimed(arm)}"
            axis.annotate(why, (0, place), va="center", fontsize=size, color="#666666")
            continue
        low, high = arm["spread"].get(time.name, (value, value))
        axis.barh(place, value, color=series.style.colour, **OUTLINED)
        if high > low:
            axis.hlines(place, low, high, colors="black", linewidth=1.2)
        axis.annotate(f" {float(f'{value:.3g}'):g}", (high, place), va="center", fontsize=size)
    axis.set_xlabel(time.axis)
    axis.margins(x=0.22)
    axis.locator_params(axis="x", nbins=5)
    axis.grid(axis="x", alpha=0.3)


def _why_untimed(arm: Any) -> str:
    if arm["decode"] == JOINTLY:
        return "decoded together"
    return "timed beside other work" if arm["disturbed"] in (True,) else "not measured"


def _bar(counts: Sequence[int]) -> float:
    """The height of a bar, in inches, with which panels of so many bars fit a page.

    Raises
    ------
    ConfigError
        they do not.
    """
    room = PAGE - 0.5 - HEAD * len(counts)
    refuse_crowd("latency", sum(counts), "bars", int(room / LEAST))
    return min(BAR, room / sum(counts))


def _latency_panels(runs: Runs, arms: pd.DataFrame) -> list[Panel]:
    """As `panels_of`; of timed runs each length and batch has a panel of its own.

    Where two runs of an arm have timed one, that with more repeats counts, then the newer.
    """
    timed = arms["floor_ms"].notna()
    panels = panels_of("latency", runs, arms[~timed], times=True) if not timed.all() else []
    by_length = panels_of("latency", runs, arms[timed], NOT_COMPARED | CELL) if timed.any() else []
    for panel in by_length:
        lines: dict[TimedCell, dict[int, dict[str, Any]]] = {}
        # what two runs share that time one arm, maybe at other lengths and batches
        of_arm = {
            run: {
                key: str(value) for key, value in runs[run].but_for_seed.items() if key not in CELL
            }
            for run in panel.arms.index
        }
        for run in panel.arms.index:
            for cell, line in runs[run].cells.items():
                of_cell = lines.setdefault(cell, {})
                same = [other for other in of_cell if of_arm[other] == of_arm[run]]
                if all(_weight(of_cell[other]) < _weight(line) for other in same):
                    lines[cell] = {k: v for k, v in of_cell.items() if k not in same} | {run: line}
        keys = runs.settings.at[panel.arms.index[0], "task.keys"]
        several = len({cell.machine for cell in lines}) > 1
        for cell, of_cell in sorted(lines.items()):
            frame = undisturbed(framed(list(of_cell.values())).set_axis(list(of_cell)))
            where = f", on {cell.machine}" if several else ""
            alike = panel.title.rpartition(", ")[0]  # without how many lengths a run has
            what = f"{alike}: {cell.tokens:,} tokens, batch {cell.batch}, keys of {keys}{where}"
            panels.append(panel._replace(title=what, arms=frame[frame["tpot_ms_mean"].notna()]))
    what = "tasks, models, protocols, machines, lengths and batches"
    refuse_crowd("latency", len(panels), what, MOST_PANELS)
    return [panel for panel in panels if len(panel.arms)]


def _weight(line: Mapping[str, Any]) -> tuple[int, str]:
    """Which of two timed lines of one cell counts: the larger."""
    return line["n"], str(line["updated"])


def _limits(axes: Iterable[Any], arms: Sequence[Any]) -> None:
    """Beside the bar of each arm the floor of a step, and how long of it the device is busy."""
    times = pd.DataFrame(arms)[["floor_ms", "busy_ms"]].astype(float).reset_index(drop=True)
    marks = {"floor": (times["floor_ms"], "-"), "device busy": (times["busy_ms"], ":")}
    for axis, (label, (values, line)) in itertools.product(axes, marks.items()):
        values = values.dropna()
        if len(values):
            ends = (values.index - 0.42, values.index + 0.42)
            look = {"colors": "#CC0000", "linestyles": line, "linewidth": 1.4, "zorder": 3}
            axis.vlines(values, *ends, label=label, **look)


def _looks(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """The colour and hatch of every part of a step, the same in all panels."""
    keys = sorted({key for panel in panels for key in _parts(panel.arms)} - PARTS.keys())
    return {**dict(zip(keys, itertools.cycle(SPARE_LOOKS))), **PARTS}


def _parts(arms: pd.DataFrame) -> pd.DataFrame:
    """The times of the parts in which any of these arms spent some."""
    times = arms.filter(like="breakdown_ms.").rename(
        columns=lambda key: key.removeprefix("breakdown_ms.")
    )
    times = times.fillna(0.0)
    return times.loc[:, (times > 0).any()]


def _stack(axis: Any, arms: pd.DataFrame, looks: Mapping[str, tuple[str, str]]) -> None:
    """The parts of a decode step of each arm, one on another."""
    times = _parts(arms)
    starts = np.zeros(len(arms))
    for part, (colour, hatch) in looks.items():
        if part not in times:
            continue
        widths = times[part].to_numpy(float)
        look = {"color": colour, "hatch": hatch, "label": part.replace("_", " "), **OUTLINED}
        axis.barh(range(len(arms)), widths, left=starts, **look)
        starts += widths
    axis.set_xlabel("parts of a step (ms)")
    axis.grid(axis="x", alpha=0.3)
