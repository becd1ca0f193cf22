"""HTML by Jinja templates, and a report as one file: tables that a click sorts, and pictures.

Templates get plain data; all that they print is escaped. Nothing of a page is fetched.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.report.data.run import SkippedRun
from kvbench.report.data.table import NONE
from kvbench.report.tables.cells import ReportTable
from kvbench.report.tables.formats import NOT_RUN, grid
from kvbench.runs.quantities import is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
MOST_OUTPUTS, MOST_LETTERS = 20, 600  # of a run, and of a cell of its outputs


@cache
def environment() -> Environment:
    """The templates of all pages, those of the site among them."""
    folders = [FOLDER / "templates", FOLDER / "site" / "templates"]
    made = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return made


def render(template: str, **data: Any) -> str:
    """A page by the template of this name."""
    return environment().get_template(template).render(data)


class Outputs(NamedTuple):
    """The samples of a run: its name and id, their number, and what is shown of some."""

    name: str
    id: str
    total: int
    rows: list[list[str]]


def page(
    title: str,
    intro: str,
    tables: Sequence[ReportTable],
    figures: Mapping[str, tuple[str, Figure]],
    skipped: Sequence[SkippedRun],
    undrawn: Sequence[str] = (),
    outputs: Sequence[Outputs] = (),
) -> str:
    """One whole page.

    Parameters
    ----------
    title, intro
        its heading and what stands under it.
    tables
        in their order.
    figures
        name -> (caption, figure).
    skipped
        runs that are in none of them.
    undrawn
        why a figure is not there, a sentence each.
    outputs
        of runs, to which their scores lead.
    """
    from kvbench.report.figures.all import drawn

    ids = {some.id for some in outputs}
    return render(
        "report.html",
        title=title,
        intro=intro,
        tables=[_shown(table, ids) for table in tables],
        figures={
            name: (caption, b64encode(drawn(figure, "svg")).decode())
            for name, (caption, figure) in figures.items()
        },
        outputs=outputs,
        lists={
            "runs left out": [f"{path}: {why}" for path, why in skipped],
            "figures not drawn": undrawn,
        },
        missing=(NONE, NOT_RUN),
    )


def score_of(record: Mapping[str, Any], metric: str) -> float | None:
    """A sample's score, 0..1; None where it has none."""
    score = (record.get("scores") or {}).get(metric)
    return score if is_number(score) else None


def outputs_of(name: str, id: str, metric: str, records: Sequence[Mapping[str, Any]]) -> Outputs:
    """A run's samples, those with the lowest scores first.

    Parameters
    ----------
    name
        of the run, for a reader.
    id
        of the run.
    metric
        its main score.
    records
        its sample lines.
    """
    shown = sorted(records, key=lambda record: score_of(record, metric) or 0.0)[:MOST_OUTPUTS]
    rows = []
    for record in shown:
        score = score_of(record, metric)
        answers = " | ".join(map(str, record.get("answers") or [])) or NONE
        output = record.get("error") or record.get("output") or NONE
        score_text = NONE if score is None else f"{100 * score:.1f}"
        words = [str(record["id"]), score_text, answers, output]
        rows.append([word[:MOST_LETTERS] for word in words])
    return Outputs(name, id, len(records), rows)


def _shown(table: ReportTable, outputs: set[str]) -> dict[str, Any]:
    """A table as its template prints it.

    Of each row the lines, one a value: labels of the row (in its first line alone), the label of
    the value, and cells. A cell has its text, its column (labels come first), `value`, what it is
    sorted by, and `run`, the id of the run whose outputs it leads to, or "".
    """
    whole = grid(table)
    rows = []
    for row, printed in enumerate(whole.rows):
        labels, lines = len(table.rows[row]), []
        for number, line in enumerate(printed):
            first = [_cell(label, i) for i, label in enumerate(line.labels[:labels])]
            cells = []
            for column, text in enumerate(line.texts):
                # A score is the first of a cell's lines, or of the values of a row.
                is_score = number == 0 and (table.columns != [""] or column == 0)
                cell = table.cells.get((row, column)) if is_score else None
                run = Path(cell.run).name if cell else ""
                cells.append(_cell(text, column + len(whole.head), run if run in outputs else ""))
            value = line.labels[labels:]
            lines.append({"labels": [] if number else first, "value": value, "cells": cells})
        rows.append(lines)
    return {
        "id": table.id,
        "title": table.title,
        # A paper's rows have no name for their labels, and are sorted by them all the same.
        "heads": (whole.head[0] or "row", *whole.head[1:], *whole.columns),
        "labels": len(whole.head),
        "rows": rows,
        "notes": table.notes,
    }


def _cell(text: str, column: int, run: str = "") -> dict[str, Any]:
    return {"text": text, "column": column, "value": _value(text), "run": run}


def _value(text: str) -> str:
    """What a cell is sorted by: the number it begins with, or its words; "" where it has none."""
    if text in (NONE, NOT_RUN):
        return ""
    first = text.removeprefix("[").partition(" ")[0].rstrip(",")
    try:
        return str(float(first) / (100 if text.endswith(" %") else 1))
    except ValueError:
        return text
