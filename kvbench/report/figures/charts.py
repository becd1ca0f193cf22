"""A chart, which is a pair of axes with its curves, and how charts become a picture.

Who makes charts says what they show: `curves.py` of runs, `search.py` and `capacity.py` of a
script's JSON. A figure is drawn as wide as it is printed, a text column or a page, and its letters
are of that size.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)
from PIL import Image

from kvbench.report.data.run import missing
from kvbench.report.data.style import Style
from kvbench.report.figures.labels import SIZE, End, height_for, name_ends
from kvbench.report.figures.panels import LINES

WIDTHS = {"column": 3.4, "page": 7.0}  # inches of a text column, and of a page with two
NARROWEST = 2.2  # inches of a chart
HEAD = 0.5  # inches above the charts
SMALL = 6.5  # points of the least letters: what stands below a picture
TO_AN_INCH = 19  # letters of a size of `LOOK`
LOOK = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "figure.titlesize": 8.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": SMALL,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
FRONT = {"color": "#666666", "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1}
LEAST = 1e-5  # on a logarithmic axis; what is less stands there, and its name says so
SMALLEST, LARGEST = 3.5, 8.0  # points of the marks of the least and of the largest budget


class Mark(NamedTuple):
    """A point of a curve.

    Attributes
    ----------
    low, high
        of its interval; None: it has none.
    budget
        of its arm, which may decide its size.
    words
        that stand beside it.
    reach
        how far a thin line goes from it to the right.
    n
        samples or repeats.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    budget: Any = None
    words: str = ""
    reach: float = 0.0
    n: int = 1

    @property
    def bar(self) -> tuple[float, float]:
        """How far its interval reaches down, and up."""
        down, up = (self.y if end is None else end for end in (self.low, self.high))
        return max(0.0, self.y - down), max(0.0, up - self.y)


class Curve(NamedTuple):
    """Marks in the order of a line.

    Attributes
    ----------
    is_level
        it has no place on the x axis, as full attention has no budget: a line over all of it.
    method
        whose it is; "" of a script's.
    """

    label: str
    style: Style
    marks: Sequence[Mark]
    is_level: bool = False
    method: str = ""


class Scale(NamedTuple):
    """An axis.

    Attributes
    ----------
    kind
        "values": logarithmic, marked at the values that are there; "log"; "linear"; "zero": from 0;
        "score"; "share": 0 to 1; "steps": of whole numbers; "words".
    words
        at 0, 1, ... of an axis of words.
    """

    label: str
    kind: str = "linear"
    words: tuple[str, ...] = ()


class Rule(NamedTuple):
    """A line across a chart at a value of one axis."""

    at: float
    label: str
    look: dict[str, Any]
    is_upright: bool = True


@dataclass(frozen=True)
class Chart:
    """What stands on one pair of axes.

    Attributes
    ----------
    rivals
        the curves whose Pareto front is drawn: its own, or those of all charts of its task, which
        share their extent; none: no front.
    better
        more or less of y.
    sized
        marks are larger where the budget is.
    named
        curves have their names at their ends, and there is no legend.
    """

    title: str
    x: Scale
    y: Scale
    curves: Sequence[Curve]
    rivals: Sequence[Curve] = ()
    better: Literal["more", "less"] = "more"
    rules: Sequence[Rule] = ()
    sized: bool = False
    named: bool = False

    @property
    def places(self) -> list[float]:
        """The x of all marks that have one."""
        return [mark.x for curve in self.curves if not curve.is_level for mark in curve.marks]


def draw_charts(
    charts: Sequence[Chart | None], heading: str, height: float = 2.2, across: int = 2
) -> tuple[Figure, Any]:
    """The figure of charts, so many in a row of a page, and its axes; half as many in a column.

    None leaves its place blank.
    """
    there = [chart for chart in charts if chart]
    named = any(chart.named for chart in there)
    tall = max(height, height_for(max(len(chart.curves) for chart in there))) if named else height
    figure, axes = tiled(len(charts), heading, tall + 0.6 * named, across)
    for axis, chart in zip(axes.flat, charts, strict=False):
        if chart:
            _draw(axis, chart, tall)
        else:
            axis.set_axis_off()
    return figure, axes


