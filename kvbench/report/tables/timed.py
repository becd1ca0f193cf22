"""The tables of timed runs: times, memory and bytes, and where a step goes, a line for each length,
batch and arm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import eq
from typing import Any, NamedTuple

from kvbench.report.data.crossing import TIME, crossing
from kvbench.report.data.marks import budget_marks, time_marks, transfer_marks
from kvbench.report.data.run import CELL, Run, TimedCell, is_shared, missing
from kvbench.report.data.select import differing_keys, labels_of, last_word, order_of
from kvbench.report.tables.cells import Cell, ReportTable, captions, ends, notes_of, settings_of
from kvbench.runs.quantities import LESS, Quantity, Unit, named

# What they show in place of a score, by table; the parts of a step stand in the last.
TIMED = {
    "latency": (
        "time",
        (
            "ttft_s",
            "index_share",
            "tt2t_s",
            "tpot_ms_p50",
            "tpot_ms_p95",
            "floor_ms",
            "floor_ratio",
            "busy_ms",
        )
        + ("python_ms", "n"),
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
# Times with the transfers of a step in them; a mark says if those went to no device.
TRANSFERRED = {"tpot_ms_p50", "tpot_ms_mean", "breakdown_ms.transfer"}
AXES = ("model", "task.keys", "task.prefill", "method", "budget")
MACHINE = "device_name"  # an axis where there are several: no line has times of two

REPEATS_NOTE = (
    "Times are medians of repeats, with the least and the largest; samples says how many there are."
)
NO_REPEATS_NOTE = "One sample a line: task.repeats=N takes N, whose times can be seen to differ."
FASTER_NOTE = (
    "Faster than full from: between two lengths interpolated, both axes logarithmic; the shortest"
    " length where a method was faster at all of them; - where it was slower at the longest."
)
# what an arm has at one length and batch, by name, as a line of `Runs.arms`
Line = Mapping[str, Any]
Cells = Mapping[TimedCell, Line]


class _Row(NamedTuple):
    """What an arm has at one length and batch.

    Attributes
    ----------
    run
        of the arm.
    tokens, batch
        of its prompts.
    labels
        of the arm.
    line
        its numbers.
    """

    run: Run
    tokens: int
    batch: int
    labels: tuple[str, ...]
    line: Line


def timed_tables(chosen: Sequence[Run], number: str, what: str) -> list[ReportTable]:
    """The tables of `TIMED` of these timed runs.

    Parameters
    ----------
    number
        ends the tables' ids.
    what
        the protocol that these are of; "" where there is one.
    """
    cells_of = {run: run.cells() for run in chosen}
    axes, same = _axes(cells_of)
    timed = [
        _Row(
            run,
            *cell[:2],
            tuple(cell.machine if key == MACHINE else run.label(key) for key in axes),
            line,
        )
        for run, cells in cells_of.items()
        for cell, line in cells.items()
    ]
    timed.sort(key=lambda row: (row.tokens, row.batch, [order_of(label) for label in row.labels]))
    rows = [(str(row.tokens), str(row.batch), *row.labels) for row in timed]
    head = ("tokens", "batch", *("machine" if key == MACHINE else last_word(key) for key in axes))
    title = ", ".join(
        filter(
            None, ["latency", *(f"{last_word(key)}={label}" for key, label in same.items()), what]
        )
    )
    tables = []
    for id, (subject, value_names) in TIMED.items():
        names = [
            name
            for word in value_names
            for name in (_parts_of_step(timed) if word == "breakdown_ms" else [word])
        ]
        shown = {name: named(name)._replace(label=named(name).narrow_heading) for name in names}
        cells = {(index, 0): _cell(row, shown) for index, row in enumerate(timed)}
        notes = [*_notes(timed, cells.values()), *notes_of(cells.values(), {})]
        notes += captions(cells.values(), [""] * len(cells), {*axes, *same, *CELL})
        tables.append(
            ReportTable(
                f"{id}{number}", f"{title}: {subject}", head, rows, [""], cells, shown, notes
            )
        )
    if against := _against_full(timed, axes):
        rows, cells = (
            list(against),
            {(index, 0): cell for index, cell in enumerate(against.values())},
        )
        subject = "from which length a method is faster than full attention"
        notes = [*notes_of(cells.values(), {}), FASTER_NOTE]
        breakeven = ReportTable(
            f"latency_breakeven{number}",
            f"{title}: {subject}",
            head[1:],
            rows,
            [""],
            cells,
            AGAINST_FULL,
            notes,
        )
        tables.append(breakeven)
    return tables


def _against_full(rows: Sequence[_Row], axes: Sequence[str]) -> dict[tuple[str, ...], Cell]:
    """What `AGAINST_FULL` says of each arm that was timed at several lengths, as full attention was
    beside it.

    Of several runs of full attention the one with the most settings in common counts.
    """
    shared = [key == MACHINE or (is_shared(key) and key not in CELL) for key in axes]
    arms: dict[tuple[str, ...], dict[int, _Row]] = {}
    full: dict[tuple[str, ...], dict[tuple[str, ...], dict[int, _Row]]] = {}
    rivals, cells = {}, {}
    for row in rows:
        labels, place = (
            (str(row.batch), *row.labels),
            (str(row.batch), *compress(row.labels, shared)),
        )
        if missing(row.line[TIME.name]):
            continue
        times = full.setdefault(place, {}) if row.run.is_full else arms
        times.setdefault(labels, {})[row.tokens] = row
        rivals[labels] = place
    for labels, method_rows in arms.items():
        there = full.get(rivals[labels], {})
        full_rows = (
            there[max(there, key=lambda other: sum(map(eq, other, labels)))] if there else {}
        )
        common = sorted(method_rows.keys() & full_rows.keys())
        if len(common) > 1:
            run, mine, theirs = (
                method_rows[common[-1]].run,
                method_rows[common[-1]].line,
                full_rows[common[-1]].line,
            )
            numbers = {"time_over_full": mine[TIME.name] / theirs[TIME.name]}
            sides = (
                {tokens: row.line[TIME.name] for tokens, row in side.items()}
                for side in (method_rows, full_rows)
            )
            if start := crossing(*sides):
                numbers["faster_from"] = start
            marks = dict.fromkeys(numbers, _letters(mine, theirs, TIME.name))
            if not (missing(mine["ttft_s"]) or missing(theirs["ttft_s"])):
                numbers["ttft_over_full"] = mine["ttft_s"] / theirs["ttft_s"]
                marks["ttft_over_full"] = _letters(mine, theirs, "ttft_s")
            cells[labels] = Cell(
                numbers, {name: letters for name, letters in marks.items() if letters}, run.folders
            )
    return cells


def _axes(cells_of: Mapping[Run, Cells]) -> tuple[list[str], dict[str, str]]:
    """The settings that label an arm; and those of `AXES` that all arms share, with the label that
    they share.
    """
    rivals: dict[tuple[Any, ...], list[Run]] = {}
    for run, cells in cells_of.items():
        for cell in cells:
            rivals.setdefault((*cell, *map(run.label, AXES)), []).append(run)
    several = len({cell.machine for cells in cells_of.values() for cell in cells}) > 1
    labels = {key: labels_of(cells_of, key) for key in AXES[:3]}
    same = {key: values[0] for key, values in labels.items() if len(values) == 1}
    axes = [key for key in (*AXES, *differing_keys(rivals.values())) if key not in same]
    axes += [MACHINE] if several else []
    if same.get("task.prefill") == "true":
        del same["task.prefill"]  # as everywhere
    return axes, same


def _parts_of_step(rows: Sequence[_Row]) -> list[str]:
    """The names of the parts of a step in which any of the arms spent time."""
    names = [name for name in rows[0].run.arm if name.startswith("breakdown_ms.")]
    return [
        name
        for name in names
        if any(not missing(row.line.get(name)) and row.line[name] for row in rows)
    ]


def _cell(row: _Row, shown: Mapping[str, Quantity]) -> Cell:
    """The numbers of one arm at one length and batch."""
    line = row.line
    there = {name: quantity for name, quantity in shown.items() if not missing(line.get(name))}
    numbers = {name: quantity.scaled(line[name]) for name, quantity in there.items()}
    numbers |= ends(line["spread"], there)
    marks = {name: _time_marks(line, name) for name, quantity in there.items() if quantity.is_time}
    if line["memory"] == "counted" and "memory_bytes" in numbers:
        marks["memory_bytes"] = "a"
    marks = {name: letters for name, letters in marks.items() if letters}
    for name in ("budget_tokens", "unbounded_samples"):
        if not missing(line[name]):
            numbers[name] = float(line[name])
    if letters := budget_marks(line):
        first = next(iter(there))
        marks[first] = marks.get(first, "") + letters
    machine, seed = str(line["device_name"]), row.run.label("seed")
    return Cell(
        numbers, marks, row.run.folders, machine=machine, seed=seed, settings=settings_of(row.run)
    )


def _letters(mine: Line, theirs: Line, name: str) -> str:
    """The letters for a time of ours over full attention's."""
    return "".join(sorted({*_time_marks(mine, name), *time_marks(theirs, name)}))


