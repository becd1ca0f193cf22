"""A table as LaTeX prints it, ready for a paper: booktabs, and no other package.

A row is a method (or whatever the rows are), a score stands in one cell with its interval, the best of a column is bold
and the second best underlined. What else a score comes with stands in the notes below.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvbench.report.data.run import YARDSTICK
from kvbench.report.data.select import last_word
from kvbench.report.data.stats import COVERAGE, FEWEST, ranks
from kvbench.report.data.style import STYLES
from kvbench.report.tables.cells import Cell, Table, beyond_noise, compared, ranks_methods, was_bounded
from kvbench.report.tables.formats import NONE, text
from kvbench.runs.quantities import Quantity

SIZES = {"": 88, r"\small": 97, r"\footnotesize": 110}  # of letters, and how many of them LaTeX's text width has
Column = tuple[int, str]  # of a table, and the number that it shows
IN_CELL = {"interval", "against_full", "brief_against_full", "samples"}  # of a score: in its cell and in the notes
SCORES = {"score", "brief_score"}
LINE = r"\\"  # ends one
STAR = r"$\ast$"
NOT_HERE = ("*: ", "Against full: ")  # how notes begin for which there are others here
NARROW = 14  # characters of a heading on one line


def latex(tables: Sequence[Table]) -> str:
    """Tables for LaTeX with \\usepackage{booktabs}; columns for which a page has no room stand in a tabular below."""
    return "\n".join(map(_latex, tables))


def _latex(table: Table) -> str:
    lines = [name for name in table.lines if name not in IN_CELL and _is_shown(table, name)] or [*table.lines][:1]
    stacked = "published" in table.lines  # published numbers stand below ours, all others side by side
    columns = [(column, name) for column in range(len(table.columns)) for name in ([""] if stacked else lines)]
    ranks = {} if stacked else _ranks(table, lines)
    size, tabulars = _fitting(columns, lambda own: _tabular(table, own, lines if stacked else [], ranks))
    notes = " ".join(_notes(table, bool(ranks)))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering" + size,
            rf"\caption{{{escaped(table.title)}}}",
            rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', table.id.lower())}}}",
            "\n\\par\\medskip\n".join(map("\n".join, tabulars)),
            *([rf"{{\par\smallskip\footnotesize\raggedright {notes}\par}}"] if notes else []),
            r"\end{table}",
            "",
        ]
    )


def _fitting(columns: Sequence[Column], made: Callable[[Sequence[Column]], list[str]]) -> tuple[str, list[list[str]]]:
    """The largest letters in which these columns fit a page, and their tabular; of the smallest as many as it takes."""

    def fits(own: Sequence[Column], room: int) -> bool:
        return max(map(_printed, made(own))) <= room

    for size, room in SIZES.items():
        if fits(columns, room):
            return size, [made(columns)]
    groups = [list(own) for _, own in itertools.groupby(columns, key=lambda one: one[0])]
    parts = [part for own in groups for part in ([own] if fits(own, room) else [[one] for one in own])]
    blocks: list[list[Column]] = []
    for part in parts:
        if blocks and fits([*blocks[-1], *part], room):
            blocks[-1] += part
        else:
            blocks.append(part)
    return size, list(map(made, blocks))


def _tabular(
    table: Table, columns: Sequence[Column], stacked: Sequence[str], ranks: Mapping[tuple[int, int, str], str]
) -> list[str]:
    """The lines of a tabular with these columns.

    Args:
        stacked: what stands one below another in each cell; (): each column has a number of its own.
    """
    names = [*(last_word(axis) for axis in table.axes[table.shared :]), *([""] if stacked else [])]
    body: list[str] = []
    for row, labels in enumerate(table.rows):
        begins = table.shared and (not row or table.section(row) != table.section(row - 1))
        if row and (begins or stacked):
            body.append(r"\addlinespace")
        if begins:
            section = rf"\emph{{{escaped(table.section(row))}}}"
            body.append(rf"\multicolumn{{{len(names) + len(columns)}}}{{@{{}}l}}{{{section}}} \\")
        own = [_label(axis, label) for axis, label in zip(table.axes, labels, strict=True)][table.shared :]
        for number, line in enumerate(stacked or [""]):
            shown = [*([""] * len(own) if number else own), *([table.lines[line].heading] if stacked else [])]
            cells = [_cell(table, row, column, name or line, ranks) for column, name in columns]
            body.append(" & ".join([*map(escaped, shown), *cells]) + r" \\")
    return [
        rf"\begin{{tabular}}{{{'l' * len(names)}{'r' * len(columns)}}}",
        r"\toprule",
        *_head(table, names, columns),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _is_shown(table: Table, name: str) -> bool:
    """Whether any cell has this number."""
    return any(text(table, cell, name, column) != NONE for (_, column), cell in table.cells.items())


def _printed(line: str) -> int:
    """About how many characters of a line are printed; sub- and superscripts are small and stand above each other."""
    line = re.sub(r"\$\^\{.(.*?)\}_.*?\$", lambda found: "n" * len(found[1]), line)
    return len(re.sub(r"\\shortstack|\\multicolumn\{\d+\}\{.*?\}|\\[a-z]+|\(lr\)|[\\{}$^]", "", line))


def _label(axis: str, label: str) -> str:
    """A method by the name it was published with, any other label as it is."""
    return STYLES[label].label if axis == "method" and label in STYLES else label


def _head(table: Table, names: Sequence[str], columns: Sequence[tuple[int, str]]) -> Iterator[str]:
    """The lines of the head: the labels of each column, one below the other, and what stands in it."""
    several = len({name for _, name in columns}) > 1
    labels = [
        (*_labels(table, column), *([_heading(table, name)] if several or table.columns == [""] else []))
        for column, name in columns
    ]
    for level in range(len(labels[0]) - 1):
        above, rules, place = [""] * len(names), "", len(names) + 1
        for label, alike in itertools.groupby(own[: level + 1] for own in labels):
            end = place + len(list(alike))
            above.append(rf"\multicolumn{{{end - place}}}{{c}}{{{escaped(label[-1])}}}")
            rules += rf"\cmidrule(lr){{{place}-{end - 1}}}"
            place = end
        yield " & ".join(above) + r" \\"
        yield rules
    yield " & ".join([*map(escaped, names), *(_stacked(own[-1]) for own in labels)]) + r" \\"


def _labels(table: Table, column: int) -> tuple[str, ...]:
    """The labels of a column, one for each of its settings; none where the values stand side by side."""
    if table.heads:
        return table.heads[column]
    return (table.columns[column],) if table.columns != [""] else ()


def _heading(table: Table, name: str) -> str:
    return "score" if name in SCORES else table.lines[name].heading


def _stacked(heading: str) -> str:
    """A heading over a column; of a long one the words one below the other."""
    words = [escaped(line) for line in textwrap.wrap(heading, NARROW, break_long_words=False)]
    return rf"\shortstack[r]{{{LINE.join(words)}}}" if len(words) > 1 else escaped(heading)


def _cell(table: Table, row: int, column: int, name: str, ranks: Mapping[tuple[int, int, str], str]) -> str:
    """What stands in a cell: a number with its letters, a score with its interval and a star, too."""
    cell, rank = table.cells.get((row, column)), ranks.get((row, column, name), "")
    letters = cell.marks.get("score" if name in SCORES else name, "") if cell else ""
    if cell is None or name not in SCORES or "score" not in cell.numbers:
        shown = text(table, cell, name, column).removesuffix(f" ({letters})")
        return _ranked(shown, rank) + (rf"\rlap{{\textsuperscript{{{letters}}}}}" if letters else "")
    mean, digits = cell.numbers["score"], table.lines[name].digits
    shown = _ranked(f"{mean:.{digits}f}", rank)
    if "score_low" in cell.numbers:
        up, down = (f"{abs(cell.numbers[end] - mean):.{digits}f}" for end in ("score_high", "score_low"))
        shown += rf"$^{{+{up}}}_{{-{down}}}$"
    marks = STAR * beyond_noise(cell) + letters
    return shown + (rf"\rlap{{\,\scriptsize {marks}}}" if marks else "")


def _ranked(shown: str, rank: str) -> str:
    return f"{rank}{{{escaped(shown)}}}" if rank else escaped(shown)


def _ranks(table: Table, lines: Sequence[str]) -> dict[tuple[int, int, str], str]:
    """The command for the best and for the second best of each column, by row, column and line.

    Rivals are the methods of rows that are alike in all else; full attention is none, nor a method whose budget never
    applied. What prints alike ranks alike; where more than two and more than half of them are best none is, and so with
    the second best; nor is anything among times of several machines, nor what `_is_sure` is not.
    """
    if "method" not in table.axes:
        return {}
    rivals: dict[tuple[str, ...], list[int]] = {}
    for row, labels in enumerate(table.rows):
        named = dict(zip(table.axes, labels, strict=True))
        if named["method"] != YARDSTICK:
            others = (label for axis, label in named.items() if not axis.startswith("method"))
            rivals.setdefault(tuple(others), []).append(row)
    found = {}
    for rows, column, name in itertools.product(rivals.values(), range(len(table.columns)), lines):
        quantity = table.lines[name]
        cells = {row: cell for row in rows if (cell := table.cells.get((row, column))) and was_bounded(cell)}
        numbers = {row: _number(cell, name, quantity.digits) for row, cell in cells.items()}
        shown = {row: value for row, value in numbers.items() if not math.isnan(value)}
        best = sorted(set(shown.values()), reverse=quantity.better != "less")[:2]
        apart = quantity.is_time and len({cell.machine for cell in cells.values()}) > 1
        counts, most = Counter(shown.values()), max(2, len(shown) // 2)
        if not quantity.better or len(best) < 2 or apart or counts[best[0]] > most:
            continue
        for row, value in shown.items():
            if value in best and counts[value] <= most and _is_sure(cells[row], name, quantity):
                found[row, column, name] = (r"\textbf", r"\underline")[best.index(value)]
    return found


def _is_sure(cell: Cell, name: str, quantity: Quantity) -> bool:
    """Whether a number may be called best: it was counted, or is of samples that rank methods."""
    name = "score" if name in SCORES else name
    own = "samples" if name == "score" else f"{name}_samples"
    n = cell.numbers.get(own, cell.numbers.get("samples", 0))
    ends = (cell.numbers.get(f"{name}_{end}") for end in ("low", "high"))
    return quantity.part == "audit" or (ranks(n, *ends) and (name != "score" or ranks_methods(cell)))


def _number(cell: Cell | None, name: str, digits: int) -> float:
    """A number as exact as it is printed; NaN for none."""
    name = "score" if name in SCORES else name
    return round(cell.numbers[name], digits) if cell and name in cell.numbers else math.nan


def _notes(table: Table, ranked: bool) -> Iterator[str]:
    cells = table.cells.values()
    yield from (escaped(note) for note in table.notes if not note.startswith(NOT_HERE))
    if any("score_low" in cell.numbers for cell in cells):
        yield rf"Beside a score: how far its {COVERAGE} \% interval reaches up and down."
    counts = sorted({int(cell.numbers["samples"]) for cell in cells if "samples" in cell.numbers})
    if counts:
        yield f"Samples of a score: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}."
    if any(map(beyond_noise, cells)):
        yield (
            rf"{STAR}: differs from full attention on the same {FEWEST} samples or more (0 is not in the {COVERAGE} \% "
            f"interval of the paired differences; {escaped(compared(cells))})."
        )
    if ranked:
        methods = {row[table.axes.index("method")] for row in table.rows} - {YARDSTICK}
        yield (
            rf"\textbf{{Bold}}: best, \underline{{underlined}}: second best of a column's {len(methods)} methods, full "
            f"attention aside, where it is counted or of {FEWEST} samples or more; not always by more than chance."
        )


_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_SPECIAL |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}


def escaped(word: str) -> str:
    """A word as LaTeX prints it, in one line."""
    word = " ".join(word.split())
    word = re.sub(r"[\\~^±<>|]|[&%$#_{}]", lambda found: _SPECIAL.get(found[0], "\\" + found[0]), word)
    return "{}" + word if word.startswith(("[", "*")) else word  # which \\ before it would take for its own
