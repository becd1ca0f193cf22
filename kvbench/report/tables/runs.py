"""Tables of runs: everything found, by group, and any selection of rows, columns and numbers.

A table is made of cells with numbers, and knows nothing of how it is printed
(`kvbench.report.tables.formats`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvbench.report.data.marks import NO_TIMES
from kvbench.report.data.run import Run, Runs, missing
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.select import (
    PROTOCOL_KEYS,
    by_labels,
    by_protocol,
    differing_keys,
    key_of,
    labels_of,
    last_word,
    marks_of_decoding,
    marks_of_mixed,
    order_of,
    refuse_several,
    select,
    values_of,
)
from kvbench.report.data.table import DERIVED, Table, quantity_of
from kvbench.report.tables.cells import (
    BRIEF_SCORE,
    PARTS,
    SAME_TOP,
    WHOLE_SCORE,
    Cell,
    Place,
    ReportTable,
)
from kvbench.report.tables.timed import timed_tables
from kvbench.runs.quantities import LESS, PASSED, Quantity

SEVERAL = tuple(PASSED)[1:]  # of one answer it is the score
COSTS = ("device_kv_bytes", "moved_bytes_per_step", "ttft_s", "tpot_ms_mean", "recall")
NEARNESS = ("kl_mean", "kl_p99", "perplexity_ratio", "delta_p_rms")  # of `task=fidelity`
SUMMARY = (
    "score",
    *SEVERAL,
    *NEARNESS,
    "kl_p50",
    "perplexity",
    *COSTS,
    "new_tokens",
    "new_tokens_median",
    "looped",
)
# The most important first: what has no room on a console is left out from the end.
OVERVIEW = (
    *("score", *SEVERAL, "kl_mean", "attended_share", "device_kv_bytes", "tpot_ms_mean", "recall"),
    *("moved_bytes_per_step", "ttft_s", "new_tokens", "new_tokens_median"),
)
# of task=fidelity alone
OF_NEAR = ("score", *NEARNESS, "device_kv_bytes", "kl_p50", "attended_share", "tpot_ms_mean")

# A row's labels, a column's, and the groups that the cell there is of: () for the whole run.
Where = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def overview(runs: Runs, where: Sequence[str] = ()) -> list[ReportTable]:
    """One table for all runs but timed ones, by model and task.

    There is a row for each method and budget. Where all runs are timed, their own tables.

    Raises
    ------
    ConfigError
        as `select`.
    """
    selected = select(runs, where)
    untimed = [run for run in selected if not run.is_timed]
    if not untimed:
        return summary(runs, where)
    table = Table(*over_seeds(runs, untimed))
    chosen = [*table.arms.values()]
    shared = ["model", "task", *(key for key in PROTOCOL_KEYS if len(labels_of(chosen, key)) > 1)]
    axes = axes_for(chosen, [*shared, "method", "budget"])
    near = sum(not missing(run.arm["kl_p50"]) for run in chosen)
    score, values = (SAME_TOP, OF_NEAR) if near == len(chosen) else (BRIEF_SCORE, OVERVIEW)
    names, title = with_method_time(values, chosen), f"{len(untimed)} runs"
    made = table_of(
        table, chosen, axes, [], names, "overview", title, {}, score, shared=len(shared)
    )
    if timed := len(selected) - len(untimed):
        made.notes.append(f"{timed} timed runs have tables of their own: --where task=latency.")
    if 0 < near < len(chosen):
        made.notes.append("Perplexity, delta p and percentiles of KL: --where task=fidelity.")
    return [made]


def summary(
    runs: Runs, where: Sequence[str] = (), values: Sequence[str] = SUMMARY
) -> list[ReportTable]:
    """A line for each model, task, method and budget, and for what else differs.

    There is a table for each protocol. Timed runs follow in tables of their own.

    Parameters
    ----------
    values
        names of `kvbench.runs.quantities.NUMBERS`, of runs that are not timed.

    Raises
    ------
    ConfigError
        as `select`.
    """
    table = Table.of(runs, where)
    untimed = by_protocol(run for run in table.arms.values() if not run.is_timed)
    timed = by_protocol(run for run in table.arms.values() if run.is_timed)
    tables = []
    for number, (chosen, what) in enumerate(untimed, 1):
        axes = axes_for(chosen, ["model", "task", "method", "budget"])
        id, title = (f"summary{number}", f"Runs with {what}") if what else ("summary", "All runs")
        names = with_method_time(values, chosen)
        tables.append(table_of(table, chosen, axes, [], names, id, title, {}))
    for number, (chosen, what) in enumerate(timed, 1):
        tables += timed_tables(table, chosen, str(number) if what else "", what)
    return tables


def by_group(runs: Runs, where: Sequence[str] = ()) -> list[ReportTable]:
    """The scores of each group of samples (subset, length).

    There is a table for each task that has some, and each protocol.

    Raises
    ------
    ConfigError
        as `select`.
    """
    table = Table.of(runs, where)
    tables = []
    for task in dict.fromkeys(run.arm["task"] for run in runs):
        untimed = (run for run in table.arms.values() if not run.is_timed)
        task_runs = [run for run in untimed if run.arm["task"] == task]
        for number, (chosen, what) in enumerate(by_protocol(task_runs), 1):
            if len({group for run in chosen for group in run.scores.groups}) > 1:
                axes = axes_for(chosen, ["model", "method", "budget"])
                title = f"{task} by group" + (f", with {what}" if what else "")
                id = f"{task}{number if what else ''}"
                tables.append(table_of(table, chosen, axes, ["group"], ["score"], id, title, {}))
    return tables


def with_method_time(values: Sequence[str], chosen: Iterable[Run]) -> list[str]:
    """These values; after the time of a token the method's own, if any decoded together."""
    any_joint = any(run.shares_decode for run in chosen)
    with_own: list[str] = []
    for name in values:
        with_own += [name, "own_ms"] if any_joint and name.startswith("tpot_ms") else [name]
    return list(dict.fromkeys(with_own))


