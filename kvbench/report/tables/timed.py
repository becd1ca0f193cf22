"""The tables of timed runs, a line for each length, batch and arm.

Times, memory and bytes, and where a step goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import eq
from typing import Any, NamedTuple

from kvbench.report.data.crossing import TIME, crossing
from kvbench.report.data.run import CELL, Run, TimedCell, is_shared, missing
from kvbench.report.data.select import differing_keys, labels_of, last_word, order_of
from kvbench.report.data.table import Number, Table
from kvbench.report.tables.cells import Cell, ReportTable, notes_of
from kvbench.runs.quantities import LESS, Quantity, Unit, named

# What they show in place of a score, by table; the parts of a step stand in the last.
TIMED = {
    "latency": (
        "time",
        ("ttft_s", "index_share", "tt2t_s", "tpot_ms_p50", "tpot_ms_p95", "floor_ms")
        + ("floor_ratio", "busy_ms", "python_ms", "n"),
    ),
    "latency_bytes": (
        "memory and bytes",
        ("memory_bytes", "prefill_memory_bytes", "weight_bytes", "whole_kv_bytes")
        + ("must_read_bytes", "read_bytes_per_step", "moved_bytes_per_step"),
    ),
    "latency_parts": (
        "where a step goes",
        ("tpot_ms_mean", "floor_ms", "python_ms", "breakdown_ms"),
    ),
}
# A method against full attention at several lengths.
AGAINST_FULL = {
    "faster_from": Quantity("faster_from", "", "faster than full from", Unit("tokens"), 0, LESS),
    "time_over_full": Quantity("time_over_full", "", "time / full's at the longest", better=LESS),
    "ttft_over_full": Quantity("ttft_over_full", "", "TTFT / full's at the longest", better=LESS),
}
AXES = ("model", "task.keys", "task.prefill", "method", "budget")
MACHINE = "device_name"  # an axis where there are several: no line has times of two

REPEATS_NOTE = (
    "Times are medians of repeats, with the least and the largest; samples says how many there are."
)
NO_REPEATS_NOTE = "One sample a line: task.repeats=N takes N, whose times can be seen to differ."
FASTER = "from which length a method is faster than full attention"
FASTER_NOTE = (
    "Faster than full from: between two lengths interpolated, both axes logarithmic; the shortest"
    " length where a method was faster at all of them; - where it was slower at the longest."
)
# What a number or a setting means, by its name.
NOTES = {
    "python_ms": (
        "Python: the part of a step in which the device has nothing to do, another on another"
        " machine and day; the rest, in which it is busy, is what a method asks of the device."
    ),
    "keys=synthetic_attention": (
        "keys=synthetic_attention: synthetic keys and queries (kvbench/measure/synthetic.py), as"
        " random weights give none that an index could find."
    ),
    "prefill=false": (
        "prefill=false: stores were filled and nothing read by the model: no first token to time."
    ),
}


class _Row(NamedTuple):
    """What an arm has at one length and batch.

    Attributes
    ----------
    run
        of the arm.
    place
        its prompts and machine.
    labels
        of the arm.
    line
        its numbers, as a line of `Runs.arms`.
    """

    run: Run
    place: TimedCell
    labels: tuple[str, ...]
    line: Mapping[str, Any]


def timed_tables(table: Table, chosen: Sequence[Run], number: str, what: str) -> list[ReportTable]:
    """The tables of `TIMED` of these timed runs.

    Parameters
    ----------
    number
        ends the tables' ids.
    what
        the protocol that these are of; "" where there is one.
    """
    axes, same = _axes(chosen)
    timed = _rows(chosen, axes)
    rows = [(str(row.place.tokens), str(row.place.batch), *row.labels) for row in timed]
    head = ("tokens", "batch", *("machine" if key == MACHINE else last_word(key) for key in axes))
    shared = (f"{last_word(key)}={label}" for key, label in same.items())
    title = ", ".join(filter(None, ["latency", *shared, what]))
    tables = []
    for id, (subject, value_names) in TIMED.items():
        shown = _quantities(timed, value_names)
        cells = {
            (index, 0): Cell.of(table, [row.run], list(shown), str(row.place))
            for index, row in enumerate(timed)
        }
        notes = _notes(timed, cells.values())
        made = ReportTable(
            f"{id}{number}", f"{title}: {subject}", head, rows, [""], cells, shown, notes
        )
        tables.append(made.noted([*axes, *same, *CELL]))
    if against := _against_full(table, timed, axes):
        cells = {(index, 0): cell for index, cell in enumerate(against.values())}
        notes = [*notes_of(cells.values(), {}), FASTER_NOTE]
        id, words = f"latency_breakeven{number}", f"{title}: {FASTER}"
        labels = list(against)
        tables.append(ReportTable(id, words, head[1:], labels, [""], cells, AGAINST_FULL, notes))
    return tables


def _rows(chosen: Sequence[Run], axes: Sequence[str]) -> list[_Row]:
    """The arms at each length and batch, by these and by their labels."""
    rows = [
        _Row(
            run,
            cell,
            tuple(cell.machine if key == MACHINE else run.label(key) for key in axes),
            line,
        )
        for run in chosen
        for cell, line in run.cells.items()
    ]
    return sorted(rows, key=lambda row: (*row.place[:2], list(map(order_of, row.labels))))


def _quantities(rows: Sequence[_Row], names: Sequence[str]) -> dict[str, Quantity]:
    """The quantities of these names, with narrow headings.

    "breakdown_ms" stands for the parts of a step in which any of the arms spent time.
    """
    parts = [
        name
        for name in rows[0].run.arm
        if name.startswith("breakdown_ms.")
        and any(not missing(row.line.get(name)) and row.line[name] for row in rows)
    ]
    every = [part for name in names for part in (parts if name == "breakdown_ms" else [name])]
    return {name: named(name)._replace(label=named(name).narrow_heading) for name in every}


def _against_full(
    table: Table, rows: Sequence[_Row], axes: Sequence[str]
) -> dict[tuple[str, ...], Cell]:
    """What `AGAINST_FULL` says of each arm, as full attention was timed beside it.

    Both were timed at several lengths. Of several runs of full attention the one with the most
    settings in common counts.
    """
    # the batch, and the labels that two arms must have in common
    shared = [True, *(key == MACHINE or (is_shared(key) and key not in CELL) for key in axes)]
    arms: dict[tuple[str, ...], dict[int, _Row]] = {}
    for row in rows:
        if not missing(row.line[TIME.name]):
            labels = (str(row.place.batch), *row.labels)
            arms.setdefault(labels, {})[row.place.tokens] = row
    cells = {}
    for labels, arm in arms.items():
        fulls = {
            other: by_tokens
            for other, by_tokens in arms.items()
            if next(iter(by_tokens.values())).run.is_full
            and all(map(eq, compress(labels, shared), compress(other, shared)))
        }
        nearest = max(fulls, key=lambda other: sum(map(eq, other, labels)), default=())
        common = sorted(arm.keys() & fulls.get(nearest, {}).keys())
        if labels not in fulls and len(common) > 1:
            start = crossing(_times(arm), _times(fulls[nearest]))
            cells[labels] = _over(table, arm[common[-1]], fulls[nearest][common[-1]], start)
    return cells


def _over(table: Table, row: _Row, full: _Row, start: float | None) -> Cell:
    """An arm's times over full attention's at one length, and from which length it is faster."""
    lines = {}
    for name, over in ((TIME.name, "time_over_full"), ("ttft_s", "ttft_over_full")):
        mine, theirs = (table.number(at.run.index, name, str(at.place)) for at in (row, full))
        if mine is not None and theirs is not None:
            marks = "".join(sorted({*mine.mark, *theirs.mark}))
            lines[over] = Number(mine.value / theirs.value, n=mine.n, mark=marks)
    if start:
        lines["faster_from"] = Number(start, mark=lines["time_over_full"].mark)
    return Cell(lines, row.run)


def _times(arm: Mapping[int, _Row]) -> dict[int, float]:
    return {tokens: row.line[TIME.name] for tokens, row in arm.items()}


def _axes(chosen: Sequence[Run]) -> tuple[list[str], dict[str, str]]:
    """The settings that label an arm, and those of `AXES` that all arms share with their label."""
    rivals: dict[tuple[Any, ...], list[Run]] = {}
    for run in chosen:
        for cell in run.cells:
            rivals.setdefault((*cell, *map(run.label, AXES)), []).append(run)
    several = len({cell.machine for run in chosen for cell in run.cells}) > 1
    labels = {key: labels_of(chosen, key) for key in AXES[:3]}
    same = {key: values[0] for key, values in labels.items() if len(values) == 1}
    axes = [key for key in (*AXES, *differing_keys(rivals.values())) if key not in same]
    axes += [MACHINE] if several else []
    if same.get("task.prefill") == "true":
        del same["task.prefill"]  # as everywhere
    return axes, same


def _notes(rows: Sequence[_Row], cells: Collection[Cell]) -> list[str]:
    """How these numbers came about."""
    shown = {name for cell in cells for name in cell.numbers}
    notes = [REPEATS_NOTE] if any(name.endswith("_low") for name in shown) else []
    notes += [NO_REPEATS_NOTE] if all(cell.numbers.get("n") == 1 for cell in cells) else []
    if "floor_ms" in shown:
        notes.append(
            "Floor: bytes of weights and of keys and values attended, over the bandwidth of a copy"
            f" ({_bandwidths(rows)}). Times are of that machine."
        )
    there = shown | {f"keys={row.run.label('task.keys')}" for row in rows}
    there |= {f"prefill={row.run.label('task.prefill')}" for row in rows}
    return notes + [note for name, note in NOTES.items() if name in there]


def _bandwidths(rows: Iterable[_Row]) -> str:
    """The least and the largest bandwidth of each machine, or the one that both are."""
    rates: dict[str, list[float]] = {}
    for line in (row.line for row in rows if not missing(row.line["copy_bandwidth"])):
        rates.setdefault(str(line["device_name"]), []).append(line["copy_bandwidth"] / 1e9)
    words = []
    for name, values in rates.items():
        ends = dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values)))
        words.append(f"{name}: {' to '.join(ends)} GB / s")
    return "; ".join(words)
