"""A table as text: for the console, in Markdown and as CSV.

All but CSV print the same grid of strings. CSV is for machines: a line for each cell, numbers
unrounded.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table as Drawn
from rich.text import Text

from kvbench.report.data.stats import RANGE_UP_TO
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.runs.quantities import Quantity
from kvbench.runs.terminal import Console, fitting

GAP = 3  # characters between two columns of a box
PAGE_WIDTH = 120  # characters of an overview, at most
NOT_RUN, NONE = "not run", "-"


class Line(NamedTuple):
    """A printed line.

    Attributes
    ----------
    labels
        of its row; empty but in the first line of a row.
    texts
        what stands in its columns.
    """

    labels: tuple[str, ...]
    texts: list[str]


class Grid(NamedTuple):
    """A table as strings.

    Attributes
    ----------
    head
        of the labels.
    columns
        the headings over the texts.
    rows
        the lines of each row.
    """

    head: tuple[str, ...]
    columns: list[str]
    rows: list[list[Line]]

    @property
    def widths(self) -> list[int]:
        """The characters of each column, labels first; a heading of several words wraps."""
        lines = [(*line.labels, *line.texts) for row in self.rows for line in row]
        columns = zip((*self.head, *self.columns), *lines, strict=True)
        return [max(map(len, [*name.split(), *texts, ""])) for name, *texts in columns]

    def fitting(self, encoding: str) -> Grid:
        """The same as a console of this encoding shows it, so that columns are wide enough."""

        def fit(texts: Iterable[str]) -> list[str]:
            return [fitting(word, encoding) for word in texts]

        rows = [
            [Line(tuple(fit(line.labels)), fit(line.texts)) for line in lines]
            for lines in self.rows
        ]
        return Grid(tuple(fit(self.head)), fit(self.columns), rows)


def grid(table: ReportTable) -> Grid:
    """The strings of a table.

    Values stand side by side where it has no columns, else on a line each.
    """
    if table.columns == [""]:
        cells = table.cells.values()
        names = [
            name
            for name in table.lines
            if any(text(table, cell, name, 0) != NONE for cell in cells)
        ]
        rows = [
            [Line(labels, [text(table, table.cells.get((row, 0)), name, 0) for name in names])]
            for row, labels in enumerate(table.rows)
        ]
        return Grid(table.axes, [table.lines[name].heading for name in names], rows)
    rows = [_lines(table, row) for row in range(len(table.rows))]
    head = (*table.axes, "") if len(table.lines) > 1 else table.axes
    return Grid(head, table.columns, rows)


def _lines(table: ReportTable, row: int) -> list[Line]:
    """The lines of a row, one for each value that it has.

    Where the table has several values, each line begins with its heading.
    """
    labels, lines = table.rows[row], list[Line]()
    for name, value in table.lines.items():
        texts = [
            text(table, table.cells.get((row, column)), name, column)
            for column in range(len(table.columns))
        ]
        if any(word != NONE for word in texts):
            shown = labels if not lines else ("",) * len(labels)
            lines.append(Line((*shown, value.heading) if len(table.lines) > 1 else shown, texts))
    return lines


def text(table: ReportTable, cell: Cell | None, name: str, column: int) -> str:
    """What a cell shows of a value: `NONE`, or `NOT_RUN` where ours could be beside a paper's."""
    if cell is None:
        return NONE
    if name in OF_SCORE:
        return OF_SCORE[name](cell.numbers, table.lines[name]) or NONE
    numbers, value = cell.numbers, table.lines[name]
    marks = cell.marks.get(name)
    if name == "brief_score" and "score" in numbers:
        letters = cell.marks.get("score")
        shown = f"{numbers['score']:.{value.digits}f}{'*' * cell.differs_from_full}"
        spread = _interval(numbers, "score", value)
        return " ".join(filter(None, [shown, f"({letters})" if letters else "", spread]))
    if name not in numbers:
        return NOT_RUN if name == "score" and "published" in table.lines and cell.mapped else NONE
    shown = f"{numbers[name]:.{_digits(table, name, column)}f}"
    if name == "difference":
        return _signed(shown)
    if name == "samples" and numbers.get("failed"):
        return f"{shown}, {numbers['failed']:.0f} failed"
    spread = "" if name == "score" else _interval(numbers, name, value)  # which has a line for it
    spread = "" if spread == f"[{shown}, {shown}]" else spread
    if not spread and (error := numbers.get(f"{name}_error")):
        spread = f"± {error:.{value.digits}f}"
    return " ".join(filter(None, [shown, spread, f"({marks})" if marks else ""]))