def axes_for(chosen: Sequence[Run], axes: list[str]) -> list[str]:
    """These axes, and the settings by which no two runs share a cell."""
    return [*axes, *differing_keys(by_labels(chosen, axes).values())]


def pivot(
    runs: Runs,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[str],
    where: Sequence[str] = (),
    allow_mixed: bool = False,
    score_lines: dict[str, Quantity] = WHOLE_SCORE,
    best_first: bool = False,
) -> ReportTable:
    """Any selection: runs, or their groups, by some of their settings.

    Parameters
    ----------
    rows, columns
        settings such as "method", "budget", "task.lengths" or "page_size", and "group". Without
        columns the values stand side by side. Runs that differ in their seed alone are one, unless
        "seed" is among these.
    values
        names of `kvbench.runs.quantities.NUMBERS`, "fidelity" for all of its own, names of
        `kvbench.report.tables.cells.PARTS`, parts of a step such as "breakdown_ms.select", and
        numbers of a method's own such as "audit.candidates"; of the last two what follows the dot
        is enough.
    where
        as `select` takes them; rows and columns stand in the order in which values are written
        there.
    allow_mixed
        runs of several protocols may stand together, marked.
    score_lines
        what a score is shown by.
    best_first
        rows stand by the first value in the first column, the best first, in place of their labels'
        order.

    Raises
    ------
    ConfigError
        no such key or value; several runs in one cell of the table, which says in what they differ;
        several protocols.
    """
    chosen = select(runs, where)
    down, across = ([key_of(runs, name) for name in names] for names in (rows, columns))
    by_seed = "seed" in (*down, *across)
    table = Table(runs, chosen) if by_seed else Table(*over_seeds(runs, chosen))
    chosen = [*table.arms.values()]
    meant = {word: [word] if word in PARTS else values_of(runs, word) for word in values}
    names = [name for value_names in meant.values() for name in value_names]
    mixed = marks_of_mixed(chosen, [*down, *across], allow_mixed)
    if "decode" in axes_for(chosen, [*down, *across])[len(down) + len(across) :]:
        # what decoded together and what decoded alone are two runs, and both are shown
        down.append("decode")
    for labels, cell_runs in by_labels(chosen, [*down, *across]).items():
        refuse_several(cell_runs, ", ".join(labels), "add it to --rows or --columns, or ")
    title = _title(chosen, meant, [*down, *across])
    order = [label for word in where for label in word.partition("=")[2].split(",")]
    made = table_of(table, chosen, down, across, names, "table", title, mixed, score_lines, order)
    return _best_first(made) if best_first else made


def _line(name: str) -> Quantity:
    """The quantity of a value."""
    return PARTS.get(name) or quantity_of(name)


def _best_first(table: ReportTable) -> ReportTable:
    """The same table, its rows by the first value in the first column.

    Last come those without one, and those whose budget never applied.
    """
    first = next(iter(table.lines))
    sign = 1 if table.lines[first].better == LESS else -1

    def place(row: int) -> float:
        cell = table.cells.get((row, 0))
        line = cell.shown(first) if cell and cell.was_bounded else None
        return sign * line.value if line else math.inf

    return table.only(sorted(range(len(table.rows)), key=place))