def _draw(axis: Any, chart: Chart, tall: float) -> None:
    """One chart, in an axis so many inches tall."""
    sizes = mark_sizes(chart.rivals or chart.curves) if chart.sized else {}
    for place, curve in enumerate(chart.curves):
        if chart.x.kind == "words":  # side by side, so that no bar hides another
            curve = curve._replace(
                marks=[mark._replace(x=mark.x + 0.02 * place) for mark in curve.marks]
            )
        if curve.is_level:
            _draw_level(axis, curve)
        elif chart.y.kind == "log" and not any(mark.y for mark in curve.marks):
            look = {"color": curve.style.colour, "linestyle": ":", "linewidth": 1}
            axis.axvline(curve.marks[0].x, label=curve.label, **look)
        else:
            _draw_curve(axis, curve, sizes)
    for rule in chart.rules:
        draw = axis.axvline if rule.is_upright else axis.axhline
        draw(rule.at, label=rule.label, **rule.look)
    axis.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label)
    axis.grid(alpha=0.3)
    if any(mark.words for curve in chart.curves for mark in curve.marks):
        axis.margins(0.08, 0.15)
    _fit(axis, chart)
    points = [point for point in _points(chart.rivals) if point[1] or chart.y.kind != "log"]
    if points:
        draw_front(axis, points, chart.better == "more")
    if chart.named:
        name_ends(axis, _ends(axis, chart), tall)


def _draw_level(axis: Any, curve: Curve) -> None:
    """A level for each of its marks, with the band of its interval."""
    colour = curve.style.colour
    for mark in curve.marks:
        axis.axhline(mark.y, color=colour, linestyle="--", linewidth=1, label=curve.label)
        if mark.low is not None and mark.high is not None:
            axis.axhspan(mark.low, mark.high, color=colour, alpha=0.1, linewidth=0)