def _against_full(numbers: Mapping[str, float], value: Quantity) -> str:
    if "against_full" not in numbers:
        return ""
    words = [
        _signed(f"{numbers['against_full']:.{value.digits}f}"),
        _interval(numbers, "against_full", value),
    ]
    if numbers["pairs"] < numbers["samples"]:
        words.append(f"({numbers['pairs']:.0f} pairs)")
    if numbers["pairs"] <= RANGE_UP_TO:
        words.append("(r)")
    return " ".join(words)


def _brief_against_full(numbers: Mapping[str, float], value: Quantity) -> str:
    there = "against_full" in numbers
    return _signed(f"{numbers['against_full']:.{value.digits}f}") if there else ""


def _seeds(numbers: Mapping[str, float], value: Quantity) -> str:
    if "seeds" not in numbers:
        return ""
    ends = (f"{numbers[end]:.{value.digits}f}" for end in ("seeds_low", "seeds_high"))
    return f"{numbers['seeds']:.0f}: {' to '.join(ends)}"


def _interval(numbers: Mapping[str, float], name: str, value: Quantity) -> str:
    ends = (numbers.get(f"{name}_{end}") for end in ("low", "high"))
    words = [f"{end:.{value.digits}f}" for end in ends if end is not None]
    return f"[{', '.join(words)}]" if words else ""


def _signed(shown: str) -> str:
    return shown if shown.startswith("-") or not float(shown) else f"+{shown}"


# What is shown beside a score: from the numbers of a cell; "" where it has none.
OF_SCORE = {
    "interval": lambda numbers, value: _interval(numbers, "score", value),
    "against_full": _against_full,
    "brief_against_full": _brief_against_full,
    "seeds": _seeds,
}


def _digits(table: ReportTable, name: str, column: int) -> int:
    """Digits after the point; of published numbers as many as the column's most exact one has."""
    if name != "published":
        return table.lines[name].digits
    numbers = [
        cell.numbers.get(name, 0.0) for (_, index), cell in table.cells.items() if index == column
    ]
    return max(len(f"{number:.4f}".rstrip("0").partition(".")[2]) for number in numbers)


# -- formats ---------------------------------------------------------------------------------------


def console(tables: Sequence[ReportTable], target: Console) -> list[str]:
    """Print tables. Returns the headings of the columns for which an overview had no room.

    A table that is wider than the console comes in several boxes, each with the labels of its rows;
    a box of one column that is still wider runs over: no number is cut.
    """
    omitted = []
    for table in tables:
        if table.shared:
            omitted += _overview(table, target)
        else:
            _in_boxes(table, target)
        for note in table.notes:
            target.print(Text(note), width=min(target.width, PAGE_WIDTH))
        target.print()
    return omitted


def _overview(table: ReportTable, target: Console) -> list[str]:
    """Print a table as wide as a page at most, with shared labels on lines of their own."""
    whole = grid(table).fitting(target.encoding)
    widths, heads = whole.widths[table.shared :], len(whole.head) - table.shared
    room = min(target.width, PAGE_WIDTH)
    ends = itertools.accumulate(widths, lambda total, width: total + 2 + width)
    count = max(heads + 1, sum(end <= room for end in ends))
    names = (*whole.head[table.shared :], *whole.columns)[:count]

    def show(cells: Sequence[str], style: str = "") -> None:
        aligned = (
            f"{cell:{'<' if index < heads else '>'}{widths[index]}}"
            for index, cell in enumerate(cells)
        )
        target.print(Text("  ".join(aligned).rstrip(), style), soft_wrap=True)

    wrapped = [textwrap.wrap(name, width) for name, width in zip(names, widths, strict=False)]
    depth = max(map(len, wrapped))
    target.print(Text(table.title, "italic"))
    for line in zip(*([""] * (depth - len(words)) + words for words in wrapped), strict=True):
        show(line, "bold")
    above = None
    for row, lines in enumerate(whole.rows):
        if table.section(row) != above:
            above = table.section(row)
            target.print(Text(f"\n{above}", "bold"), soft_wrap=True)
        for line in lines:
            show((*line.labels[table.shared :], *line.texts)[:count])
    target.print()
    return whole.columns[count - heads :]


