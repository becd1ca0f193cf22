"""The tables of timed runs: times, memory and bytes, and where a step goes, a line for each length, batch and arm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import eq
from typing import Any, NamedTuple

from kvbench.report.data.crossing import TIME, crossing
from kvbench.report.data.evidence import is_shared, time_marks, transfer_marks
from kvbench.report.data.frame import CELL, Runs, TimedCell, missing
from kvbench.report.data.select import differing_keys, label_of, labels_of, order_of
from kvbench.report.tables.cells import Cell, Table, ends, notes_of, runs_of
from kvbench.runs.quantities import LESS, Quantity, Unit, named

# What they show in place of a score, by table; the parts of a step stand in the last.
TIMED = {
    "latency": (
        "time",
        ("ttft_s", "index_share", "tt2t_s", "tpot_ms_p50", "tpot_ms_p95", "floor_ms", "floor_ratio", "python_ms")
        + ("n",),
    ),
    "latency_bytes": (
        "memory and bytes",
        ("memory_bytes", "prefill_memory_bytes", "weight_bytes", "whole_kv_bytes")
        + ("must_read_bytes", "read_bytes_per_step", "moved_bytes_per_step"),
    ),
    "latency_parts": ("where a step goes", ("tpot_ms_mean", "floor_ms", "python_ms", "breakdown_ms")),
}
# Of a method against full attention at several lengths.
AGAINST_FULL = {
    "faster_from": Quantity("faster_from", "", "faster than full from", Unit("tokens"), 0, LESS),
    "time_over_full": Quantity("time_over_full", "", "time / full's at the longest", better=LESS),
    "ttft_over_full": Quantity("ttft_over_full", "", "TTFT / full's at the longest", better=LESS),
}
# Where a step's transfers count, and a mark says if they were none to a device.
TRANSFERRED = {"tpot_ms_p50", "tpot_ms_mean", "breakdown_ms.transfer"}
AXES = ("model", "task.keys", "task.prefill", "method", "budget")
MACHINE = "device_name"  # an axis where there are several: times of two never stand in one line

REPEATS_NOTE = "Times are medians of repeats, with the least and the largest; samples says how many there are."
NO_REPEATS_NOTE = "One sample a line: task.repeats=N takes N, whose times can be seen to differ."
FASTER_NOTE = (
    "Faster than full from: between two lengths interpolated, both axes logarithmic; the shortest length where a "
    "method was faster at all of them; - where it was slower at the longest."
)
Cells = Mapping[TimedCell, Mapping[str, Any]]  # what a run measured


class _Line(NamedTuple):
    """What an arm measured at a length and a batch.

    Attributes:
        run: of the arm.
        tokens, batch: of its prompts.
        labels: of the arm.
        measured: by name, as a line of `Runs.arms`.
    """

    run: int
    tokens: int
    batch: int
    labels: tuple[str, ...]
    measured: Mapping[str, Any]


def timed_tables(runs: Runs, chosen: Sequence[int], number: str, what: str) -> list[Table]:
    """The tables of `TIMED` of these timed runs.

    Args:
        number: ends the tables' ids.
        what: the protocol that these are of; "" where there is one.
    """
    measured = {run: runs.cells(run) for run in chosen}
    axes, same = _axes(runs, measured)
    lines = [
        _Line(
            run,
            cell.tokens,
            cell.batch,
            tuple(cell.machine if key == MACHINE else label_of(runs, run, key) for key in axes),
            found,
        )
        for run, cells in measured.items()
        for cell, found in cells.items()
    ]
    lines.sort(key=lambda line: (line.tokens, line.batch, [order_of(label) for label in line.labels]))
    rows = [(str(line.tokens), str(line.batch), *line.labels) for line in lines]
    head = ("tokens", "batch", *("machine" if key == MACHINE else _last_word(key) for key in axes))
    title = ", ".join(filter(None, ["latency", *(f"{_last_word(key)}={label}" for key, label in same.items()), what]))
    tables = []
    for id, (about, wanted) in TIMED.items():
        names = [name for word in wanted for name in (_parts(runs, lines) if word == "breakdown_ms" else [word])]
        shown = {name: named(name)._replace(label=named(name).narrow_heading) for name in names}
        cells = {(index, 0): _cell(line.measured, shown) for index, line in enumerate(lines)}
        notes = [*_notes(runs, chosen, lines, cells.values()), *notes_of(cells.values(), {})]
        tables.append(Table(f"{id}{number}", f"{title}: {about}", head, rows, [""], cells, shown, notes))
    against = _against_full(runs, lines, axes)
    if against:
        rows, cells = list(against), {(index, 0): cell for index, cell in enumerate(against.values())}
        about = "from which length a method is faster than full attention"
        notes = [*notes_of(cells.values(), {}), FASTER_NOTE]
        breakeven = Table(
            f"latency_breakeven{number}", f"{title}: {about}", head[1:], rows, [""], cells, AGAINST_FULL, notes
        )
        tables.append(breakeven)
    return tables


def _against_full(runs: Runs, lines: Sequence[_Line], axes: Sequence[str]) -> dict[tuple[str, ...], Cell]:
    """What `AGAINST_FULL` says of each arm that was measured at several lengths, as full attention was beside it.

    Of several runs of full attention that one counts which is most like the arm.
    """
    shared = [key == MACHINE or (is_shared(key) and key not in CELL) for key in axes]
    arms: dict[tuple[str, ...], dict[int, Mapping[str, Any]]] = {}
    full: dict[tuple[str, ...], dict[tuple[str, ...], dict[int, Mapping[str, Any]]]] = {}
    rivals, cells = {}, {}
    for line in lines:
        row, place = (str(line.batch), *line.labels), (str(line.batch), *compress(line.labels, shared))
        if missing(line.measured[TIME.name]):
            continue
        times = full.setdefault(place, {}) if runs.is_yardstick(line.run) else arms
        times.setdefault(row, {})[line.tokens] = line.measured
        rivals[row] = place
    for row, own in arms.items():
        there = full.get(rivals[row], {})
        beside = there[max(there, key=lambda other: sum(map(eq, other, row)))] if there else {}
        common = sorted(own.keys() & beside.keys())
        if len(common) > 1:
            mine, theirs = own[common[-1]], beside[common[-1]]
            numbers = {"time_over_full": mine[TIME.name] / theirs[TIME.name]}
            if start := crossing(*({tokens: at[TIME.name] for tokens, at in side.items()} for side in (own, beside))):
                numbers["faster_from"] = start
            letters = _letters(mine, theirs, TIME.name)
            marks = dict.fromkeys(numbers, letters) if letters else {}
            if not (missing(mine["ttft_s"]) or missing(theirs["ttft_s"])):
                numbers["ttft_over_full"] = mine["ttft_s"] / theirs["ttft_s"]
                if letters := _letters(mine, theirs, "ttft_s"):
                    marks["ttft_over_full"] = letters
            cells[row] = Cell(numbers, marks, runs_of(mine))
    return cells


def _axes(runs: Runs, measured: Mapping[int, Cells]) -> tuple[list[str], dict[str, str]]:
    """The settings that label an arm; and those of `AXES` that all arms share, with the label that they share."""
    rivals: dict[tuple[Any, ...], list[int]] = {}
    for run, cells in measured.items():
        for cell in cells:
            rivals.setdefault((*cell, *(label_of(runs, run, key) for key in AXES)), []).append(run)
    several = len({cell.machine for cells in measured.values() for cell in cells}) > 1
    labels = {key: labels_of(runs, measured, key) for key in AXES[:3]}
    same = {key: own[0] for key, own in labels.items() if len(own) == 1}
    axes = [key for key in (*AXES, *differing_keys(runs, rivals.values())) if key not in same]
    axes += [MACHINE] if several else []
    if same.get("task.prefill") == "true":
        del same["task.prefill"]  # as everywhere
    return axes, same


def _last_word(key: str) -> str:
    return key.rpartition(".")[2]


def _parts(runs: Runs, lines: Sequence[_Line]) -> list[str]:
    """The parts of a step in which any of the arms spent time."""
    parts = [name for name in runs.arms.columns if name.startswith("breakdown_ms.")]
    spent = [name for line in lines for name in parts if not missing(line.measured.get(name)) and line.measured[name]]
    return [name for name in parts if name in spent]


def _cell(measured: Mapping[str, Any], shown: Mapping[str, Quantity]) -> Cell:
    """The numbers of one arm at one length and batch."""
    there = {name: quantity for name, quantity in shown.items() if not missing(measured.get(name))}
    numbers = {name: quantity.scaled(measured[name]) for name, quantity in there.items()}
    numbers |= ends(measured["spread"], there)
    marks = {name: _time_marks(measured, name) for name, quantity in there.items() if quantity.is_time}
    if measured["memory"] == "counted" and "memory_bytes" in numbers:
        marks["memory_bytes"] = "a"
    marks = {name: letters for name, letters in marks.items() if letters}
    return Cell(numbers, marks, runs_of(measured), machine=str(measured["device_name"]))


def _letters(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    """The letters for a time of ours over full attention's."""
    return "".join(sorted({*_time_marks(mine, name), *time_marks(theirs, name)}))


