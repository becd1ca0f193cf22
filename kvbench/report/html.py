"""A report as one HTML file: tables that a click sorts, and pictures; nothing is fetched."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.report.data.run import SkippedRun
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.report.tables.formats import NONE, NOT_RUN, Grid, grid
from kvbench.runs.quantities import is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_OUTPUTS, MOST_LETTERS = 20, 600  # of a run, and of a cell of its outputs
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")


def page(
    title: str,
    intro: str,
    tables: Sequence[ReportTable],
    figures: Mapping[str, tuple[str, Figure]],
    skipped: Sequence[SkippedRun],
    undrawn: Sequence[str] = (),
    outputs: Mapping[str, str] | None = None,
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
        by run id the samples of a run, as `outputs_of` has them; scores of the run lead there.
    """
    outputs = outputs or {}
    links = [(f"table-{table.id}", table.title) for table in tables]
    links += [(f"figure-{name}", caption) for name, (caption, _) in figures.items()]
    links += [("outputs", "Outputs")] if outputs else []
    named = "\n".join(outputs.values())
    blocks = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(intro)}</p>",
        _navigation(links),
        *(_section(table, outputs) for table in tables),
        *(_picture(name, caption, figure) for name, (caption, figure) in figures.items()),
        f'<section id="outputs"><h2>Outputs</h2>{named}</section>' if outputs else "",
        _details("runs left out", [f"{path}: {why}" for path, why in skipped]),
        _details("figures not drawn", undrawn),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(filter(None, blocks)) + "\n"


def _navigation(links: Sequence[tuple[str, str]]) -> str:
    """Links to the parts of a page, by id; "" where there is one part."""
    if len(links) < 2:
        return ""
    words = "".join(f'<a href="#{escape(id)}">{escape(name)}</a> ' for id, name in links)
    return f"<nav>{words}</nav>"


def score_of(record: Mapping[str, Any], metric: str) -> float | None:
    """A sample's score, 0..1; None where it has none."""
    score = (record.get("scores") or {}).get(metric)
    return score if is_number(score) else None


def outputs_of(name: str, id: str, metric: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A run's samples as a block that a click opens, those with the lowest scores first.

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
        words = [
            str(record["id"]),
            NONE if score is None else f"{100 * score:.1f}",
            answers,
            output,
        ]
        rows.append("".join(f"<td>{escape(word[:MOST_LETTERS])}</td>" for word in words))
    head = "".join(
        f"<th class=label>{word}</th>" for word in ("sample", "score", "expected", "output")
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    few = f", {len(shown)} with the lowest scores" if len(shown) < len(records) else ""
    return (
        f'<details id="run-{escape(id)}"><summary>{escape(name)}: {len(records)}'
        f" samples{few}</summary><table"
        f" class=outputs><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
    )


def _linked(text: str, cell: Cell | None, outputs: Mapping[str, str]) -> str:
    """What a cell shows, which leads to the outputs of its run."""
    id = Path(cell.run).name if cell else ""
    return f'<a href="#run-{escape(id)}">{escape(text)}</a>' if id in outputs else escape(text)


def _section(table: ReportTable, outputs: Mapping[str, str]) -> str:
    whole = grid(table)
    # A paper's rows have no name for their labels, and are sorted by them all the same.
    names = (whole.head[0] or "row", *whole.head[1:], *whole.columns)
    heads = [
        f'<th scope="col" data-column="{column}"{" class=label" * (column < len(whole.head))}>'
        + (f'<button type="button">{escape(name)}</button></th>' if name else "</th>")
        for column, name in enumerate(names)
    ]
    bodies = [_row(table, whole, row, outputs) for row in range(len(whole.rows))]
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<section id="table-{escape(table.id)}"><h2>{escape(table.title)}</h2><table>'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n"
        + "\n".join(bodies)
        + f"</table><ul class=notes>{notes}</ul></section>"
    )


def _row(table: ReportTable, whole: Grid, row: int, outputs: Mapping[str, str]) -> str:
    """A row as a tbody, of a line for each of its values; the first has the row's labels."""
    lines, labels = whole.rows[row], len(table.rows[row])
    body = []
    for number, line in enumerate(lines):
        cells = [
            f'<th scope="row" class=label rowspan="{len(lines)}"'
            f' data-column="{column}"{_value(label)}>{escape(label)}</th>'
            for column, label in enumerate(line.labels[:labels])
            if number == 0
        ]
        cells += [f"<td class=line>{escape(label)}</td>" for label in line.labels[labels:]]
        for column, text in enumerate(line.texts):
            # A score is the first of a cell's lines, or of the values of a row.
            first = number == 0 and (table.columns != [""] or column == 0)
            shown = _linked(text, table.cells.get((row, column)) if first else None, outputs)
            none = " class=none" if text in (NONE, NOT_RUN) else ""
            place = column + len(whole.head)
            cells.append(f'<td data-column="{place}"{_value(text)}{none}>{shown}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<tbody>{''.join(body)}</tbody>"


def _value(text: str) -> str:
    """What a cell is sorted by: the number it begins with, or its words; "" where it has none."""
    if text in (NONE, NOT_RUN):
        return ""
    first = text.removeprefix("[").partition(" ")[0].rstrip(",")
    try:
        return f' data-value="{float(first) / (100 if text.endswith(" %") else 1)}"'
    except ValueError:
        return f' data-value="{escape(text)}"'


def _picture(name: str, caption: str, figure: Figure) -> str:
    from kvbench.report.figures.all import drawn

    source = base64.b64encode(drawn(figure, "svg")).decode()
    return (
        f'<figure id="figure-{escape(name)}"><img alt="{escape(caption)}"'
        f' src="data:image/svg+xml;base64,{source}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _details(what: str, items: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return (
        f"<details><summary>{len(items)} {what}</summary><ul>{listed}</ul></details>"
        if items
        else ""
    )
