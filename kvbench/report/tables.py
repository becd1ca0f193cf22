"""Tables of runs: everything found, any selection of rows and columns, and ours beside a paper's.

A table is made of cells with numbers, and knows nothing of how it is printed (`kvbench.report.formats`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvbench.config import ConfigError, nearest, shipped, show
from kvbench.report.evidence import MARKS, NOT_OF_FULL, Evidence
from kvbench.report.frame import CELL, PROBES, PROTOCOL, YARDSTICK, Runs
from kvbench.report.published import PaperTable
from kvbench.report.stats import COVERAGE, RESAMPLES


class Value(NamedTuple):
    """A quantity of a run that a table can show.

    Attributes:
        label: what a table calls it, with its unit.
        digits: behind the point.
        scale: from the frame's unit to the label's.
        timed: a time, which is of one machine, and where transfers are simulated of no GPU.
    """

    label: str
    digits: int = 2
    scale: float = 1
    timed: bool = False


MIB, KIB = 2**-20, 2**-10
VALUES = {
    "score": Value("score", 1),
    "attended_share": Value("attended / C"),
    "attended_mean": Value("attended entries per KV head", 1),
    "attended_max": Value("attended entries, most", 0),
    "device_kv_bytes": Value("KV on the device, MiB", 2, MIB),
    "host_bytes": Value("KV on the host, MiB", 2, MIB),
    "index_bytes": Value("index, MiB", 2, MIB),
    "moved_bytes_per_step": Value("moved up per step, KiB", 1, KIB),
    "read_bytes_per_step": Value("read by the index per step, KiB", 1, KIB),
    "dense_share": Value("dense layers, share"),
    "ttft_s": Value("to first token, s", 3, timed=True),
    "tt2t_s": Value("to second token, s", 3, timed=True),
    "tpot_ms_mean": Value("ms / token", 2, timed=True),
    "tpot_ms_p50": Value("ms / token, median", 2, timed=True),
    "tpot_ms_p95": Value("ms / token, 95th percentile", 2, timed=True),
    "floor_ms": Value("floor, ms / token", 2, timed=True),
    "floor_ratio": Value("median / floor", 1),
    "python_ms": Value("Python, ms / token", 2, timed=True),
    "must_read_bytes": Value("weights and KV attended per step, MiB", 1, MIB),
    "memory_bytes": Value("memory in decoding, MiB", 1, MIB),
    "prefill_memory_bytes": Value("memory in the prefill, MiB", 1, MIB),
    "weight_bytes": Value("weights, MiB", 1, MIB),
    "whole_kv_bytes": Value("all KV, MiB", 1, MIB),
    "copy_bandwidth": Value("copy, GB / s", 1, 1e-9),
    "upload_bandwidth": Value("host to device, GB / s", 1, 1e-9),
    "recall": Value("recall"),
    "mass": Value("attention mass"),
    "output_error": Value("output error", 3),
    "jaccard": Value("Jaccard with last step"),
    "seen": Value("seen in last 32 steps"),
    "score_samples": Value("score, mean over samples", 1),
    "score_ok": Value("score without failed", 1),
    "n": Value("samples", 0),
    "failed": Value("failed", 0),
}

BREAKDOWN = Value("part of a step, ms / token", timed=True)

# What a score never stands without: its interval, its distance to full attention, what it attended, its samples.
WITH_SCORE = {
    "interval": Value(f"{COVERAGE} % interval", 1),
    "against_full": Value("against full", 1),
    "attended_share": VALUES["attended_share"],
    "samples": Value("samples", 0),
}
SUMMARY = ("score", "device_kv_bytes", "moved_bytes_per_step", "ttft_s", "tpot_ms_mean", "recall")

# What runs that are there to be timed show in place of a score, by table; the parts of a step stand in the last.
TIMED = {
    "latency": ("time", ("ttft_s", "tt2t_s", "tpot_ms_p50", "tpot_ms_p95", "floor_ms", "floor_ratio", "python_ms")),
    "latency_bytes": (
        "memory and bytes",
        ("memory_bytes", "prefill_memory_bytes", "weight_bytes", "whole_kv_bytes")
        + ("must_read_bytes", "read_bytes_per_step", "moved_bytes_per_step"),
    ),
    "latency_parts": ("where a step goes", ("tpot_ms_mean", "floor_ms", "python_ms", "breakdown_ms")),
}
SHORT = {
    "ttft_s": "TTFT, s",
    "tt2t_s": "TT2T, s",
    "tpot_ms_mean": "TPOT, ms",
    "tpot_ms_p50": "TPOT p50, ms",
    "tpot_ms_p95": "TPOT p95, ms",
    "floor_ms": "floor, ms",
    "floor_ratio": "p50 / floor",
    "python_ms": "Python, ms",
}
SIMULATED = {"tpot_ms_p50", "tpot_ms_mean", "breakdown_ms.transfer"}  # what says so where transfers are

# Options of a task that choose samples: a run with others still has comparable groups.
CHOOSE_SAMPLES = {"task.lengths", "task.samples", "task.subsets", "task.keys", "task.positions"}


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table.

    Attributes:
        numbers: by the name of a value, in its label's unit; an interval has "low" and "high", a difference to full
            attention also "against_full_low" and "_high" and its "pairs" of samples, a published number "published"
            and "difference".
        marks: letters of `MARKS`, by the name of the value that they stand at.
        run: the folder that the score, or else the first of the numbers, is from; "" where nothing of ours stands.
        mapped: a run of ours could stand here.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    mapped: bool = True


@dataclass(frozen=True)
class Table:
    """Rows and columns of cells.

    Attributes:
        id: a word for file names and labels.
        title: one line.
        axes: what the labels of a row are, such as ("method", "budget").
        rows: the labels of each row.
        columns: the labels; [""] where the values stand side by side instead.
        cells: by row and column; where there is none, nothing was found.
        lines: the values that each cell shows, by name.
        notes: what a reader must know, a sentence each.
    """

    id: str
    title: str
    axes: tuple[str, ...]
    rows: list[tuple[str, ...]]
    columns: list[str]
    cells: dict[tuple[int, int], Cell]
    lines: dict[str, Value]
    notes: list[str]


def summary(runs: Runs, where: Sequence[str] = ()) -> list[Table]:
    """Everything found, a line for each model, task, method and budget and for what else differs; a table for each
    protocol. Runs that are there to be timed follow in tables of their own.

    Raises:
        ConfigError: as `select`.
    """
    evidence, tables = Evidence(runs), []
    found = select(runs, where)
    for number, (chosen, told) in enumerate(_by_protocol(runs, [run for run in found if not runs.timed(run)]), 1):
        axes = _telling_axes(runs, chosen, ["model", "task", "method", "budget"])
        id, title = (f"summary{number}", f"Runs with {told}") if told else ("summary", "All runs")
        tables.append(_pivot(evidence, chosen, axes, [], SUMMARY, id, title, {}))
    for number, (chosen, told) in enumerate(_by_protocol(runs, [run for run in found if runs.timed(run)]), 1):
        tables += _latency(runs, chosen, str(number) if told else "", told)
    return tables


def _latency(runs: Runs, chosen: Sequence[int], number: str, told: str) -> list[Table]:
    """The tables of `TIMED`, a line for each cell (tokens, batch) and arm of timed runs."""
    cells = {(run, cell): line for run in chosen for cell, line in runs.cells(run).items()}
    fixed = ["model", "task.keys", "task.prefill", "method", "budget"]
    places: dict[tuple[Any, ...], list[int]] = {}
    for run, cell in cells:
        places.setdefault((*cell, *(_text(runs, run, key) for key in fixed)), []).append(run)
    axes = [*fixed, *(key for key in _telling(runs, places.values()) if len(places) < len(cells) or key not in CELL)]
    same = {key: _labels(runs, chosen, key)[0] for key in axes[:3] if len(_labels(runs, chosen, key)) == 1}
    axes = [key for key in axes if key not in same]
    if same.get("task.prefill") == "true":
        del same["task.prefill"]  # as everywhere
    rows = sorted(
        ((tuple(_text(runs, run, key) for key in axes), cell, run) for run, cell in cells),
        key=lambda row: (row[1], [_order(label) for label in row[0]]),
    )
    labels = [(*map(str, cell), *own) for own, cell, _ in rows]
    parts = [name for name in runs.arms.columns if name.startswith("breakdown_ms.")]
    parts = [name for name in parts if any(not _missing(line.get(name)) and line[name] > 0 for line in cells.values())]
    title = ", ".join(filter(None, ["latency", *(f"{key.rpartition('.')[2]}={same[key]}" for key in same), told]))
    tables = []
    for id, (what, wanted) in TIMED.items():
        names = [name for word in wanted for name in (parts if word == "breakdown_ms" else [word])]
        lines = {name: _value(runs, name)._replace(label=_short(runs, name)) for name in names}
        made = {(place, 0): _timed_cell(cells[run, cell], lines) for place, (_, cell, run) in enumerate(rows)}
        notes = [*_timed_notes(runs, chosen, made.values()), *_notes(made.values(), {})]
        head = ("tokens", "batch", *(key.rpartition(".")[2] for key in axes))
        tables.append(Table(f"{id}{number}", f"{title}: {what}", head, labels, [""], made, lines, notes))
    return tables


def _short(runs: Runs, name: str) -> str:
    """The label of a value where it stands beside many others."""
    part = name.partition("breakdown_ms.")[2]
    return f"{part.replace('_', ' ')}, ms" if part else SHORT.get(name, _value(runs, name).label)


def _timed_cell(line: Mapping[str, Any], lines: Mapping[str, Value]) -> Cell:
    """The values of one arm in one cell."""
    numbers = {name: value.scale * float(line[name]) for name, value in lines.items() if not _missing(line.get(name))}
    simulated = SIMULATED if "simulated" in str(line["transfer"]) else set()
    counted = {"memory_bytes"} if line["memory"] == "counted" else set()
    marks = {name: "c" if name in simulated else "a" for name in numbers if name in simulated | counted}
    return Cell(numbers, marks, str(line["path"]))


def _timed_notes(runs: Runs, chosen: Sequence[int], cells: Iterable[Cell]) -> list[str]:
    """How these numbers were measured."""
    shown = {name for cell in cells for name in cell.numbers}
    notes = []
    if "floor_ms" in shown:
        rates: dict[str, list[float]] = {}
        for run in chosen:
            rates.setdefault(_text(runs, run, "device_name"), []).append(runs.arm[run]["copy_bandwidth"] / 1e9)
        told = "; ".join(f"{name}: {' to '.join(_ends(found))} GB / s" for name, found in rates.items())
        notes.append(
            f"Floor: bytes of weights and of keys and values attended, over the bandwidth of a copy ({told}). "
            "Times are of that machine."
        )
    if "python_ms" in shown:
        notes.append("Python: the part of a step in which the device has nothing to do.")
    if "synthetic_attention" in {_text(runs, run, "task.keys") for run in chosen}:
        notes.append(
            "keys=synthetic_attention: keys and queries are made (kvbench/synthetic.py), as random weights give none "
            "that an index could find."
        )
    if "false" in {_text(runs, run, "task.prefill") for run in chosen}:
        notes.append("prefill=false: stores were filled and nothing read by the model: no first token to time.")
    return notes


def _ends(values: Iterable[float]) -> list[str]:
    """The least and the largest, or the one that both are."""
    ordered = sorted(values)
    return list(dict.fromkeys(f"{value:.1f}" for value in (ordered[0], ordered[-1])))


def by_group(runs: Runs, where: Sequence[str] = ()) -> list[Table]:
    """The scores of each group of samples (subset, length); a table for each task that has some, and each protocol.

    Raises:
        ConfigError: as `select`.
    """
    evidence, tables = Evidence(runs), []
    for task in dict.fromkeys(runs.arms["task"]):
        own = [run for run in select(runs, where) if runs.arm[run]["task"] == task and not runs.timed(run)]
        for number, (chosen, told) in enumerate(_by_protocol(runs, own), 1):
            if len({group for run in chosen for group in runs.scores[run].groups}) > 1:
                axes = _telling_axes(runs, chosen, ["model", "method", "budget"])
                title = f"{task} by group" + (f", with {told}" if told else "")
                id = f"{task}{number if told else ''}"
                tables.append(_pivot(evidence, chosen, axes, ["group"], ["score"], id, title, {}))
    return tables


def _by_protocol(runs: Runs, chosen: Sequence[int]) -> list[tuple[list[int], str]]:
    """The runs of each protocol, and what tells it from the others ("" where there is one)."""
    keys = [f"protocol.{key}" for key in PROTOCOL]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for run in chosen:
        kinds.setdefault(tuple(_text(runs, run, key) for key in keys), []).append(run)
    differing = [place for place in range(len(keys)) if len({kind[place] for kind in kinds}) > 1]
    return [
        (members, ", ".join(f"{keys[place]}={kind[place]}" for place in differing)) for kind, members in kinds.items()
    ]


def _telling_axes(runs: Runs, chosen: Sequence[int], axes: list[str]) -> list[str]:
    """These axes and all that it takes to have no two runs in one place."""
    return [*axes, *_telling(runs, _places(runs, chosen, axes).values())]


def pivot(
    runs: Runs,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[str],
    where: Sequence[str] = (),
    allow_mixed: bool = False,
) -> Table:
    """Any selection: runs, or their groups, by some of their settings.

    Args:
        rows, columns: settings such as "method", "budget", "task.lengths" or "page_size", and "group". Without columns
            the values stand side by side.
        values: names of `VALUES`, or "breakdown_ms.<part>".
        where: as `select` takes them.
        allow_mixed: runs of several protocols may stand together, marked.

    Raises:
        ConfigError: no such key or value; several runs in one place of the table, which says in what they differ;
            several protocols.
    """
    chosen = select(runs, where)
    down, across = ([_key(runs, name) for name in names] for names in (rows, columns))
    for name in values:
        _value(runs, name)
    marks = _mixed(runs, chosen, [*down, *across], allow_mixed)
    for place, alike in _places(runs, chosen, [*down, *across]).items():
        if differing := _telling(runs, [alike]):
            told = "; ".join(f"{key}={' | '.join(_labels(runs, alike, key))}" for key in differing)
            raise ConfigError(
                f"{', '.join(place)}: several runs, which differ in {told}; add it to --rows or --columns, or choose "
                f"with --where {differing[0]}={_labels(runs, alike, differing[0])[0]}"
            )
    title = f"{', '.join(values)} by {', '.join([*down, *across])}"
    return _pivot(Evidence(runs), chosen, down, across, values, "table", title, marks)


def select(runs: Runs, where: Sequence[str] = ()) -> list[int]:
    """The runs that match all of these words, such as "method=quest", "budget=64,128" or "task.lengths=[1024]".

    Raises:
        ConfigError: no such key, or no run has the value.
    """
    chosen = list(runs.arms.index)
    for word in where:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--where {word}: expected key=value, such as method=quest")
        key = _key(runs, name)
        wanted = {text} if text.startswith("[") else set(text.split(","))
        there = {run: _text(runs, run, key) for run in chosen}
        # A share of the prompt is shown as 10 % and given as 0.1.
        given = {run: {label, show(runs.setting[run].get(key))} for run, label in there.items()}
        if unknown := sorted(wanted - {label for labels in given.values() for label in labels}):
            raise ConfigError(f"--where {name}={unknown[0]}: no run has it; {nearest(text, set(there.values()))}")
        chosen = [run for run in chosen if given[run] & wanted]
    return chosen


# -- settings as labels ------------------------------------------------------------------------------------------------

OF_ARMS = ("weights", "device_name", "metric", "run_id")


def _key(runs: Runs, name: str) -> str:
    """The setting that a word means: itself, or the one key that ends with it."""
    known = [*runs.settings.columns, *OF_ARMS, "group"]
    if name in known:
        return name
    ending = [key for key in known if key.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(f"{name}: {' or '.join(ending)}?")
    raise ConfigError(f"{name}: no such key of a run; {nearest(name, {*known, *_leaves(known)})}")


def _leaves(keys: Iterable[str]) -> set[str]:
    return {key.rpartition(".")[2] for key in keys}


def _text(runs: Runs, run: int, key: str) -> str:
    """The value of a setting as a table shows it."""
    value = runs.arm[run][key] if key in OF_ARMS else runs.setting[run][key]
    if value is None or value != value:
        return "-"
    return f"{100 * value:g} %" if key == "budget" and isinstance(value, float) else show(value)


def _labels(runs: Runs, chosen: Iterable[int], key: str) -> list[str]:
    return sorted({_text(runs, run, key) for run in chosen}, key=_order)


def _order(label: str) -> tuple[bool, bool, float, str]:
    """Full attention first, then nothing, numbers by size, words."""
    try:
        number = float(label.removesuffix(" %")) / (100 if label.endswith("%") else 1)
    except ValueError:
        return (label != YARDSTICK, label != "-", float("inf"), label)
    return (True, True, number, label)


def _value(runs: Runs, name: str) -> Value:
    if name in VALUES:
        return VALUES[name]
    parts = [column for column in runs.arms.columns if column.startswith("breakdown_ms.")]
    if name in parts:
        return BREAKDOWN._replace(label=f"{name.partition('.')[2].replace('_', ' ')}, ms / token")
    raise ConfigError(f"--values {name}: no such value; {nearest(name, [*VALUES, *parts])}")


# -- which runs stand where --------------------------------------------------------------------------------------------


def _places(runs: Runs, chosen: Iterable[int], axes: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """The runs of each place of a table, groups aside."""
    places: dict[tuple[str, ...], list[int]] = {}
    for run in chosen:
        place = tuple(_text(runs, run, key) for key in axes if key != "group")
        places.setdefault(place, []).append(run)
    return places


def _scored(runs: Runs, alike: Sequence[int]) -> list[int]:
    """Of runs in one place those whose scores and times count: a probe run stands in only where there is no other."""
    return [run for run in alike if not runs.arm[run]["probe_every"]] or list(alike)


def _probed(runs: Runs, alike: Sequence[int]) -> list[int]:
    return [run for run in alike if runs.arm[run]["probe_every"]]


def _telling(runs: Runs, places: Iterable[Sequence[int]]) -> list[str]:
    """The settings that tell runs in one place from each other, in the order of the settings."""
    found = set()
    for alike in places:
        for rivals in (_scored(runs, alike), _probed(runs, alike)):
            if len(rivals) > 1:
                found |= {key for key in runs.settings.columns if len({_text(runs, run, key) for run in rivals}) > 1}
    return [key for key in runs.settings.columns if key in found]


def _mixed(runs: Runs, chosen: Sequence[int], axes: Sequence[str], allowed: bool) -> dict[int, str]:
    """The mark of each run under another protocol than most of these.

    Raises:
        ConfigError: there are such runs, and they are not allowed.
    """
    kinds = {}
    for run in chosen:
        free = NOT_OF_FULL if runs.arm[run]["method"] == YARDSTICK else set()
        keys = [f"protocol.{key}" for key in PROTOCOL]
        kinds[run] = {key: _text(runs, run, key) for key in keys if key not in axes and key not in free}
    found = {key: Counter(kind[key] for kind in kinds.values() if key in kind) for key in _protocol_keys(axes)}
    differing = {key: counts for key, counts in found.items() if len(counts) > 1}
    if not differing:
        return {}
    if not allowed:
        key, counts = next(iter(differing.items()))
        told = ", ".join(f"{value}: {count} runs" for value, count in counts.most_common())
        raise ConfigError(
            f"{key}: {told}; one table mixes no protocols: choose with --where {key}={counts.most_common(1)[0][0]}, "
            "make it a row or column, or mark them with --allow-mixed"
        )
    usual = {key: counts.most_common(1)[0][0] for key, counts in differing.items()}
    return {run: "m" for run, kind in kinds.items() if any(kind.get(key, usual[key]) != usual[key] for key in usual)}


def _protocol_keys(axes: Sequence[str]) -> list[str]:
    return [key for key in (f"protocol.{name}" for name in PROTOCOL) if key not in axes]


# -- cells -------------------------------------------------------------------------------------------------------------


def _pivot(
    evidence: Evidence,
    chosen: Sequence[int],
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[str],
    id: str,
    title: str,
    mixed: Mapping[int, str],
) -> Table:
    """The table of these runs; no place of it holds two that count alike."""
    runs = evidence.runs
    places: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for run in chosen:
        for groups in _groups(runs, run) if "group" in (*rows, *columns) else [()]:
            row, column = (
                tuple(groups[0] if key == "group" else _text(runs, run, key) for key in axes)
                for axes in (rows, columns)
            )
            places.setdefault((row, column, groups), []).append(run)
    appeared = {label: place for place, label in enumerate(dict.fromkeys(group for *_, key in places for group in key))}

    def order(labels: Iterable[str]) -> list[Any]:
        return [(appeared.get(label, -1), _order(label)) for label in labels]

    row_labels = sorted({row for row, *_ in places}, key=order)
    column_labels = sorted({column for _, column, _ in places}, key=order)
    cells = {}
    for (row, column, groups), alike in places.items():
        cells[row_labels.index(row), column_labels.index(column)] = _cell(evidence, alike, groups, values, mixed)
    lines = {}
    for name in values:
        lines[name] = _value(runs, name)
        lines |= WITH_SCORE if name == "score" else {}
    notes = _notes(cells.values(), lines)
    if any(value.timed for value in lines.values()):
        machines = Counter(_text(runs, run, "device_name") for run in chosen)
        notes.append(f"Times are of {'; '.join(f'{name} ({count} runs)' for name, count in machines.items())}.")
    if "group" in (*rows, *columns) and "attended_share" in lines:
        notes.append("attended / C, and all but the scores, are of the whole run and not of the group.")
    return Table(id, title, tuple(rows), row_labels, list(map(", ".join, column_labels)), cells, lines, notes)


def _groups(runs: Runs, run: int) -> list[tuple[str, ...]]:
    return [(group,) for group in dict.fromkeys(runs.scores[run].groups)]


def _cell(
    evidence: Evidence, alike: Sequence[int], groups: tuple[str, ...], values: Sequence[str], mixed: Mapping[int, str]
) -> Cell:
    """The values of the runs in one place: scores and times of those that count, probes of those that probe."""
    runs, source = evidence.runs, ""
    numbers: dict[str, float] = {}
    marks: dict[str, str] = {}
    for name in values:
        candidates = _probed(runs, alike) if name in PROBES.values() else _scored(runs, alike)
        if not candidates:
            continue
        (run,) = candidates
        arm = runs.arm[run]
        if name == "score":
            numbers |= _score(evidence, run, groups)
            marks["score"] = evidence.marks(run, groups) + mixed.get(run, "")
        elif not _missing(arm[name]):
            value = _value(runs, name)
            numbers[name] = value.scale * float(arm[name])
            marks[name] = "c" if value.timed and "simulated" in str(arm["transfer"]) else ""
        source = source or str(arm["path"])
    return Cell(numbers, {name: letters for name, letters in marks.items() if letters}, source)


def _score(evidence: Evidence, run: int, groups: tuple[str, ...]) -> dict[str, float]:
    """A score with all that it never stands without."""
    own, against = evidence.score(run, groups), evidence.against_full(run, groups)
    found = {
        "score": own.mean,
        "low": own.low,
        "high": own.high,
        "against_full": against and against.mean,
        "against_full_low": against and against.low,
        "against_full_high": against and against.high,
        "pairs": against and against.n,
        "attended_share": evidence.runs.arm[run]["attended_share"],
        "samples": own.n,
        "failed": evidence.failed(run, groups),
    }
    return {name: float(value) for name, value in found.items() if not _missing(value)}


def _missing(value: Any) -> bool:
    return value is None or value != value


def _notes(cells: Iterable[Cell], lines: Mapping[str, Value]) -> list[str]:
    """How to read these cells: what stands in them is explained, and nothing else."""
    cells = list(cells)
    notes = []
    if any("low" in cell.numbers for cell in cells):
        notes.append(
            f"Score: the plain mean over groups of samples. {COVERAGE} % interval: bootstrap over the samples of each "
            f"group ({RESAMPLES:,} resamples); no width means that all samples scored alike."
        )
    if any("against_full" in cell.numbers for cell in cells):
        notes.append("Against full: points, paired on the same samples under full attention, where it was run on them.")
    used = {letter for cell in cells for letters in cell.marks.values() for letter in letters}
    notes += [f"{letter}: {told}." for letter, told in MARKS.items() if letter in used]
    if set(lines) & set(PROBES.values()):
        notes.append("Recall and the other probes are of runs with probe.every, which may have other samples.")
    return notes


# -- beside a paper ----------------------------------------------------------------------------------------------------

BESIDE = {
    "score": VALUES["score"]._replace(label="ours"),
    **WITH_SCORE,
    "published": Value("published"),
    "difference": Value("difference", 1),
}
BESIDE_SECONDS = {
    "score": Value("ours", 3, timed=True),
    "published": Value("published"),
    "difference": Value("difference", 3),
}


def beside(runs: Runs | None, paper: PaperTable, where: Sequence[str] = (), allow_mixed: bool = False) -> Table:
    """A published table, and in each cell that kvbench can run what it found there.

    Args:
        runs: None: there are none, and the published numbers stand alone.
        paper: the table.
        where, allow_mixed: as `pivot`.

    Raises:
        ConfigError: several runs fit one cell, or runs of several protocols fit the table.
    """
    frame = paper.frame
    rows, columns = list(dict.fromkeys(frame["row"])), list(dict.fromkeys(frame["column"]))
    evidence = Evidence(runs) if runs else None
    chosen = select(runs, where) if runs else []
    fitting = {}
    for line in frame.itertuples():
        whole = tuple(
            group for other in frame[frame["row"] == line.row].itertuples() for group in _groups_of(other.group)
        )
        fitting[line.Index] = [run for run in chosen if runs and _fits(runs, run, line, paper.settings, whole)]
    used = sorted({run for alike in fitting.values() for run in alike})
    mixed = _mixed(runs, used, [], allow_mixed) if runs else {}
    cells = {}
    for line in frame.itertuples():
        numbers: dict[str, float] = {}
        marks: dict[str, str] = {}
        source = ""
        if evidence and fitting[line.Index]:
            run = _only(evidence.runs, fitting[line.Index], f"{line.row}, {line.column}")
            groups = _groups_of(line.group)
            if paper.timed:
                numbers = _seconds(evidence.runs, run, line)
                marks = {"score": "c" * ("simulated" in str(evidence.runs.arm[run]["transfer"])) + mixed.get(run, "")}
            else:
                numbers = _score(evidence, run, groups)
                marks = {"score": evidence.marks(run, groups) + mixed.get(run, "")}
            source = str(evidence.runs.arm[run]["path"])
        if not _missing(line.value):
            numbers["published"] = line.value
            if "score" in numbers:
                numbers["difference"] = numbers["score"] - line.value
        mapped = bool(line.metric and line.method and line.model)
        cells[rows.index(line.row), columns.index(line.column)] = Cell(numbers, marks, source, mapped)
    notes = [f"Published: {paper.source}."]
    for note, noted in frame[frame["note"] != ""].groupby("note", sort=False):
        notes.append(f"{'; '.join(noted['row'] + ', ' + noted['column'])}: {note}.")
    if any(cell.mapped for cell in cells.values()):
        task = next(line.task for line in frame.itertuples() if line.task)
        notes.append(
            f"Ours: {' '.join([f'task={task}', *paper.settings])}, with each row's model, method and budget. Rows and "
            "cells without are published only: kvbench has no such method, model or task."
        )
    else:
        notes.append("Published only: kvbench has no such method, model or task.")
    notes += _notes(cells.values(), {})
    if paper.timed and used and runs:
        notes.append(f"Times of ours are of {'; '.join(_labels(runs, used, 'device_name'))}.")
    lines = BESIDE_SECONDS if paper.timed else BESIDE
    return Table(paper.id, paper.title, ("",), [(row,) for row in rows], columns, cells, lines, notes)


def _seconds(runs: Runs, run: int, line: Any) -> dict[str, float]:
    """What a timed run measured of a published time, in seconds; nothing where a part is missing."""
    tokens, batch = map(int, line.group.split(" x "))
    measured = runs.cells(run)[tokens, batch]
    parts = [measured[name] for name in line.metric.split(" + ") if not _missing(measured.get(name))]
    return {"score": sum(parts) / 1e3} if len(parts) == len(line.metric.split(" + ")) else {}


def _groups_of(word: str) -> tuple[str, ...]:
    return tuple(word.split(" + ")) if word else ()


def _fits(runs: Runs, run: int, line: Any, words: Iterable[str], whole: tuple[str, ...]) -> bool:
    """Whether a run is one that a published cell could stand beside."""
    arm = runs.arm[run]
    if not line.metric or (arm["model"], arm["method"], arm["task"]) != (line.model, line.method, line.task):
        return False
    budget = line.budget
    if budget is None:
        budget = (shipped("method", line.method) or {}).get("preset")
    if arm["budget"] != budget:
        return False
    for key, _, value in (word.partition("=") for word in words):
        if key not in CHOOSE_SAMPLES and _text(runs, run, key) != value:
            return False
    needed = whole if line.metric == "macro" else _groups_of(line.group)
    return set(needed) <= set(runs.scores[run].groups)


def _only(runs: Runs, alike: Sequence[int], where: str) -> int:
    differing = _telling(runs, [alike])
    if not differing:
        return _scored(runs, alike)[0]
    told = "; ".join(f"{key}={' | '.join(_labels(runs, alike, key))}" for key in differing)
    key = differing[0]
    raise ConfigError(
        f"{where}: several runs, which differ in {told}; choose with --where {key}={_labels(runs, alike, key)[0]}"
    )
