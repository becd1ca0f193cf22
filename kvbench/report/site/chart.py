"""A small chart of a method's budgets, drawn by a template: nothing but lines and points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvbench.report.data.run import YARDSTICK
from kvbench.report.data.select import order_of
from kvbench.report.data.table import NONE
from kvbench.report.site.pages import colour, grouped, label
from kvbench.report.site.rows import ORACLE, Row, Site

WIDE, TALL, LEFT, BELOW = 420, 190, 44, 28  # of the whole picture, and of its axes


def charts(site: Site, method_rows: Sequence[Row]) -> list[Any]:
    """Score or KL against the budget where a method ran with several, on the same samples."""
    panels = grouped(method_rows, lambda row: row.panel).items()
    made = (chart_of(panel, rows, site.by_panel[panel]) for panel, rows in panels)
    return [chart for chart in made if chart]


def chart_of(panel: str, rows: Sequence[Row], all_rows: Sequence[Row]) -> Any:
    """A chart of the arms that differ in their budget alone; None where these are fewer than two.

    Returns
    -------
    Any
        `title` and `what`: of which samples and number; `lines`: the method's, the exact top-k's
        and full attention's, which is level, with x and y of their points in pixels; `ticks` and
        `levels`, the words at each x and y.
    """
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

    lines = []
    for other, of_line in sorted(series.items(), key=lambda item: item[0] != method):
        points = [(x(place), y(value)) for place, value in sorted(of_line.items())]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        look = {"name": label(other), "colour": colour(other)}
        lines.append(SimpleNamespace(**look, points=points, joined=len(points) > 1, path=path))
    digits = 0 if name == "score" else max(0, 1 - math.floor(math.log10(top)))
    return SimpleNamespace(
        title=panel,
        what="score" if name == "score" else "KL from full attention, nats",
        lines=lines,
        ticks=[(x(place), budget) for budget, place in places.items()],
        levels=[(y(top * part), f"{top * part:.{digits}f}") for part in (0, 0.5, 1)],
        wide=WIDE,
        tall=TALL,
    )
