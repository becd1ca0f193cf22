"""A page for each method: what it is, its results, and what the papers print of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbench.config import ConfigError, choices, conf_dir, method_config, show
from kvbench.report.data.papers import PaperTable, ids, table
from kvbench.report.data.run import YARDSTICK, Runs, missing
from kvbench.report.data.select import last_word, order_of
from kvbench.report.data.stats import COVERAGE, FEWEST
from kvbench.report.data.table import NONE
from kvbench.report.site.board import machine_of
from kvbench.report.site.claims import ITS_PAPER, by_side, counts, look
from kvbench.report.site.pages import Page, PageNumber, colour, grouped, label, slug
from kvbench.report.site.paired import word_of
from kvbench.report.site.prose import choices_taken, readme_entry
from kvbench.report.site.rows import FAR_OVER, ORACLE, Row, Site
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.report.tables.formats import text
from kvbench.report.tables.published import merge_published

WIDE, TALL, LEFT, BELOW = 420, 190, 44, 28  # of the whole picture, and of its axes
SHOWN = ("score", "against_full", "kl_mean", "device_kv_bytes", "tpot_ms_p50", "own_ms")
LINES = {"published": "", "score": "ours", "difference": "difference"}  # of a published row


def method_pages(site: Site) -> Iterator[Page]:
    """The pages, and one that leads to them."""
    runs = site.without_submissions(site.joined)
    tables = [_printed(runs, table(id)) for id in ids()]
    shipped = choices("method")
    sides = {method: by_side(site, method) for method in site.methods}
    own = {method: counts(sides[method].get(ITS_PAPER, [])) for method in site.methods}
    yield Page(
        "methods/index.html",
        "Methods",
        "methods.html",
        {"methods": site.methods, "shipped": shipped, "ran": site.ran, "own": own},
    )
    for method in site.methods:
        rows = [row for row in site.rows if row.method == method]
        printed = published(method, tables)
        claimed = [
            {
                "title": f"Of {label(method)}'s own paper"
                if side == ITS_PAPER
                else f"Of other papers, {side}",
                "side": side,
                "counts": counts(claims),
                "claims": claims,
            }
            for side, claims in sides[method].items()
        ]
        path = conf_dir() / "method" / f"{method}.yaml"
        yield Page(
            f"methods/{slug(method)}.html",
            label(method),
            "method.html",
            {
                "method": method,
                "about": readme_entry(method),
                "short": shipped.get(method) or _whose(rows),
                "panels": results(site, rows),
                "charts": charts(site, rows),
                "claimed": claimed,
                "own_paper": ITS_PAPER in sides[method],
                "look": look,
                "printed": printed,
                "totals": sum((some.counts for some in printed), Counter[str]()),
                "choices": choices_taken(method_config(method).target) if method in shipped else "",
                "settings": _settings(method) if method in shipped else _options(rows),
                "source": path.read_text(encoding="utf-8") if method in shipped else "",
                "coverage": COVERAGE,
                "fewest": FEWEST,
                "far_over": FAR_OVER,
            },
        )


def results(site: Site, method_rows: Sequence[Row]) -> list[Any]:
    """Every arm of a method, by the samples that it ran on.

    Returns
    -------
    list[Any]
        `title` and `facts` of the samples; the `machine` of the times; `columns`, the heading of
        each number by its name; `rows`, each arm, its place as "1 to 3 of 9" or "", and its numbers
        by column; `groups`, the score of each group of samples by arm, with how it looks beside
        other methods'.
    """
    panels = []
    by_panel = grouped(method_rows, lambda row: row.panel)
    for panel in (panel for panel in site.by_panel if panel in by_panel):
        rows = sorted(by_panel[panel], key=lambda row: order_of(row.budget))
        machine = machine_of(rows)
        columns = {
            name: row.table.lines[name].narrow_heading
            for name in SHOWN
            for row in rows
            if name in row.cell.numbers and name in row.table.lines
        }
        numbers = [
            {
                name: row.time(name, machine) if row.table.lines[name].is_time else row.number(name)
                for name in columns
            }
            for row in rows
        ]
        groups = sorted({group for row in rows for group in row.run.scores.groups}, key=order_of)
        panels.append(
            SimpleNamespace(
                title=panel,
                facts=site.facts[panel],
                machine=machine,
                columns=columns,
                rows=list(zip(rows, map(site.place, rows), numbers, strict=True)),
                groups={
                    group: [_of_group(site, row, group) for row in rows]
                    for group in groups
                    if len(groups) > 1
                },
            )
        )
    return panels


def _of_group(site: Site, row: Row, group: str) -> tuple[PageNumber, str] | None:
    """A group's score, and "ahead" or "behind" of the median of other methods by a paired test."""
    strata = row.run.scores.strata((group,))
    count = int(strata[0].sum())
    if not count:
        return None
    mean = float(row.run.scores.values[strata[0]].mean())
    number = PageNumber("score", mean, f"{mean:.1f}")
    if count < FEWEST:
        return number, ""
    rivals = [other.run for other in site.rivals(row) if group in other.run.scores.groups]
    rivals = sorted(rivals, key=lambda run: run.score((group,)).mean)
    lead = row.run.against([rivals[len(rivals) // 2]], (group,)) if rivals else None
    return number, {"better": "ahead", "worse": "behind"}.get(word_of(lead), "")


def _whose(rows: Sequence[Row]) -> str:
    """Whose a method is that kvbench does not ship."""
    people = " and ".join(dict.fromkeys(row.of.manifest.who for row in rows if row.of))
    of = f"of {people}, of which nothing but its runs is known" if people else "of your own"
    return f"A method {of}."


def _options(rows: Sequence[Row]) -> dict[str, str]:
    """The options that runs of such a method say that they had."""
    return {
        last_word(key): row.run.label(key)
        for row in rows
        for key, value in row.run.settings.items()
        if key.startswith("method.") and not missing(value)
    }


def _settings(method: str) -> dict[str, str]:
    """The least budget, and the preset."""
    config = method_config(method)
    least = config.minimum or {}
    facts: dict[str, Any] = {
        "least C, as published": least.get("paper"),
        "least C, everything counted": least.get("unified"),
        "C where none is given": config.preset,
        "layers that its paper leaves dense": config.published_dense_layers,
    }
    return {name: show(value) for name, value in facts.items()}


# -- small charts: nothing but lines and points, drawn by the template ----------------------------


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


# -- what papers print -----------------------------------------------------------------------------


def _printed(runs: Runs, paper: PaperTable) -> Any:
    """A published table with what these runs measured, and notes on both."""
    try:
        merged = merge_published(runs, paper)
    except ConfigError as error:  # several runs fit
        merged = merge_published(None, paper)
        return SimpleNamespace(paper=paper, merged=merged, notes=[*merged.notes, str(error)])
    return SimpleNamespace(paper=paper, merged=merged, notes=merged.notes)


def published(method: str, tables: Sequence[Any]) -> list[Any]:
    """The tables that print a number of a method, with full attention's row of the same model.

    Each with `counts`, how many numbers of the method are published and how many were run here,
    and `rows`, the label, kind and cells of each line.
    """
    of_method = []
    for printed in tables:
        frame = printed.paper.frame
        names = set(frame["row"][frame["method"] == method])
        if not names:
            continue
        models = frame["model"][frame["method"] == method]
        full = (frame["method"] == YARDSTICK) & frame["model"].isin(models)
        cells = printed.merged.cells.items()
        own = [cell for (row, _), cell in cells if printed.merged.rows[row][0] in names]
        there = Counter(name for cell in own for name in cell.numbers)
        lines = list(_lines(printed.merged, names | set(frame["row"][full])))
        of_method.append(SimpleNamespace(**vars(printed), counts=there, rows=lines))
    return of_method


def _lines(
    merged: ReportTable, shown: set[str]
) -> Iterator[tuple[str, str, list[tuple[PageNumber, str] | None]]]:
    for place, (name,) in enumerate(merged.rows):
        cells = [merged.cells.get((place, column), Cell()) for column in range(len(merged.columns))]
        for kind, what in LINES.items():
            if name in shown and any(kind in cell.numbers for cell in cells):
                numbers = [_cell(merged, cell, kind, at) for at, cell in enumerate(cells)]
                yield what or name, kind, numbers


def _cell(merged: ReportTable, cell: Cell, kind: str, column: int) -> tuple[PageNumber, str] | None:
    """A number of a published table, and the runs that it is of."""
    if kind not in cell.numbers:
        return None
    first, _, more = text(merged, cell, kind, column).partition(" ")
    runs = " ".join(Path(path).name for path in cell.run.split("; ")) if kind == "score" else ""
    return PageNumber(kind, cell.numbers[kind], first, more), runs
