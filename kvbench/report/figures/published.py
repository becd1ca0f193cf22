"""The figure `published`: published scores against ours, a mark for each cell that we have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.marks import MARKS
from kvbench.report.data.papers import PaperTable, ids, table
from kvbench.report.data.run import Runs
from kvbench.report.data.stats import COVERAGE
from kvbench.report.data.style import Style, style_of
from kvbench.report.figures.charts import FRONT, SMALL, fold_words, tiled, with_legend
from kvbench.report.figures.panels import MOST_PANELS, Panel, refuse_crowd, words_below
from kvbench.report.tables.cells import Cell
from kvbench.report.tables.published import merge_published

BETTER = "b"  # the one letter that says nothing of samples or protocol


# The style of a published cell's method, the cell with ours, and letters for how our run's samples
# or protocol differ from the paper's; "" where nothing is known.
_Point = tuple[Style, Cell, str]


def published(runs: Runs) -> Figure:
    """Ours against the published score, a panel for each table.

    An open mark is of other samples or another protocol.
    """
    panels = {
        paper: points
        for paper in map(table, ids())
        if not paper.timed and (points := _points(runs, paper))
    }
    if not panels:
        raise ConfigError(
            f"figure=published: none of these {len(runs.arms)} runs is of a published cell's model,"
            " method, budget and task; --paper ID says what would be"
        )
    refuse_crowd("published", len(panels), "tables", MOST_PANELS)
    title = (
        "ours against the published score; on the line they agree; what an open mark's letter is"
        " stands below"
    )
    figure, axes = tiled(len(panels), title, 3.6)
    for axis, (paper, points) in zip(axes.flat, panels.items(), strict=False):
        _draw(axis, points)
        axis.set_title(paper.title)
        axis.set(xlabel="published score", ylabel=f"ours, with its {COVERAGE} % interval")
    drawn = [point for points in panels.values() for point in points]
    paths = {cell.run for _, cell, _ in drawn}
    used = Panel("", runs.arms.loc[[run.index for run in runs if run.folders in paths]], {})
    letters = sorted({letter for *_, marks in drawn for letter in marks})
    notes = [f"{letter}: {MARKS[letter]}" for letter in letters]
    fold_words(figure, axes, named=False)
    return with_legend(figure, axes, [*notes, *words_below([used])])


def _points(runs: Runs, paper: PaperTable) -> list[_Point]:
    merged = merge_published(runs, paper)
    method = dict(zip(paper.frame["row"], paper.frame["method"], strict=True))
    return [
        (
            style_of(method[merged.rows[row][0]]),
            cell,
            cell.lines["score"].mark.replace(BETTER, ""),
        )
        for (row, _), cell in merged.cells.items()
        if {"published", "score"} <= cell.numbers.keys()
    ]


def _draw(axis: Any, points: Sequence[_Point]) -> None:
    axis.axline((0, 0), slope=1, label="as published", **FRONT)
    for style, cell, marks in points:
        numbers = cell.numbers
        x, y = numbers["published"], numbers["score"]
        low, high = numbers.get("score_low", y), numbers.get("score_high", y)
        fill = "none" if marks else style.colour
        look = {"marker": style.marker, "color": style.colour, "markerfacecolor": fill}
        bar = {"linestyle": "", "elinewidth": 0.8, "label": style.label}
        axis.errorbar(x, y, [[y - low], [high - y]], **look, **bar)
        if marks:
            at = {"textcoords": "offset points", "fontsize": SMALL, "color": style.colour}
            axis.annotate(marks, (x, y), (4, 4), **at)
    shown = ("published", "score", "score_low", "score_high")
    ends = [cell.numbers[name] for _, cell, _ in points for name in shown if name in cell.numbers]
    limits = (min(ends) - 3, max(ends) + 3)
    axis.set(xlim=limits, ylim=limits, aspect="equal")
    axis.grid(alpha=0.3)
