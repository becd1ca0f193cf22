"""A table as text: for the console, in Markdown and as CSV.

All but CSV print the same grid of strings. CSV is for machines: a line for each cell, numbers
unrounded.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd
from rich.text import Text

from kvbench.report.data.table import NONE, Number, csv_of
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.runs.quantities import Quantity
from kvbench.runs.terminal import Console, fitting

GAP = "  "  # between two columns
PAGE_WIDTH = 120  # characters of an overview, at most
NOT_RUN = "not run"


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
    value, line = table.lines[name], cell.shown(name)
    if line is None:
        return NOT_RUN if name == "score" and "published" in table.lines and cell.mapped else NONE
    if name in PRINTED:
        return PRINTED[name](cell, value) or NONE
    digits = _digits(table, name, column)
    shown, spread = _number(line.value, value, digits), _interval(line, value)
    if name == "score" or spread == f"[{shown}, {shown}]":
        spread = ""  # which a score has a line for
    if not spread and (error := cell.lines.get(f"{name}_error")) and error.value:
        spread = f"± {_number(error.value, value)}"
    return " ".join(filter(None, [shown, spread, f"({line.mark})" if line.mark else ""]))


def _number(stored: float, value: Quantity, digits: int | None = None) -> str:
    return f"{value.scaled(stored):.{value.digits if digits is None else digits}f}"


def _interval(line: Number, value: Quantity) -> str:
    words = [_number(end, value) for end in (line.low, line.high) if end is not None]
    return f"[{', '.join(words)}]" if words else ""


def _signed(line: Number, value: Quantity) -> str:
    shown = _number(line.value, value)
    return shown if shown.startswith("-") or not float(shown) else f"+{shown}"


def _against_full(cell: Cell, value: Quantity) -> str:
    line = cell.lines["against_full"]
    pairs = f"({line.n} pairs)" if line.n < cell.lines["samples"].value else ""
    marks = f"({line.mark})" if line.mark else ""
    words = [_signed(line, value), _interval(line, value), pairs, marks]
    return " ".join(filter(None, words))


def _brief_score(cell: Cell, value: Quantity) -> str:
    line = cell.lines["score"]
    star, letters = "*" * cell.differs_from_full, f"({line.mark})" if line.mark else ""
    words = [f"{_number(line.value, value)}{star}", letters, _interval(line, value)]
    return " ".join(filter(None, words))


def _samples(cell: Cell, value: Quantity) -> str:
    failed = cell.lines["failed"].value if "failed" in cell.lines else 0
    shown = _number(cell.lines["samples"].value, value)
    return f"{shown}, {failed:.0f} failed" if failed else shown


def _seeds(cell: Cell, value: Quantity) -> str:
    line = cell.lines["seeds"]
    ends = (_number(end, value) for end in (line.low, line.high) if end is not None)
    return f"{line.value:.0f}: {' to '.join(ends)}"


# What is printed otherwise than as a number with its interval and its marks.
PRINTED: dict[str, Callable[[Cell, Quantity], str]] = {
    "interval": lambda cell, value: _interval(cell.lines["score"], value),
    "brief_score": _brief_score,
    "against_full": _against_full,
    "brief_against_full": lambda cell, value: _signed(cell.lines["against_full"], value),
    "difference": lambda cell, value: _signed(cell.lines["difference"], value),
    "samples": _samples,
    "seeds": _seeds,
}


def _digits(table: ReportTable, name: str, column: int) -> int:
    """Digits after the point; of published numbers as many as the column's most exact one has."""
    if name != "published":
        return table.lines[name].digits
    lines = (cell.lines.get(name) for (_, at), cell in table.cells.items() if at == column)
    numbers = [line.value if line else 0.0 for line in lines]
    return max(len(f"{number:.4f}".rstrip("0").partition(".")[2]) for number in numbers)


# -- formats ---------------------------------------------------------------------------------------


