"""A report as one HTML file: tables that a click sorts, pictures inline, nothing fetched; it prints
well, too.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.report.data.run import SkippedRun
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.report.tables.formats import NONE, NOT_RUN, grid
from kvbench.runs.quantities import is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_OUTPUTS, MOST_LETTERS = 20, 600  # of a run, and of a cell of its outputs
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto; padding: 0 1.5rem;
  width: max-content; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
nav, p { max-width: 75rem; } nav a { display: inline-block; margin-right: 1.4rem; } a { color: #0072B2; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; text-align: right; vertical-align: top; white-space: nowrap; }
th.label, td.line { text-align: left; font-weight: normal; }
thead th { border-top: 2px solid; border-bottom: 1px solid; vertical-align: bottom; white-space: normal; }
thead button { all: unset; cursor: pointer; font-weight: 600; }
thead button:focus-visible { outline: 2px solid #0072B2; }
thead button::after { content: "\\a0\\2195"; color: #999; font-weight: normal; }
[aria-sort=ascending] button::after { content: "\\a0\\2191"; color: inherit; }
[aria-sort=descending] button::after { content: "\\a0\\2193"; color: inherit; }
tbody { border-bottom: 1px solid #ddd; } tbody:last-of-type { border-bottom: 2px solid; }
tbody:hover { background: #f4f7fa; }
tr:not(:first-child) td, td.line { color: #555; } td.none { color: #999; }
.notes, figcaption { color: #444; font-size: .88em; max-width: 75rem; }
figure { margin: 2.2rem 0; } figure img { max-width: 75rem; }
.outputs td { text-align: left; white-space: pre-wrap; max-width: 50rem; color: inherit; }
@media print {
  body { margin: 0; width: auto; font-size: 9pt; padding: 0; } nav, thead button::after { display: none; }
  thead button::after { content: ""; } figure, tbody { break-inside: avoid; } figure img { max-width: 100%; }
}
"""

# A row of a table is a tbody, of one line or several; the first of its cells in a column that has a
# value is its key.
SCRIPT = """
for (const button of document.querySelectorAll("thead button")) button.addEventListener("click", () => {
  const head = button.parentElement, table = head.closest("table"), column = head.dataset.column;
  const turn = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", turn > 0 ? "ascending" : "descending");
  const key = body => body.querySelector(`[data-column="${column}"][data-value]`)?.dataset.value;
  const bodies = [...table.tBodies].map(body => [key(body), body]);
  bodies.sort(([one], [two]) => {
    if (one === undefined || two === undefined) return (one === undefined) - (two === undefined);
    const numbers = !isNaN(one) && !isNaN(two);
    return turn * (numbers ? one - two : !isNaN(one) ? -1 : !isNaN(two) ? 1 : one.localeCompare(two));
  });
  for (const [, body] of bodies) table.append(body);
});
const reveal = () => { const run = document.getElementById(location.hash.slice(1)); if (run) run.open = true; };
addEventListener("hashchange", reveal);
reveal();
"""


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
    blocks = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(intro)}</p>",
        (
            "<nav>"
            + "".join(f'<a href="#{escape(id)}">{escape(name)}</a> ' for id, name in links)
            + "</nav>"
            if len(links) > 1
            else ""
        ),
        *(_section(table, outputs) for table in tables),
        *(_picture(name, caption, figure) for name, (caption, figure) in figures.items()),
        (
            '<section id="outputs"><h2>Outputs</h2>' + "\n".join(outputs.values()) + "</section>"
            if outputs
            else ""
        ),
        _details("runs left out", [f"{path}: {why}" for path, why in skipped]),
        _details("figures not drawn", undrawn),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(filter(None, blocks)) + "\n"


def score_of(record: Mapping[str, Any], metric: str) -> float | None:
    """A sample's score, 0..1; None where it has none."""
    score = (record.get("scores") or {}).get(metric)
    return score if is_number(score) else None


def outputs_of(name: str, id: str, metric: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A run's samples as a block of the page that a click opens: those with the lowest scores
    first.

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
    heads = [
        '<th scope="col"'
        f' data-column="{column}"{" class=label" if column < len(whole.head) else ""}>'
        + (f'<button type="button">{escape(name)}</button></th>' if name else "</th>")
        for column, name in enumerate((*whole.head, *whole.columns))
    ]
    # A paper's rows have no name for their labels, and are sorted by them all the same.
    if not whole.head[0]:
        heads[0] = (
            '<th scope="col" data-column="0" class=label><button type="button">row</button></th>'
        )
    bodies = []
    for row, lines in enumerate(whole.rows):
        labels = len(table.rows[row])
        body = []
        for number, line in enumerate(lines):
            cells = []
            if number == 0:
                cells += [
                    f'<th scope="row" class=label rowspan="{len(lines)}"'
                    f' data-column="{column}"{_value(label)}>{escape(label)}</th>'
                    for column, label in enumerate(line.labels[:labels])
                ]
            cells += [f"<td class=line>{escape(label)}</td>" for label in line.labels[labels:]]
            for column, text in enumerate(line.texts):
                # A score is the first of a cell's lines, or of the values of a row.
                first = number == 0 and (table.columns != [""] or column == 0)
                shown = _linked(text, table.cells.get((row, column)) if first else None, outputs)
                none = " class=none" if text in (NONE, NOT_RUN) else ""
                cells.append(
                    f'<td data-column="{column + len(whole.head)}"{_value(text)}{none}>{shown}</td>'
                )
            body.append(f"<tr>{''.join(cells)}</tr>")
        bodies.append(f"<tbody>{''.join(body)}</tbody>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<section id="table-{escape(table.id)}"><h2>{escape(table.title)}</h2><table>'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n"
        + "\n".join(bodies)
        + f"</table><ul class=notes>{notes}</ul></section>"
    )


def _value(text: str) -> str:
    """What a cell is sorted by: the number it begins with, or its words; nothing where there is
    none.
    """
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
