"""The figure `frontier`: where a bit buys more than a token, by share of full attention's bytes.

A panel has methods, budgets and ways to hold keys and values (`kv=`), and the names of the arms on
its Pareto front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from kvbench.config import ConfigError
from kvbench.memory.kinds import KINDS, NATIVE
from kvbench.report.data.run import Run, Runs, missing
from kvbench.report.data.sizes import bytes_stored
from kvbench.report.data.stats import Estimate
from kvbench.report.data.style import BLACK, COLOURS
from kvbench.report.figures.labels import GAP, SIZE, with_gaps
from kvbench.report.figures.nearness import LEAST_KL, EstimateOf, at_least, intervals_of, measured
from kvbench.report.figures.panels import (
    Panel,
    arms_for,
    finished,
    fit_scores,
    log_y,
    mark_octaves,
    panels_of,
    rows_of,
    series_of,
    size_text,
    tiled,
)
from kvbench.report.figures.pareto import BARE, FRONT, areas, draw_front, front
from kvbench.runs.quantities import QUANTITIES

X_LABEL = (
    "held (% of full attention's native keys and values): keys and values in both tiers, and the"
    " index"
)
# Of `kv`, in the order of `KINDS`, then of those that differ by tier.
KIND_COLOURS = (BLACK, *COLOURS[:-1], "#44AA99", "#AA4499", "#B59F00", "#661100", COLOURS[-1])
TALL, EDGE = 3.0, 0.04  # inches of a panel, and the share of it above and below the names
MANY = 40  # arms that need a panel as wide as the page
LETTER = 0.056  # inches of a letter of a name, about
FAINT = 0.45  # what is not on the front
HALO = [withStroke(linewidth=1.5, foreground="white")]  # names are read where lines cross them


class Point(NamedTuple):
    """An arm in one panel.

    Attributes
    ----------
    colour, marker
        of its `kv`, and of its method.
    share
        percent of full attention's bytes.
    """

    run: Run
    name: str
    colour: str
    marker: str
    area: float
    share: float


class Looks(NamedTuple):
    """How arms are told apart: a colour a `kv`, a marker a series, an area a budget."""

    colours: dict[str, str]
    markers: dict[str, str]
    areas: dict[Any, float]


def frontier(runs: Runs) -> Figure:
    """KL from full attention over bytes held; the score where there is no KL.

    There is a panel for each task and model.
    """
    arms = arms_for(runs, "frontier", probed=False, scored=True)
    arms = arms.assign(share=[_share(runs[run]) for run in arms.index]).dropna(subset=["share"])
    if not len(arms):
        raise ConfigError(
            "figure=frontier: no run with an audit that counts bytes, beside one of method=full on"
            " the same samples"
        )
    drawn = measured(runs, panels_of("frontier", runs, arms))
    near = {panel.title for panel, name, _ in drawn if name != "score"}
    drawn = [entry for entry in drawn if entry[1] != "score" or entry[0].title not in near]
    looks = _looks(runs, [panel for panel, *_ in drawn])
    bars = intervals_of(runs, drawn)
    title = f"where a bit buys more than a token; with {bars}; names: the Pareto front"
    across = 1 if max(len(panel.arms) for panel, *_ in drawn) > MANY else 2
    figure, axes = tiled(len(drawn), title, TALL, across)
    for (panel, name, estimate_of), axis in zip(drawn, axes.flat, strict=False):
        axis.set_title(panel.title)
        _draw(axis, _points(runs, panel, looks), name, estimate_of)
    _explain(axes.flat[0], looks)
    return finished(figure, axes, [panel for panel, *_ in drawn])


def _share(run: Run) -> float:
    """Percent of the bytes that full attention holds natively; NaN where it is not known."""
    full = run.full()
    return 100 * bytes_stored(run) / bytes_stored(full) if full else float("nan")


def _looks(runs: Runs, panels: Sequence[Panel]) -> Looks:
    there = {str(runs.settings.at[run, "kv"]) for panel in panels for run in panel.arms.index}
    kinds = [kind for kind in KINDS["device"] if kind in there]
    kinds += sorted(there - set(kinds))
    markers = {
        series.label(): series.style.marker
        for panel in panels
        for series in series_of(runs, panel, without="kv")
    }
    budgets = [budget for panel in panels for budget in panel.arms["budget"]]
    return Looks(dict(zip(kinds, cycle(KIND_COLOURS), strict=False)), markers, areas(budgets))


def _points(runs: Runs, panel: Panel, looks: Looks) -> list[Point]:
    points = []
    for series in series_of(runs, panel, without="kv"):
        for arm in rows_of(series.arms):
            kv = str(runs.settings.at[arm.name, "kv"])
            name = series.label(arm.budget) + (f", {kv}" if kv != str(NATIVE) else "")
            area = BARE if missing(arm.budget) else looks.areas[arm.budget]
            colour, marker = looks.colours[kv], looks.markers[series.label()]
            points.append(Point(runs[arm.name], name, colour, marker, area, arm.share))
    return points


def _draw(axis: Any, points: Sequence[Point], measure: str, estimate_of: EstimateOf) -> None:
    """One measure over the bytes.

    What is at 0 of it, as full attention is of KL, is a line at its cost.
    """
    more, drawn = measure == "score", {}
    for point in points:
        value = estimate_of(point.run)
        if value is None:
            continue
        if more or value.mean > 0:
            drawn[point] = value if more else at_least(value)
        else:
            look = {"color": point.colour, "linestyle": ":", "linewidth": 1}
            axis.axvline(point.share, label=f"{point.name}: 0", **look)
    places = [(point.share, value.mean) for point, value in drawn.items()]
    shares, values = [x for x, _ in places], [y for _, y in places]
    corners = set(front(shares, values, more))
    for (point, value), place in zip(drawn.items(), places, strict=True):
        _mark(axis, point, value, place in corners)
    axis.set(xlabel=X_LABEL, ylabel=QUANTITIES[measure].axis)
    right = max(point.share for point in points)
    mark_octaves(axis, min(shares), right)
    first: dict[tuple[float, float], Point] = {}  # of several arms at one place, the least budget
    for point, place in zip(drawn, places, strict=True):
        first.setdefault(place, point)
    named = {point: place for place, point in first.items() if place in corners}
    axis.set_xlim(_x_start(axis, named, min(shares), right), 1.25 * right)
    if more:
        fit_scores(axis)
    else:
        log_y(axis)
        axis.margins(y=0.08)
    draw_front(axis, shares, values, more)
    _name_front(axis, named, None if more else LEAST_KL)


def _mark(axis: Any, point: Point, value: Estimate, on_front: bool) -> None:
    """A point with its interval; those off the front are faint."""
    alpha, width = (1, 1.2) if on_front else (FAINT, 0.8)
    if value.low is not None and value.high is not None:
        ends, faint = (value.low, value.high), alpha * FAINT
        axis.vlines(point.share, *ends, point.colour, linewidth=0.7, alpha=faint)
    look = {"facecolor": "none", "edgecolor": point.colour, "linewidth": width, "alpha": alpha}
    marker, order = point.marker, 2 + alpha
    axis.scatter(point.share, value.mean, s=point.area, marker=marker, zorder=order, **look)


def _x_start(
    axis: Any, named: dict[Point, tuple[float, float]], least: float, most: float
) -> float:
    """Where an x axis begins that has room left of each point for its name."""
    figure = axis.get_figure()
    inches = figure.get_figwidth() / axis.get_subplotspec().get_gridspec().ncols - 0.7
    share = 0.1
    for point, (x, _) in named.items():
        along = math.log(x / least) / math.log(1.25 * most / least)
        share = max(share, ((0.35 + LETTER * len(point.name)) / inches - along) / (1 - along))
    return least / (1.25 * most / least) ** (share / (1 - share))


def _name_front(axis: Any, points: dict[Point, tuple[float, float]], least: float | None) -> None:
    """Names left of the points of a front.

    They stand left of others at their height, too, as what was drawn there would look like the
    front.
    """
    to_axis = axis.transData + axis.transAxes.inverted()
    there = {point: to_axis.transform(place) for point, place in points.items()}
    placed = sorted(
        ((float(high), float(along), point) for point, (along, high) in there.items()),
        key=lambda entry: entry[:2],
    )
    gap = GAP / (0.65 * TALL)
    # No name lies on the axis' own frame.
    heights = [
        EDGE + (1 - 2 * EDGE) * high
        for high in with_gaps([high for high, _, _ in placed], gap / (1 - 2 * EDGE))
    ]
    for height, (_, along, point) in zip(heights, placed, strict=True):
        leftmost = min(
            [along, *(other for high, other, _ in placed if abs(high - height) < 1.5 * gap)]
        )
        line = {"arrowstyle": "-", "color": point.colour, "linewidth": 0.5, "alpha": 0.6}
        line |= {"shrinkA": 0, "shrinkB": 3}
        name = f"{point.name} (below {least:g})" if points[point][1] == least else point.name
        look = {"ha": "right", "va": "center", "fontsize": SIZE, "path_effects": HALO}
        at = {"xycoords": "data", "textcoords": "axes fraction", "arrowprops": line}
        axis.annotate(
            name, points[point], (leftmost - 0.03, height), color=point.colour, **look, **at
        )


def _explain(axis: Any, looks: Looks) -> None:
    """What colours, markers and sizes stand for, to the legend."""
    grey = {"facecolor": "none", "edgecolor": FRONT["color"]}
    for name, marker in looks.markers.items():
        axis.scatter([], [], s=30, marker=marker, label=name, **grey)
    for budget, area in looks.areas.items():
        axis.scatter([], [], s=area, marker="o", label=f"C = {size_text(budget)}", **grey)
    for kind, colour in looks.colours.items():
        axis.add_line(
            Line2D([], [], color=colour, marker="s", markersize=4, linestyle="", label=f"kv={kind}")
        )
