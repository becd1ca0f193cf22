"""What the papers print of a method, with ours beside it where a run of ours fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvbench.config import ConfigError
from kvbench.report.data.papers import PaperTable, ids, table
from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.site.markup import ids_of, items, small, table_of
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.report.tables.formats import NONE, text
from kvbench.report.tables.published import merge_published

LINES = {"published": "", "score": "ours", "difference": "difference"}  # of a published row


class Printed(NamedTuple):
    """A published table.

    Attributes
    ----------
    paper
        as published.
    merged
        with ours.
    why
        ours are not there, a sentence, or "".
    """

    paper: PaperTable
    merged: ReportTable
    why: str = ""

    def block(self, rows: set[str], counts: Counter[str]) -> str:
        """These rows of it, folded where none of ours is there.

        Parameters
        ----------
        counts
            how many published and own numbers there are of the method.
        """
        notes = items(filter(None, [*self.merged.notes, self.why]))
        numbers = f"{counts['published']} published, {counts['score']} run here"
        source = small(f"{self.paper.source.partition(';')[0]}: {numbers}")
        return (
            f"<details{' open' * bool(counts['score'])}><summary>{escape(self.paper.title)}{source}"
            f"</summary>{_table(self.merged, rows)}<ul class=notes>{notes}"
            f"<li><code>kvbench report --paper {self.paper.id}</code></li></ul></details>"
        )


def all_printed(runs: Runs) -> list[Printed]:
    """Every published table with what these runs found."""
    return [_printed(runs, table(id)) for id in ids()]


def _printed(runs: Runs, paper: PaperTable) -> Printed:
    try:
        return Printed(paper, merge_published(runs, paper))
    except ConfigError as error:  # several runs fit
        return Printed(paper, merge_published(None, paper), str(error))


def published(method: str, tables: Sequence[Printed]) -> str:
    """Every published table that has the method, with full attention's row of the same model."""
    blocks, counts = [], Counter[str]()
    for printed in tables:
        frame = printed.paper.frame
        rows = set(frame["row"][frame["method"] == method])
        if not rows:
            continue
        models = frame["model"][frame["method"] == method]
        full = (frame["method"] == YARDSTICK) & frame["model"].isin(models)
        cells = [
            cell
            for (place, _), cell in printed.merged.cells.items()
            if printed.merged.rows[place][0] in rows
        ]
        there = Counter(name for cell in cells for name in cell.numbers)
        counts += there
        blocks.append(printed.block(rows | set(frame["row"][full]), there))
    if not blocks:
        return "<p>No table that kvbench holds prints a number of it.</p>"
    return (
        f"<p>{counts['published']} published numbers in {len(blocks)} tables, of which"
        f" {counts['score'] or 'none'} has a run here that matches: one of the same model, task and"
        " budget.</p>" + "".join(blocks)
    )


def _table(merged: ReportTable, shown: set[str]) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in merged.columns)
    lines = []
    for place, (label,) in enumerate(merged.rows):
        row_cells = [
            merged.cells.get((place, column), Cell()) for column in range(len(merged.columns))
        ]
        for name, what in LINES.items():
            if label in shown and any(name in cell.numbers for cell in row_cells):
                cells = "".join(
                    _cell(merged, cell, name, column) for column, cell in enumerate(row_cells)
                )
                lines.append(
                    f'<tr class="{name}"><th scope="row">{escape(what or label)}</th>{cells}</tr>'
                )
    return table_of(f"<th></th>{heads}", lines, "paper")


def _cell(merged: ReportTable, cell: Cell, name: str, column: int) -> str:
    if name not in cell.numbers:
        return f'<td class="none">{NONE}</td>'
    shown = text(merged, cell, name, column).split(" ", 1)
    run = ids_of(Path(path).name for path in cell.run.split("; "))
    source = f'data-run="{run}"' if name == "score" else f'data-paper="{merged.id}"'
    return (
        f'<td data-name="{name}" data-value="{cell.numbers[name]!r}"'
        f" {source}>{escape(shown[0])}{small(''.join(shown[1:]))}</td>"
    )