def _title(chosen: Sequence[Run], meant: Mapping[str, Sequence[str]], axes: Sequence[str]) -> str:
    """What a selection shows: the numbers, their settings, and the one task and model of all.

    Parameters
    ----------
    meant
        the quantities that each word means.
    """
    titles = [_line(names[0]).title if len(names) == 1 else word for word, names in meant.items()]
    what, by = (
        " and ".join(map(str, filter(None, [", ".join(words[:-1]), words[-1]])))
        for words in (titles, [last_word(key) for key in axes])
    )
    shared = [
        label for key in ("task", "model") if key not in axes for label in labels_of(chosen, key)
    ]
    of = f" ({', '.join(shared)})" if 0 < len(shared) <= 2 else ""
    return f"{what[:1].upper()}{what[1:]} by {by}{of}"


def table_of(
    table: Table,
    chosen: Sequence[Run],
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[str],
    id: str,
    title: str,
    mixed: Mapping[Run, str],
    score_lines: dict[str, Quantity] = WHOLE_SCORE,
    label_order: Sequence[str] = (),
    shared: int = 0,
) -> ReportTable:
    """The table of these runs, of which at most one without probes and one with them share a cell.

    Parameters
    ----------
    score_lines
        what a score is shown by.
    label_order
        labels in the order in which they were asked for; others follow.
    """
    decoding_marks = marks_of_decoding(chosen, [*rows, *columns])
    marks = {run: mixed.get(run, "") + decoding_marks.get(run, "") for run in chosen}
    by_cell = _runs_of_cells(chosen, rows, columns)
    order = _order(by_cell, label_order)
    down = sorted({row for row, *_ in by_cell}, key=order)
    across = sorted({column for _, column, _ in by_cell}, key=order)
    cells: dict[Place, Cell] = {
        (down.index(row), across.index(column)): Cell.of(
            table, some, values, " + ".join(groups), marks
        )
        for (row, column, groups), some in by_cell.items()
    }
    lines = _lines(values, score_lines, cells.values())
    times = [name for name, line in lines.items() if line.is_time]
    untimed = times and not decoding_marks and any(run.shares_decode for run in chosen)
    made = ReportTable(
        id=id,
        title=title,
        axes=tuple(rows),
        rows=down,
        columns=list(map(", ".join, across)),
        cells=cells,
        lines=lines,
        notes=[],
        heads=tuple(across) if len(columns) > 1 else (),
        shared=shared,
    )
    return made.noted([*rows, *columns], times, [NO_TIMES] if untimed else [])


def _lines(
    values: Sequence[str], of_score: dict[str, Quantity], cells: Collection[Cell]
) -> dict[str, Quantity]:
    """The quantities of these values; of a score those that it is shown by, and any seeds."""
    if any("seeds" in cell.lines for cell in cells):
        of_score = {**of_score, "seeds": DERIVED["seeds"]}
    lines: dict[str, Quantity] = {}
    for name in values:
        lines |= of_score if name == "score" else {name: _line(name)}
    return lines


def _order(
    cells: Iterable[Where], label_order: Sequence[str]
) -> Callable[[tuple[str, ...]], list[Any]]:
    """The order of rows and columns: groups as they appear, labels as they were asked for.

    Other labels follow by what they are.
    """
    groups = dict.fromkeys(group for *_, groups in cells for group in groups)
    appeared = {group: index for index, group in enumerate(groups)}
    places = {label: place for place, label in enumerate(label_order)}

    def order(labels: tuple[str, ...]) -> list[Any]:
        return [
            (appeared.get(label, -1), places.get(label, len(places)), order_of(label))
            for label in labels
        ]

    return order


def _runs_of_cells(
    chosen: Sequence[Run], rows: Sequence[str], columns: Sequence[str]
) -> dict[Where, list[Run]]:
    """The runs of each cell, in the order in which they and their groups appear.

    A method that has no budget stands in the column of each budget, if its row names the method.
    """
    runs_by_cell: dict[Where, list[Run]] = {}
    for run in chosen:
        for group in dict.fromkeys(run.scores.groups) if "group" in (*rows, *columns) else [None]:
            labels = {key: run.label(key) for key in (*rows, *columns) if key != "group"}
            labels |= {} if group is None else {"group": group}
            place = tuple(labels[key] for key in rows), tuple(labels[key] for key in columns)
            runs_by_cell.setdefault((*place, () if group is None else (group,)), []).append(run)
    if "budget" not in columns or "method" not in rows:
        return runs_by_cell
    budget = columns.index("budget")
    # the columns that differ in the budget alone
    targets: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for column in dict.fromkeys(column for _, column, _ in runs_by_cell if column[budget] != "-"):
        targets.setdefault((*column[:budget], *column[budget + 1 :]), []).append(column)
    spread: dict[Where, list[Run]] = {}
    for (row, column, groups), cell_runs in runs_by_cell.items():
        others = (*column[:budget], *column[budget + 1 :])
        every = targets.get(others, [column]) if column[budget] == "-" else [column]
        spread |= {(row, target, groups): cell_runs for target in every}
    return spread
