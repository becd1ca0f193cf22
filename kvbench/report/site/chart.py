"""A small chart of a method's budgets, drawn by a template: nothing but lines and points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvbench.report.data.run import YARDSTICK
from kvbench.report.data.select import order_of
from kvbench.report.data.table import NONE
from kvbench.report.site.pages import colour, label
from kvbench.report.site.rows import ORACLE, Row

WIDE, TALL, LEFT, BELOW = 420, 190, 44, 28  # of the whole picture, and of its axes


class ChartLine(NamedTuple):
    """A method's line: its name, colour, x and y of its points in pixels, and whether they are
    joined.
    """

    name: str
    colour: str
    points: list[tuple[float, float]]
    joined: bool

    @property
    def path(self) -> str:
        """The points as SVG writes them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


class PageChart(NamedTuple):
    """A chart.

    Attributes
    ----------
    title
        what its samples are.
    what
        of which number.
    lines
        the method's, the exact top-k's, and full attention's, which is level.
    ticks, levels
        the words at each x and y.
    """

    title: str
    what: str
    lines: list[ChartLine]
    ticks: list[tuple[float, str]]
    levels: list[tuple[float, str]]
    wide: int = WIDE
    tall: int = TALL


def charts(panel: str, rows: Sequence[Row], all_rows: Sequence[Row]) -> PageChart | None:
    """Of the arms that differ in their budget alone; None where these are fewer than two."""
    plain = {row.budget: row for row in rows if row.budget != NONE and not row.variant}
    budgets = sorted(plain, key=order_of)
    if len(budgets) < 2:
        return None
    name = "kl_mean" if rows[0].has_kl else "score"
    places = dict(zip(budgets, range(len(budgets)), strict=True))
    method = rows[0].method
    samples = set(plain[budgets[0]].run.scores.keys)
    series: dict[str, dict[int, float]] = {}
    for row in all_rows:
        if row.variant or row.method not in (method, ORACLE, YARDSTICK) or row.run.is_unbounded:
            continue
        if set(row.run.scores.keys) != samples or (row.run.is_full and name == "kl_mean"):
            continue  # a line joins points of the same samples alone
        value = row.cell.numbers[name]
        at = range(len(budgets)) if row.budget == NONE else [places.get(row.budget, -1)]
        series.setdefault(row.method, {}).update({x: value for x in at if x >= 0})
    if len(series.get(method, {})) < 2:
        return None
    top = 100.0 if name == "score" else max(max(line.values()) for line in series.values()) or 1.0

    def x(place: int) -> float:
        return LEFT + 20 + place * (WIDE - LEFT - 40) / (len(budgets) - 1)

    def y(value: float) -> float:
        return 8 + (TALL - BELOW - 8) * (1 - value / top)

    lines = [
        ChartLine(
            label(other),
            colour(other),
            [(x(place), y(value)) for place, value in sorted(of_line.items())],
            len(of_line) > 1,
        )
        for other, of_line in sorted(series.items(), key=lambda item: item[0] != method)
    ]
    digits = 0 if name == "score" else max(0, 1 - math.floor(math.log10(top)))
    levels = [(y(top * part), f"{top * part:.{digits}f}") for part in (0, 0.5, 1)]
    ticks = [(x(place), budget) for budget, place in places.items()]
    what = "score" if name == "score" else "KL from full attention, nats"
    return PageChart(panel, what, lines, ticks, levels)
