"""The tables of timed runs, a line for each length, batch and arm.

Times, memory and bytes, and where a step goes.
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
from kvbench.report.tables.cells import (
    Cell,
    ReportTable,
    bounds_of,
    captions,
    ends,
    notes_of,
    settings_of,
)
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
# Times with the transfers of a step in them; a mark says if those went to no device.
TRANSFERRED = {"tpot_ms_p50", "tpot_ms_mean", "breakdown_ms.transfer"}
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

    def marks(self, name: str) -> str:
        """The letters for one of its times."""
        letters = transfer_marks(self.line["transfer"]) if name in TRANSFERRED else ""
        return letters + (time_marks(self.line, name) if named(name).part != "hardware" else "")

    def cell(self, shown: Mapping[str, Quantity]) -> Cell:
        """Its numbers among these quantities."""
        line = self.line
        there = {name: quantity for name, quantity in shown.items() if not missing(line.get(name))}
        numbers = {name: quantity.scaled(line[name]) for name, quantity in there.items()}
        numbers |= ends(line["spread"], there)
        marks = {name: self.marks(name) for name, quantity in there.items() if quantity.is_time}
        if line["memory"] == "counted" and "memory_bytes" in numbers:
            marks["memory_bytes"] = "a"
        if letters := budget_marks(line):
            first = next(iter(there))
            marks[first] = marks.get(first, "") + letters
        return Cell(
            numbers | bounds_of(line),
            {name: letters for name, letters in marks.items() if letters},
            self.run.folders,
            machine=str(line["device_name"]),
            seed=self.run.label("seed"),
            settings=settings_of(self.run),
        )

    def over(self, full: _Row, start: float | None) -> Cell:
        """Its times over full attention's at this length, and from which length it is faster."""
        mine, theirs = self.line, full.line
        numbers = {"time_over_full": mine[TIME.name] / theirs[TIME.name]}
        if start:
            numbers["faster_from"] = start
        marks = dict.fromkeys(numbers, self._marks_over(full, TIME.name))
        if not (missing(mine["ttft_s"]) or missing(theirs["ttft_s"])):
            numbers["ttft_over_full"] = mine["ttft_s"] / theirs["ttft_s"]
            marks["ttft_over_full"] = self._marks_over(full, "ttft_s")
        marks = {name: letters for name, letters in marks.items() if letters}
        return Cell(numbers, marks, self.run.folders)

    def _marks_over(self, full: _Row, name: str) -> str:
        return "".join(sorted({*self.marks(name), *time_marks(full.line, name)}))


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
    timed = _rows(cells_of, axes)
    rows = [(str(row.tokens), str(row.batch), *row.labels) for row in timed]
    head = ("tokens", "batch", *("machine" if key == MACHINE else last_word(key) for key in axes))
    shared = (f"{last_word(key)}={label}" for key, label in same.items())
    title = ", ".join(filter(None, ["latency", *shared, what]))
    tables = []
    for id, (subject, value_names) in TIMED.items():
        shown = _quantities(timed, value_names)
        cells = {(index, 0): row.cell(shown) for index, row in enumerate(timed)}
        notes = [*_notes(timed, cells.values()), *notes_of(cells.values(), {})]
        notes += captions(cells.values(), [""] * len(cells), {*axes, *same, *CELL})
        words = f"{title}: {subject}"
        tables.append(ReportTable(f"{id}{number}", words, head, rows, [""], cells, shown, notes))
    if against := _against_full(timed, axes):
        cells = {(index, 0): cell for index, cell in enumerate(against.values())}
        notes = [*notes_of(cells.values(), {}), FASTER_NOTE]
        id, words = f"latency_breakeven{number}", f"{title}: {FASTER}"
        labels = list(against)
        tables.append(ReportTable(id, words, head[1:], labels, [""], cells, AGAINST_FULL, notes))
    return tables


def _rows(cells_of: Mapping[Run, Cells], axes: Sequence[str]) -> list[_Row]:
    """The arms at each length and batch, by these and by their labels."""
    rows = [
        _Row(
            run,
            cell.tokens,
            cell.batch,
            tuple(cell.machine if key == MACHINE else run.label(key) for key in axes),
            line,
        )
        for run, cells in cells_of.items()
        for cell, line in cells.items()
    ]
    return sorted(rows, key=lambda row: (row.tokens, row.batch, list(map(order_of, row.labels))))


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


def _against_full(rows: Sequence[_Row], axes: Sequence[str]) -> dict[tuple[str, ...], Cell]:
    """What `AGAINST_FULL` says of each arm, as full attention was timed beside it.

    Both were timed at several lengths. Of several runs of full attention the one with the most
    settings in common counts.
    """
    shared = [key == MACHINE or (is_shared(key) and key not in CELL) for key in axes]
    arms: dict[tuple[str, ...], dict[int, _Row]] = {}
    fulls: dict[tuple[str, ...], dict[tuple[str, ...], dict[int, _Row]]] = {}
    places = {}
    for row in rows:
        if missing(row.line[TIME.name]):
            continue
        labels = (str(row.batch), *row.labels)
        places[labels] = (str(row.batch), *compress(row.labels, shared))
        by_labels = fulls.setdefault(places[labels], {}) if row.run.is_full else arms
        by_labels.setdefault(labels, {})[row.tokens] = row
    cells = {}
    for labels, arm in arms.items():
        there = fulls.get(places[labels], {})
        nearest = max(there, key=lambda other: sum(map(eq, other, labels)), default=())
        full = there.get(nearest, {})
        common = sorted(arm.keys() & full.keys())
        if len(common) > 1:
            start = crossing(_times(arm), _times(full))
            cells[labels] = arm[common[-1]].over(full[common[-1]], start)
    return cells


def _times(arm: Mapping[int, _Row]) -> dict[int, float]:
    return {tokens: row.line[TIME.name] for tokens, row in arm.items()}


def _axes(cells_of: Mapping[Run, Cells]) -> tuple[list[str], dict[str, str]]:
    """The settings that label an arm, and those of `AXES` that all arms share with their label."""
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