def _draw_curve(axis: Any, curve: Curve, sizes: dict[Any, float]) -> None:
    """A line through its marks, each with its interval; of very many marks some are drawn."""
    marks, look = curve.marks, line_look(curve.style)
    bars: Any = list(zip(*(mark.bar for mark in marks), strict=True))
    x, y = ([mark[axis_of] for mark in marks] for axis_of in (0, 1))
    every = max(1, len(marks) // 12)
    for mark in marks if sizes else ():
        axis.plot(mark.x, mark.y, **look, markersize=sizes.get(mark.budget, LARGEST))
    drawn = {"marker": "", "alpha": 0.6} if sizes else {"markevery": every, "label": curve.label}
    if any(map(any, bars)):
        axis.errorbar(x, y, bars, elinewidth=0.8, **{**look, **drawn})
    else:
        axis.plot(x, y, **{**look, **drawn})
    if sizes:
        axis.plot([], [], **look, label=curve.label)
    for mark in marks:
        if mark.reach:
            thin = {"color": curve.style.colour, "linewidth": 0.6, "alpha": 0.6}
            axis.hlines(mark.y, mark.x, mark.x + mark.reach, **thin)
        if mark.words:
            words = {"fontsize": SIZE, "color": curve.style.colour, "ha": "center", "va": "bottom"}
            axis.annotate(mark.words, (mark.x, mark.y), (0, 4), textcoords="offset points", **words)


def mark_sizes(curves: Iterable[Curve]) -> dict[Any, float]:
    """The size of the marks of each budget in points, by equal steps."""
    budgets = {mark.budget for curve in curves for mark in curve.marks}
    there = sorted(budget for budget in budgets if not missing(budget))
    step = (LARGEST - SMALLEST) / max(1, len(there) - 1)
    return {budget: LARGEST - step * place for place, budget in enumerate(reversed(there))}


def _points(curves: Iterable[Curve]) -> list[tuple[float, float]]:
    """The places of curves of which a front can be."""
    marks = [mark for curve in curves if not curve.is_level for mark in curve.marks]
    return [(mark.x, mark.y) for mark in marks]


def _ends(axis: Any, chart: Chart) -> list[End]:
    """The name of each curve at its last mark."""
    ends = []
    for curve in (curve for curve in chart.curves if curve.label):
        last = max(curve.marks, key=lambda mark: mark.x)
        if chart.y.kind == "log" and not last.y:
            continue  # a line across the chart
        below = f" (below {LEAST:g})" if chart.y.kind == "log" and last.y == LEAST else ""
        x = axis.get_xlim()[1] if curve.is_level else last.x
        ends.append(End(f"{curve.label}{below}", curve.style, x, last.y))
    return ends


# -- axes ------------------------------------------------------------------------------------------


def _fit(axis: Any, chart: Chart) -> None:
    """Scales, limits and ticks."""
    _fit_x(axis, chart)
    match chart.y.kind:
        case "score":
            # from where what is drawn on it begins to where that ends
            low, high = axis.dataLim.intervaly
            room = 0.08 * max(high - low, 10)
            axis.set_ylim(max(-4, low - room), min(104, high + room))
        case "log":
            log_scale(axis, "y")
        case "zero":
            axis.set_ylim(bottom=0)
        case "share":
            axis.set_ylim(-0.03, 1.03)


def _fit_x(axis: Any, chart: Chart) -> None:
    if chart.rivals and chart.x.kind == "log":
        xs = [x for x, _ in _points(chart.rivals)]
        axis.set_xlim(min(xs) / 1.15, max(xs) * 1.15)
    if chart.rivals and chart.y.kind == "log":
        ys = [y for _, y in _points(chart.rivals) if y > 0]
        lows = [mark.y - mark.bar[0] for curve in chart.rivals for mark in curve.marks if mark.y]
        highs = [mark.y + mark.bar[1] for curve in chart.rivals for mark in curve.marks]
        if ys:
            axis.set_ylim(max(min(ys) / 3, min(lows)) / 1.2, max(highs) * 1.2)
    match chart.x.kind:
        case "values" if chart.places:
            mark_powers(axis, chart.places)
        case "log":
            log_scale(axis, "x")
        case "steps":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        case "words":
            there = sorted({int(place) for place in chart.places})
            axis.set_xticks(there, [chart.x.words[place] for place in there])
            axis.set_xlim(there[0] - 0.15, there[-1] + 0.3)


def log_scale(axis: Any, name: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at powers of 10, and where these are few between."""
    (axis.set_xscale if name == "x" else axis.set_yscale)("log")
    scale = axis.xaxis if name == "x" else axis.yaxis
    low, high = scale.get_view_interval()
    wide = high / low
    between = (1,) if wide > 50 else (1, 2, 5) if wide > 5 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    scale.set_major_locator(LogLocator(subs=between))
    scale.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())


def mark_powers(axis: Any, ticks: Iterable[float]) -> None:
    """A logarithmic x axis that is marked at these values, as far as there is room."""
    ticks = sorted(set(ticks))
    room = (ticks[-1] / ticks[0]) ** 0.1
    shown = [
        tick for index, tick in enumerate(ticks) if not index or tick >= room * ticks[index - 1]
    ]
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: thousands(value)))


def line_look(style: Style) -> dict[str, Any]:
    """Matplotlib's words for a line with outlined markers, filled where its line is broken."""
    fill = style.colour if LINES.index(style.line) % 2 else "none"
    look = {"color": style.colour, "marker": style.marker, "linestyle": style.line}
    return {**look, "markerfacecolor": fill, "markeredgewidth": 0.9}


def thousands(value: float) -> str:
    """36000 -> "36k", 131072 -> "131k", 4096 -> "4096", 0.1 -> "0.1"."""
    return f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:g}"


# -- Pareto fronts ---------------------------------------------------------------------------------


def draw_front(axis: Any, points: Sequence[tuple[float, float]], more_is_better: bool) -> None:
    """Draw the Pareto front to the axis' right end: the best value at a cost or less."""
    corners = front(points, more_is_better)
    low, high = axis.get_xlim()
    x = [*(cost for cost, _ in corners), high]
    y = [*(value for _, value in corners), corners[-1][1]]
    axis.step(x, y, where="post", label="Pareto front", **FRONT)
    axis.set_xlim(low, high)


def front(points: Iterable[tuple[float, float]], more_is_better: bool) -> list[tuple[float, float]]:
    """The points (cost, value) of the Pareto front, by cost.

    No other point is as cheap and as good, and better in one of them.
    """
    sign = 1 if more_is_better else -1
    corners, best = [], -math.inf
    for cost, value in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if sign * value > best:
            best = sign * value
            corners.append((cost, value))
    return corners


# -- pictures --------------------------------------------------------------------------------------


def printed(size: str) -> Any:
    """A context in which figures are drawn for a text "column" or a "page"."""
    return rc_context({**LOOK, "figure.figsize": (WIDTHS[size], 1)})


class Picture(Figure):
    """A figure that a notebook shows as it is, small enough to be kept in it."""

    def _repr_png_(self) -> bytes:
        whole, small = io.BytesIO(), io.BytesIO()
        with rc_context(LOOK):
            self.savefig(whole, format="png", dpi=110)
        Image.open(whole).quantize(64).save(small, format="png", optimize=True)
        return small.getvalue()


def tiled(count: int, heading: str, height: float, across: int = 2) -> tuple[Picture, Any]:
    """A figure and its axes [rows, columns], so many of them, row by row; those beyond are blank.

    Parameters
    ----------
    height
        of a chart, in inches.
    across
        charts in a row of a page, as far as none is narrower than `NARROWEST`.
    """
    width = rcParams["figure.figsize"][0]
    room = across if width == WIDTHS["page"] else max(1, across // 2)
    columns = min(count, room if width / room >= NARROWEST or across > 3 else 1)
    rows = math.ceil(count / columns)
    figure = Picture(figsize=(width, HEAD + height * rows), layout="constrained")
    figure.suptitle(textwrap.fill(heading, int(0.75 * TO_AN_INCH * width)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, axes


def fold_words(figure: Figure, axes: Any, named: bool) -> None:
    """Break titles and labels into lines as wide as their axis; half where names stand beside."""
    for axis in axes.flat:
        box = axis.get_subplotspec().get_gridspec()
        width, height = figure.get_size_inches()
        across = int(TO_AN_INCH * width / box.ncols)
        down = int(TO_AN_INCH * height / box.nrows)
        room = across // 2 if named else across - 12
        axis.set_title(textwrap.fill(axis.get_title(), max(room, 24)))
        axis.set_xlabel(textwrap.fill(axis.get_xlabel(), max(room, 24)))
        axis.set_ylabel(textwrap.fill(axis.get_ylabel(), max(int(0.7 * down), 16)))


def with_legend(figure: Figure, axes: Any, lines: Iterable[str], named: bool = False) -> Figure:
    """One legend for all axes, under these lines of words.

    The words alone where curves have their names at their ends, or there are none.
    """
    letters = int(1.1 * TO_AN_INCH * figure.get_figwidth())
    words = "\n".join(textwrap.fill(line, letters) for line in lines if line)
    entries = {
        name: handle
        for axis in axes.flat
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if named or not entries:
        figure.set_figheight(figure.get_figheight() + 0.13 * (1 + words.count("\n")))
        figure.supxlabel(words, fontsize=SMALL)
        return figure
    room = int(figure.get_figwidth() * TO_AN_INCH / (max(map(len, entries)) + 9))
    columns = max(1, min(len(entries), room))
    rows = math.ceil(len(entries) / columns) + words.count("\n") + bool(words)
    figure.set_figheight(figure.get_figheight() + 0.16 * rows)
    look = {"loc": "outside lower center", "ncols": columns, "frameon": False, "columnspacing": 1.2}
    figure.legend(entries.values(), entries.keys(), title=words, handlelength=2.5, **look)
    return figure