def console(tables: Sequence[ReportTable], target: Console) -> list[str]:
    """Print tables. Returns the headings of the columns for which an overview had no room.

    A table that is wider than the console comes in several blocks, each with the labels of its
    rows; a block of one column that is still wider runs over: no number is cut. An overview, whose
    rows share labels, is as wide as a page at most.
    """
    omitted = []
    for table in tables:
        whole = grid(table).fitting(target.encoding)
        labels = len(whole.head)
        room = min(target.width, PAGE_WIDTH) if table.shared else target.width
        blocks = list(_blocks(whole.widths[table.shared : labels], whole.widths[labels:], room))
        target.print(Text(table.title, "italic"))
        for columns in blocks[:1] if table.shared else blocks:
            places = [*range(table.shared, labels), *(labels + column for column in columns)]
            _print_block(table, whole, places, target)
        if table.shared:
            omitted += [whole.columns[column] for block in blocks[1:] for column in block]
        for note in table.notes:
            target.print(Text(note), width=min(target.width, PAGE_WIDTH))
        target.print()
    return omitted


def _print_block(table: ReportTable, whole: Grid, places: Sequence[int], target: Console) -> None:
    """Print these labels and columns, with labels that rows share on lines of their own."""
    widths = [whole.widths[place] for place in places]

    def show(cells: Sequence[str], style: str = "") -> None:
        aligned = (
            f"{cell:{'<' if place < len(whole.head) else '>'}{width}}"
            for cell, place, width in zip(cells, places, widths, strict=True)
        )
        target.print(Text(GAP.join(aligned).rstrip(), style), soft_wrap=True)

    names = [(*whole.head, *whole.columns)[place] for place in places]
    wrapped = [textwrap.wrap(name, width) for name, width in zip(names, widths, strict=True)]
    depth = max(map(len, wrapped))
    for line in zip(*([""] * (depth - len(words)) + words for words in wrapped), strict=True):
        show(line, "bold")
    above = ""
    for row, lines in enumerate(whole.rows):
        if table.section(row) != above:
            above = table.section(row)
            target.print(Text(f"\n{above}", "bold"), soft_wrap=True)
        elif len(lines) > 1:
            target.print()
        for line in lines:
            show([(*line.labels, *line.texts)[place] for place in places])
    target.print()


def _blocks(labels: Sequence[int], widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """The columns of each block, at most this many characters wide with its labels.

    There is at least one column in each.
    """
    start = sum(labels) + len(GAP) * (len(labels) - 1)
    block, used = list[int](), start
    for column, width in enumerate(widths):
        if block and used + len(GAP) + width > room:
            yield block
            block, used = [], start
        block.append(column)
        used += len(GAP) + width
    yield block


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


def csv_text(tables: Sequence[ReportTable]) -> str:
    """Tables as CSV, a line for each cell.

    It has the labels of the row, the column, every number, marks, the machine that times are of,
    every setting that is no label, and the seed and the run. Numbers are as stored: bytes, or in
    the unit that ends their name.

    `status` is "run", "not run" or, of a paper's cell that kvbench cannot run, "published only".
    """
    starts, numbers, ends = [], [], []
    for table in tables:
        axes = [axis or "row" for axis in table.axes]
        for (row, column), cell in sorted(table.cells.items(), key=lambda item: item[0]):
            status = "run" if cell.arm else NOT_RUN if cell.mapped else "published only"
            place = {"table": table.id, "column": table.columns[column], "status": status}
            labels = dict(zip(axes, table.rows[row], strict=True))
            starts.append({**place, "seed": cell.settings.get("seed", ""), **labels})
            numbers.append(cell.flat())
            marks = "".join(dict.fromkeys("".join(cell.marks.values())))
            ends.append(
                {"marks": marks, "timed_on": cell.machine, **cell.settings, "run": cell.run}
            )
    named, settings = pd.DataFrame(starts), pd.DataFrame(ends)
    settings = settings[[key for key in settings if key not in named]]
    named = _last(named, ["column", "status", "seed"])
    return csv_of(pd.concat([named, pd.DataFrame(numbers), _last(settings, ["run"])], axis=1))


def _last(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """The frame with these columns behind the others."""
    return frame[[*frame.columns.drop(names), *names]]