def _in_boxes(table: ReportTable, target: Console) -> None:
    """Print a table in a box, or in several where it is wider than the console."""
    whole = grid(table).fitting(target.encoding)
    widths = whole.widths
    heads = len(whole.head)
    for columns in _boxes(widths[:heads], widths[heads:], target.width):
        drawn = Drawn(title=Text(table.title), title_justify="left")
        for name in whole.head:
            drawn.add_column(Text(name), no_wrap=True)
        for column in columns:
            name = "\n".join(textwrap.wrap(whole.columns[column], widths[heads + column]))
            drawn.add_column(Text(name), justify="right", no_wrap=True)
        for lines in whole.rows:
            for line in lines:
                drawn.add_row(
                    *map(Text, (*line.labels, *(line.texts[column] for column in columns)))
                )
            if len(lines) > 1:
                drawn.add_section()
        min_width = sum(widths[:heads]) + sum(widths[heads + column] for column in columns)
        width, target.width = (
            target.width,
            max(target.width, min_width + GAP * (heads + len(columns)) + 1),
        )
        target.print(drawn, crop=False)
        target.width = width


def _boxes(heads: Sequence[int], widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """The columns of each box, at most `width` characters wide with its labels.

    There is at least one column in each.
    """
    room = width - sum(heads) - GAP * len(heads) - 1
    box: list[int] = []
    for column, size in enumerate(widths):
        if box and sum(widths[index] + GAP for index in box) + size + GAP > room:
            yield box
            box = []
        box.append(column)
    yield box


def markdown(tables: Sequence[ReportTable]) -> str:
    """Tables in GitHub's Markdown."""
    return "\n".join(map(_markdown, tables))


def _markdown(table: ReportTable) -> str:
    whole = grid(table)
    head = [*whole.head, *whole.columns]
    rule = [*["---"] * len(whole.head), *["---:"] * len(whole.columns)]
    lines = [[*line.labels, *line.texts] for row in whole.rows for line in row]
    body = [rule if line is rule else [*map(plain_markdown, line)] for line in (head, rule, *lines)]
    rows = ["| " + " | ".join(line) + " |" for line in body]
    notes = [f"- {plain_markdown(note)}" for note in table.notes]
    return "\n".join([f"### {plain_markdown(table.title)}", "", *rows, "", *notes, ""])


def plain_markdown(words: str) -> str:
    """Words as Markdown shows them, in one line: nothing in them is markup or a formula.

    A _ between letters is none, so that names stay readable.
    """
    return re.sub(
        r"[\\`*\[\]<>&~|$#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", " ".join(words.split())
    )


def plain_csv(value: str | float) -> str | float:
    """A cell that no spreadsheet takes for a formula.

    Text that begins like one gets an apostrophe, a number never.
    """
    if not isinstance(value, str) or not re.match(r"[=+\-@\t\r\n＝＋－＠]", value) or value == NONE:
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def csv_lines(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, safe to open in a spreadsheet."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([*map(plain_csv, row)] for row in rows)
    return out.getvalue()


def csv_text(tables: Sequence[ReportTable]) -> str:
    """Tables as CSV, a line for each cell.

    It has the labels of the row, the column, every number, marks, the machine that times are of,
    every setting that is no label, and the seed and the run. Numbers are as stored: bytes, or in
    the unit that ends their name.

    `status` is "run", "not run" or, of a paper's cell that kvbench cannot run, "published only".
    """
    names = {
        name: None for table in tables for cell in table.cells.values() for name in cell.numbers
    }
    axes = {axis or "row": None for table in tables for axis in table.axes}
    settings = {
        key: None for table in tables for cell in table.cells.values() for key in cell.settings
    }
    keys = [key for key in settings if key not in axes and key != "seed"]
    start = ["table", *axes, "column", "status", "seed"]
    rows: list[Sequence[Any]] = [[*start, *names, "marks", "timed_on", *keys, "run"]]
    for table in tables:
        for (row, column), cell in sorted(table.cells.items(), key=lambda item: item[0]):
            labels = dict(zip((axis or "row" for axis in table.axes), table.rows[row], strict=True))
            marks = "".join(dict.fromkeys("".join(cell.marks.values())))
            numbers = [_stored(table, cell, name) for name in names]
            start = [table.id, *(labels.get(axis, "") for axis in axes), table.columns[column]]
            status = "run" if cell.run else NOT_RUN if cell.mapped else "published only"
            values = [cell.settings.get(key, "") for key in keys]
            rows.append(
                [*start, status, cell.seed, *numbers, marks, cell.machine, *values, cell.run]
            )
    return csv_lines(rows)


def _stored(table: ReportTable, cell: Cell, name: str) -> float | str:
    """A number of a cell as it was stored; printed tables have it in another unit."""
    names = [name, *(name.removesuffix(end) for end in ("_low", "_high", "_error"))]
    line = next((table.lines[candidate] for candidate in names if candidate in table.lines), None)
    return cell.numbers[name] / (line.unit.scale if line else 1) if name in cell.numbers else ""