def _time_marks(line: Line, name: str) -> str:
    letters = transfer_marks(line["transfer"]) if name in TRANSFERRED else ""
    return letters + (time_marks(line, name) if named(name).part != "hardware" else "")


def _notes(rows: Sequence[_Row], cells: Collection[Cell]) -> list[str]:
    """How these numbers came about."""
    shown = {name for cell in cells for name in cell.numbers}
    notes = [REPEATS_NOTE] if any(name.endswith("_low") for name in shown) else []
    notes += [NO_REPEATS_NOTE] if all(cell.numbers.get("n") == 1 for cell in cells) else []
    if "floor_ms" in shown:
        rates: dict[str, list[float]] = {}
        for line in (row.line for row in rows if not missing(row.line["copy_bandwidth"])):
            rates.setdefault(str(line["device_name"]), []).append(line["copy_bandwidth"] / 1e9)
        machines = "; ".join(
            f"{name}: {' to '.join(_ends(values))} GB / s" for name, values in rates.items()
        )
        notes.append(
            "Floor: bytes of weights and of keys and values attended, over the bandwidth of a copy"
            f" ({machines}). Times are of that machine."
        )
    if "python_ms" in shown:
        notes.append(
            "Python: the part of a step in which the device has nothing to do, another on another"
            " machine and day; the rest, in which it is busy, is what a method asks of the device."
        )
    if "synthetic_attention" in {row.run.label("task.keys") for row in rows}:
        notes.append(
            "keys=synthetic_attention: synthetic keys and queries (kvbench/measure/synthetic.py),"
            " as random weights give none that an index could find."
        )
    if "false" in {row.run.label("task.prefill") for row in rows}:
        notes.append(
            "prefill=false: stores were filled and nothing read by the model: no first token to"
            " time."
        )
    return notes


def _ends(values: Iterable[float]) -> list[str]:
    """The least and the largest, or the one that both are."""
    ordered = sorted(values)
    return list(dict.fromkeys(f"{value:.1f}" for value in (ordered[0], ordered[-1])))