def _time_marks(measured: Mapping[str, Any], name: str) -> str:
    letters = transfer_marks(measured["transfer"]) if name in TRANSFERRED else ""
    return letters + (time_marks(measured, name) if named(name).part != "hardware" else "")


def _notes(runs: Runs, chosen: Sequence[int], lines: Sequence[_Line], cells: Collection[Cell]) -> list[str]:
    """How these numbers were measured."""
    shown = {name for cell in cells for name in cell.numbers}
    notes = [REPEATS_NOTE] if any(name.endswith("_low") for name in shown) else []
    notes += [NO_REPEATS_NOTE] if all(cell.numbers.get("n") == 1 for cell in cells) else []
    if "floor_ms" in shown:
        rates: dict[str, list[float]] = {}
        for measured in (line.measured for line in lines if not missing(line.measured["copy_bandwidth"])):
            rates.setdefault(str(measured["device_name"]), []).append(measured["copy_bandwidth"] / 1e9)
        machines = "; ".join(f"{name}: {' to '.join(_ends(found))} GB / s" for name, found in rates.items())
        notes.append(
            f"Floor: bytes of weights and of keys and values attended, over the bandwidth of a copy ({machines}). "
            "Times are of that machine."
        )
    if "python_ms" in shown:
        notes.append("Python: the part of a step in which the device has nothing to do.")
    if "synthetic_attention" in {label_of(runs, run, "task.keys") for run in chosen}:
        notes.append(
            "keys=synthetic_attention: synthetic keys and queries (kvbench/measure/synthetic.py), as random weights "
            "give none that an index could find."
        )
    if "false" in {label_of(runs, run, "task.prefill") for run in chosen}:
        notes.append("prefill=false: stores were filled and nothing read by the model: no first token to time.")
    return notes


def _ends(values: Iterable[float]) -> list[str]:
    """The least and the largest, or the one that both are."""
    ordered = sorted(values)
    return list(dict.fromkeys(f"{value:.1f}" for value in (ordered[0], ordered[-1])))
