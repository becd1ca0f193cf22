"""Where a method wins and loses: its place, its scores by group, and its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from html import escape

from kvbench.report.data.run import YARDSTICK
from kvbench.report.data.select import order_of
from kvbench.report.data.stats import COVERAGE, FEWEST
from kvbench.report.figures.all import draw
from kvbench.report.site.drawing import picture
from kvbench.report.site.markup import cell_of, ids_of, protocols, small, table_of
from kvbench.report.site.rows import FAR_OVER, ORACLE, Row, Site
from kvbench.report.tables.formats import NONE

FIGURES = {
    "budget": (
        "Score against the budget and what was attended, beside full attention and the exact top-k"
    ),
    "fidelity": "KL from full attention, lower is nearer, beside the exact top-k",
}
SHOWN = ("score", "against_full", "kl_mean", "device_kv_bytes", "tpot_ms_p50", "own_ms")


def results(site: Site, method_rows: Sequence[Row]) -> str:
    """Every arm of a method, and its place among the sparse methods of its panel and budget."""
    names = [name for name in SHOWN if any(name in row.cell.numbers for row in method_rows)]
    lines_of = {
        name: next(row.table.lines[name] for row in method_rows if name in row.table.lines)
        for name in names
    }
    heads = "".join(f"<th>{line.narrow_heading}</th>" for line in lines_of.values())
    heads = f"<th class=label>task</th><th class=label>C</th><th>place</th>{heads}"
    lines = []
    for row in sorted(method_rows, key=lambda row: (row.panel, order_of(row.budget))):
        task, *samples = row.panel.split(", ", 1)
        folders = "<br>".join(map(escape, row.run.folder_names))
        lines.append(
            f'<tr><td class="label">{escape(task)}{small("".join(samples))}</td>'
            f'<td class="label">{escape(row.budget)}{small(row.variant)}</td>{_place(site, row)}'
            f"{''.join(cell_of(row, name) for name in names)}"
            f'<td class="label"><code>{folders}</code></td></tr>'
        )
    tests = sum(len(_rivals(site, row)) for row in method_rows if "data-place" in _place(site, row))
    return (
        "<p>Place: among the sparse methods with the same budget, by KL where there is some, else"
        f" by score; from the best to the worst that paired tests leave open ({tests} here, each at"
        f" {COVERAGE} %), and none of fewer than {FEWEST} samples. Arms that attend {FAR_OVER:g}"
        " times C or more are not ranked, nor is Top-k, which scores every key exactly.</p>"
        + protocols(site)
        + table_of(f"{heads}<th class=label>run</th>", lines)
        + f"<p class=notes>A run is the folder of that name below {escape(site.folders)}, or its"
        " copy: <code>run.yaml</code> there has all settings, and <code>samples.jsonl</code>"
        " what was measured of each sample. <code>make reference</code> makes those anew that"
        " kvbench ships.</p>"
    )


def _rivals(site: Site, row: Row) -> list[Row]:
    """The arms of other sparse methods in its panel and budget, the best first.

    Full attention has none.
    """
    return [
        other
        for other in site.rows
        if (other.panel, other.budget) == (row.panel, row.budget)
        and len({other.method, row.method, YARDSTICK}) == 3
        and other.is_choice
    ]


def _place(site: Site, row: Row) -> str:
    rivals = _rivals(site, row)
    place = site.place(row, rivals) if row.is_choice else None
    if place is None:
        return f'<td class="none">{NONE}</td>'
    shown = " to ".join(map(str, dict.fromkeys(place)))
    return f'<td data-place="{shown}" data-of="{1 + len(rivals)}">{shown} of {1 + len(rivals)}</td>'


def by_group(site: Site, method_rows: Sequence[Row]) -> str:
    """The score of each group of samples, a table for each panel.

    Scores that differ from the others' median are marked.
    """
    tables = []
    for panel in dict.fromkeys(row.panel for row in method_rows):
        rows = sorted(
            (row for row in method_rows if row.panel == panel), key=lambda row: order_of(row.budget)
        )
        groups = sorted({group for row in rows for group in row.run.scores.groups}, key=order_of)
        if len(groups) > 1:
            heads = "".join(f"<th>{escape(row.budget)}{small(row.variant)}</th>" for row in rows)
            lines = [
                f'<tr><th scope="row">{escape(group)}</th>'
                + "".join(_group_cell(site, row, group) for row in rows)
                + "</tr>"
                for group in groups
            ]
            tables.append(
                f"<h3>{escape(panel)}</h3>{table_of(f'<th class=label>group</th>{heads}', lines)}"
            )
    legend = (
        "<p>Scores by budget. <span class=ahead>Ahead</span> and <span class=behind>behind</span>:"
        " of the median of the other sparse methods with the same budget, by a paired test at"
        f" {COVERAGE} % over {FEWEST} samples or more.</p>"
    )
    return legend + "".join(tables) if tables else ""


def _group_cell(site: Site, row: Row, group: str) -> str:
    if group not in row.run.scores.groups:
        return f'<td class="none">{NONE}</td>'
    score = row.run.score((group,)).mean
    rivals = [other.run for other in _rivals(site, row) if group in other.run.scores.groups]
    rivals = sorted(rivals, key=lambda run: run.score((group,)).mean)
    lead = row.run.against([rivals[len(rivals) // 2]], (group,)) if rivals else None
    look = "" if lead is None or not lead.differs else "ahead" if lead.mean > 0 else "behind"
    return (
        f'<td class="{look}" data-name="score" data-group="{escape(group)}" data-value="{score!r}" '
        f'data-run="{ids_of(row.run.folder_names)}">{score:.1f}</td>'
    )


def pictures(site: Site, method_rows: Sequence[Row]) -> Iterator[tuple[str, bytes]]:
    """The figures of a method's runs, by name.

    Only of panels with several of its budgets, if there are any.
    """
    budgets: dict[str, set[str]] = {}
    for row in method_rows:
        budgets.setdefault(row.panel, set()).add(row.budget)
    panels = {panel for panel, there in budgets.items() if len(there) > 1} or budgets.keys()
    methods = {method_rows[0].method, YARDSTICK, ORACLE}
    of_others = (
        {row.of for row in method_rows if row.of} if all(row.of for row in method_rows) else set()
    )
    shown = [row for row in site.rows if row.of is None or row.of in of_others]
    runs = site.joined.only(
        [row.run for row in shown if row.panel in panels and row.method in methods]
    )
    for name in FIGURES:
        if drawing := picture(partial(draw, name, runs)):
            yield name, drawing
