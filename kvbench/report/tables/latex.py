"""A table as LaTeX prints it, ready for a paper: booktabs, and no other package.

A row is a method (or whatever the rows are), a score stands in one cell with its interval, the best
of a column is bold and the second best underlined. What else a score comes with stands in the notes
below.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvbench.report.data.run import YARDSTICK
from kvbench.report.data.select import last_word
from kvbench.report.data.stats import COVERAGE, FEWEST, ranks
from kvbench.report.data.style import STYLES
from kvbench.report.tables.cells import Cell, ReportTable, compared
from kvbench.report.tables.formats import NONE, text
from kvbench.report.tables.widths import tabular_width
from kvbench.runs.quantities import Quantity

Column = tuple[int, str]  # of a table, and the number that it shows
# of a score: in its cell and in the notes
IN_CELL = {"interval", "against_full", "brief_against_full", "samples"}
SCORES = {"score", "brief_score"}
LINE = r"\\"  # ends one
STAR = r"$\ast$"
NOT_HERE = ("*: ", "Against full: ")  # how notes begin for which there are others here
NARROW = 14  # characters of a heading on one line
TEXT_WIDTH = 345.0  # points, of LaTeX's article; the pages of conferences are wider


@dataclass(frozen=True)
class Letters:
    """How a tabular is set.

    Attributes
    ----------
    command
        LaTeX's, after \\centering.
    em
        width of the letters, in points; small ones are wider than their size says.
    gap
        between columns, in points.
    line
        characters of a label or of a number with its interval on one line.
    """

    command: str
    em: float
    gap: float = 12.0
    line: int = 1000


SIZES = (Letters("", 10.0), Letters(r"\small", 9.25), Letters(r"\footnotesize", 8.5))
# where labels leave no room for two
TIGHT = Letters(r"\scriptsize\setlength{\tabcolsep}{2pt}", 8.0, 4.0, 12)


def latex(tables: Sequence[ReportTable]) -> str:
    """Tables for LaTeX with \\usepackage{booktabs}.

    Columns without room stand in a tabular below.
    """
    return "\n".join(map(_latex, tables))


def _latex(table: ReportTable) -> str:
    shown = {
        name
        for name in table.lines
        for (_, column), cell in table.cells.items()
        if text(table, cell, name, column) != NONE
    }
    lines = [name for name in table.lines if name in shown - IN_CELL] or [*table.lines][:1]
    # published numbers stand below ours, all others side by side
    stacked = "published" in table.lines
    columns = [
        (column, name)
        for column in range(len(table.columns))
        for name in ([""] if stacked else lines)
    ]
    ranks = {} if stacked else _ranks(table, lines)
    made = partial(_tabular, table, lines if stacked else [], ranks)
    size, tabulars = _fitting(columns, made)
    notes = " ".join(_notes(table, bool(ranks)))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering" + size.command,
            rf"\caption{{{escaped(table.title)}}}",
            rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', table.id.lower())}}}",
            "\n\\par\\medskip\n".join(map("\n".join, tabulars)),
            *([rf"{{\par\smallskip\footnotesize\raggedright {notes}\par}}"] if notes else []),
            r"\end{table}",
            "",
        ]
    )


def _fitting(
    columns: Sequence[Column], make: Callable[[Sequence[Column], Letters], list[str]]
) -> tuple[Letters, list[list[str]]]:
    """The largest letters in which these columns fit a page, and their tabular.

    Of the smallest letters as many tabulars as it takes.
    """

    def fits(some: Sequence[Column], size: Letters) -> bool:
        return tabular_width(make(some, size), size.em, size.gap) <= TEXT_WIDTH

    for size in SIZES:
        if fits(columns, size):
            return size, [make(columns, size)]
    has_room = len(columns) > 1 and all(fits(two, SIZES[-1]) for two in itertools.pairwise(columns))
    size = SIZES[-1] if has_room else TIGHT
    groups = [list(group) for _, group in itertools.groupby(columns, key=lambda column: column[0])]
    parts = [
        part
        for group in groups
        for part in ([group] if fits(group, size) else [[column] for column in group])
    ]
    blocks: list[list[Column]] = []
    for part in parts:
        if blocks and fits([*blocks[-1], *part], size):
            blocks[-1] += part
        else:
            blocks.append(part)
    return size, [make(block, size) for block in blocks]


def _tabular(
    table: ReportTable,
    stacked: Sequence[str],
    ranks: Mapping[tuple[int, int, str], str],
    columns: Sequence[Column],
    size: Letters,
) -> list[str]:
    """The lines of a tabular with these columns.

    Parameters
    ----------
    stacked
        what stands one below another in each cell; (): each column has a number of its own.
    """
    axes = table.axes[table.shared :]
    names = [*map(last_word, axes), *([""] if stacked else [])]
    body: list[str] = []
    for row, labels in enumerate(table.rows):
        begins = table.shared and (not row or table.section(row) != table.section(row - 1))
        if row and (begins or stacked):
            body.append(r"\addlinespace")
        if begins:
            section = rf"\emph{{{escaped(table.section(row))}}}"
            body.append(rf"\multicolumn{{{len(names) + len(columns)}}}{{@{{}}l}}{{{section}}} \\")
        shown = list(map(_label, axes, labels[table.shared :]))
        for number, line in enumerate(stacked or [""]):
            words = [""] * len(shown) if number else shown
            words = [*words, *([table.lines[line].heading] if stacked else [])]
            cells = (
                _cell(table, row, column, name or line, ranks, size) for column, name in columns
            )
            stacks = (_stacked(word, size.line, "l") for word in words)
            body.append(" & ".join([*stacks, *cells]) + r" \\")
    return [
        rf"\begin{{tabular}}{{{'l' * len(names)}{'r' * len(columns)}}}",
        r"\toprule",
        *_head(table, names, columns),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _label(axis: str, label: str) -> str:
    """A method by the name it was published with, any other label as it is."""
    return STYLES[label].label if axis == "method" and label in STYLES else label


def _head(
    table: ReportTable, names: Sequence[str], columns: Sequence[tuple[int, str]]
) -> Iterator[str]:
    """The lines of the head: the labels of each column, one below the other, and its value."""
    several = len({name for _, name in columns}) > 1
    labels = [
        (
            *_labels(table, column),
            *(
                ["score" if name in SCORES else table.lines[name].heading]
                if several or table.columns == [""]
                else []
            ),
        )
        for column, name in columns
    ]
    for level in range(len(labels[0]) - 1):
        above, rules = [""] * len(names), ""
        place = len(names) + 1
        for label, group in itertools.groupby(words[: level + 1] for words in labels):
            end = place + len(list(group))
            above.append(rf"\multicolumn{{{end - place}}}{{c}}{{{escaped(label[-1])}}}")
            rules += rf"\cmidrule(lr){{{place}-{end - 1}}}"
            place = end
        yield " & ".join(above) + r" \\"
        yield rules
    lowest = (_stacked(words[-1], NARROW, "r") for words in labels)
    yield " & ".join([*map(escaped, names), *lowest]) + r" \\"


def _labels(table: ReportTable, column: int) -> tuple[str, ...]:
    """The labels of a column, one for each setting; none where values stand side by side."""
    if table.heads:
        return table.heads[column]
    return (table.columns[column],) if table.columns != [""] else ()


def _stacked(text: str, most: int, side: str) -> str:
    """A heading or a label; of a long one the words one below the other."""
    spaced = text if len(text) <= most else _spaced(text)
    words = [escaped(line) for line in textwrap.wrap(spaced, most, break_long_words=False)]
    return rf"\shortstack[{side}]{{{LINE.join(words)}}}" if len(words) > 1 else escaped(text)


def _spaced(text: str) -> str:
    """A text whose lists can break after their commas; numbers as 2,000 cannot."""
    return re.sub(r",(?=\S)(?!\d{3}\b)", ", ", text)


def _cell(
    table: ReportTable,
    row: int,
    column: int,
    name: str,
    ranks: Mapping[tuple[int, int, str], str],
    size: Letters,
) -> str:
    """What stands in a cell: a number with its letters; a score with its interval and a star."""
    cell, rank = table.cells.get((row, column)), ranks.get((row, column, name), "")
    line, value = cell.shown(name) if cell else None, table.lines[name]
    letters = line.mark if line else ""
    if cell is None or line is None or name not in SCORES:
        shown = text(table, cell, name, column).removesuffix(f" ({letters})")
        shown = _stacked(shown, size.line, "r")
        return (f"{rank}{{{shown}}}" if rank else shown) + (
            rf"\rlap{{\textsuperscript{{{letters}}}}}" if letters else ""
        )
    shown = f"{line.value:.{value.digits}f}"
    shown = f"{rank}{{{shown}}}" if rank else shown
    if line.low is not None and line.high is not None:
        up, down = (f"{abs(end - line.value):.{value.digits}f}" for end in (line.high, line.low))
        shown += rf"$^{{+{up}}}_{{-{down}}}$"
    marks = STAR * cell.differs_from_full + letters
    return shown + (rf"\rlap{{\,\scriptsize {marks}}}" if marks else "")


def _ranks(table: ReportTable, lines: Sequence[str]) -> dict[tuple[int, int, str], str]:
    """The command for the best and for the second best of each column, by row, column and line.

    Rivals are the methods of rows that are alike in all else; full attention is none, nor a method
    whose budget never applied. What prints alike ranks alike; where more than two and more than
    half of them are best none is, and so with the second best; nor is anything among times of
    several machines, nor what `_is_sure` is not.
    """
    if "method" not in table.axes:
        return {}
    rivals: dict[tuple[str, ...], list[int]] = {}
    for row, labels in enumerate(table.rows):
        named = dict(zip(table.axes, labels, strict=True))
        if named["method"] != YARDSTICK:
            others = (label for axis, label in named.items() if not axis.startswith("method"))
            rivals.setdefault(tuple(others), []).append(row)
    commands = {}
    for rows, column, name in itertools.product(rivals.values(), range(len(table.columns)), lines):
        quantity = table.lines[name]
        cells = {
            row: cell
            for row in rows
            if (cell := table.cells.get((row, column))) and cell.was_bounded
        }
        numbers = {row: _number(cell, name, quantity) for row, cell in cells.items()}
        shown = {row: value for row, value in numbers.items() if not math.isnan(value)}
        best = sorted(set(shown.values()), reverse=quantity.better != "less")[:2]
        machines_differ = quantity.is_time and len({cell.machine for cell in cells.values()}) > 1
        counts, most = Counter(shown.values()), max(2, len(shown) // 2)
        if not quantity.better or len(best) < 2 or machines_differ or counts[best[0]] > most:
            continue
        for row, value in shown.items():
            if value in best and counts[value] <= most and _is_sure(cells[row], name, quantity):
                commands[row, column, name] = (r"\textbf", r"\underline")[best.index(value)]
    return commands


def _is_sure(cell: Cell, name: str, quantity: Quantity) -> bool:
    """Whether a number may be called best: it was counted, or is of samples that rank methods."""
    line = cell.shown(name)
    sure = line is not None and ranks(line.n, line.low, line.high)
    return quantity.part == "audit" or (sure and (name not in SCORES or cell.ranks_methods))


def _number(cell: Cell, name: str, quantity: Quantity) -> float:
    """A number as exact as it is printed; NaN for none."""
    line = cell.shown(name)
    return round(quantity.scaled(line.value), quantity.digits) if line else math.nan


def _notes(table: ReportTable, ranked: bool) -> Iterator[str]:
    cells = table.cells.values()
    yield from (escaped(_spaced(note)) for note in table.notes if not note.startswith(NOT_HERE))
    if any((line := cell.lines.get("score")) and line.low is not None for cell in cells):
        yield rf"Beside a score: how far its {COVERAGE} \% interval reaches up and down."
    counts = sorted({cell.lines["samples"].n for cell in cells if "samples" in cell.lines})
    if counts:
        yield (
            f"Samples of a score: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}."
        )
    if any(cell.differs_from_full for cell in cells):
        yield (
            rf"{STAR}: differs from full attention on the same {FEWEST} samples or more (0 is not"
            rf" in the {COVERAGE} \% "
            f"interval of the paired differences; {escaped(compared(cells))})."
        )
    if ranked:
        methods = {row[table.axes.index("method")] for row in table.rows} - {YARDSTICK}
        yield (
            r"\textbf{Bold}: best, \underline{underlined}: second best of a column's"
            rf" {len(methods)} methods, full "
            f"attention aside, where it is counted or of {FEWEST} samples or more; not always by"
            " more than chance."
        )


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}
_SPECIAL |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


def escaped(word: str) -> str:
    """A word as LaTeX prints it, in one line."""
    word = " ".join(word.split())
    word = re.sub(
        r"[\\~^±<>|]|[&%$#_{}]", lambda match: _SPECIAL.get(match[0], "\\" + match[0]), word
    )
    # which \\ before it would take for its own
    return "{}" + word if word.startswith(("[", "*")) else word
