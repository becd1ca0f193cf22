"""A published table with ours beside it: in each cell that kvbench can run, what it found there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbench.config import shipped
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.marks import budget_marks, time_marks, transfer_marks
from kvbench.report.data.papers import PaperTable
from kvbench.report.data.run import YARDSTICK, Run, Runs, missing
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.select import (
    marks_of_decoding,
    marks_of_mixed,
    refuse_several,
    same_decode_mode,
    scored,
    select,
)
from kvbench.report.tables.cells import (
    WITH_SCORE,
    Cell,
    ReportTable,
    captions,
    mark_machines,
    notes_of,
    score_numbers,
    seeds_of,
    settings_of,
)
from kvbench.runs.quantities import PASSED, QUANTITIES, Quantity
from kvbench.tasks.ruler.task import READERS
from kvbench.tasks.ruler.texts import GENERATED

# Options of a task that choose samples: a run with others still has comparable groups.
CHOOSE_SAMPLES = {"task.lengths", "task.samples", "task.subsets", "task.keys", "task.positions"}
KIND = ("model", "method", "task")  # what a published cell and a run beside it have in common
COMPARED_LINES = {
    "score": QUANTITIES["score"]._replace(label="ours"),
    **WITH_SCORE,
    "published": Quantity("published", "", "published"),
    "difference": Quantity("difference", "", "difference", digits=1),
}
COMPARED_SECONDS = {
    "score": Quantity("score", "", "ours", digits=3),
    "published": Quantity("published", "", "published"),
    "difference": Quantity("difference", "", "difference", digits=3),
}


def merge_published(
    runs: Runs | None, paper: PaperTable, where: Sequence[str] = (), allow_mixed: bool = False
) -> ReportTable:
    """A published table, and in each cell that kvbench can run what it found there.

    Parameters
    ----------
    runs
        None: there are none, and the published numbers stand alone.
    paper
        the table.
    where, allow_mixed
        as `tables.pivot`.

    Raises
    ------
    ConfigError
        several runs fit one cell, or runs of several protocols fit the table.
    """
    frame = paper.frame
    rows, columns = list(dict.fromkeys(frame["row"])), list(dict.fromkeys(frame["column"]))
    _, chosen = over_seeds(runs, _near(paper, select(runs, where))) if runs else (None, [])
    whole = {
        row: tuple(dict.fromkeys(group for groups in group_names for group in _groups_of(groups)))
        for row, group_names in frame.groupby("row", sort=False)["group"]
    }
    fitting = _fitting(paper, chosen, whole)
    used = sorted({run for some in fitting.values() for run in some}, key=lambda run: run.index)
    requested_keys = {word.partition("=")[0] for words in frame["settings"] for word in words}
    mixed = marks_of_mixed(used, sorted(requested_keys), allow_mixed)
    decoding_marks = marks_of_decoding(used)
    marks = {run: mixed.get(run, "") + decoding_marks.get(run, "") for run in used}
    cells = {}
    for line in frame.itertuples():
        candidates, groups = fitting[line.Index], _required_groups(line, whole)
        ours = _ours(paper, line, groups, candidates, marks) if candidates else Cell()
        cells[rows.index(line.row), columns.index(line.column)] = _beside(line, ours)
    lines = COMPARED_SECONDS if paper.timed else COMPARED_LINES | seeds_of(cells.values())
    cells, machines = mark_machines(cells, ["score"] if paper.timed else [])
    notes = [*_notes(paper, cells.values()), *notes_of(cells.values(), {}), *machines]
    notes += captions(cells.values(), [""] * len(cells), ["method", "budget"])
    return ReportTable(
        paper.id, paper.title, ("",), [(row,) for row in rows], columns, cells, lines, notes
    )


def _beside(line: Any, ours: Cell) -> Cell:
    """Our cell with the published number."""
    numbers = dict(ours.numbers)
    if not missing(line.value):
        numbers["published"] = line.value
        if "score" in numbers and not {"g", "s"} & set(ours.marks["score"]):
            numbers["difference"] = numbers["score"] - line.value
    mapped = bool(line.metric and line.method and line.model)
    return replace(ours, numbers=numbers, mapped=mapped)


def ran(table: ReportTable) -> ReportTable:
    """The rows of a published table that ran here, and a note that counts the others.

    All rows where none ran.
    """
    there = [
        row
        for row in range(len(table.rows))
        if any("score" in table.cells[row, column].numbers for column in range(len(table.columns)))
    ]
    if len(there) in (0, len(table.rows)):
        return table
    cells = {
        (there.index(row), column): cell
        for (row, column), cell in table.cells.items()
        if row in there
    }
    others = len(table.rows) - len(there)
    note = f"{others} rows that did not run here are not shown; --format html and csv have them."
    return replace(
        table, rows=[table.rows[row] for row in there], cells=cells, notes=[note, *table.notes]
    )


def _near(paper: PaperTable, chosen: Iterable[Run]) -> list[Run]:
    """The chosen runs of full attention, and those of some cell's model, method and task."""
    lines = set(paper.frame[[*KIND]].itertuples(index=False, name=None))
    there = {
        (model, *rest)
        for published_model, *rest in lines
        for model in (published_model, paper.stand_in)
    }
    return [
        run
        for run in chosen
        if run.arm["method"] == YARDSTICK or tuple(run.arm[key] for key in KIND) in there
    ]


def _required_groups(line: Any, whole: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The groups of samples of a published cell: of an average those of its row."""
    return whole[line.row] if line.metric == "macro" else _groups_of(line.group)


def _fitting(
    paper: PaperTable, chosen: Sequence[Run], whole: Mapping[str, tuple[str, ...]]
) -> dict[int, list[Run]]:
    """The runs that could stand beside each published cell, by its line of the paper's frame."""
    runs_by_line = {}
    for line in paper.frame.itertuples():
        required = _required_groups(line, whole)
        fitting = [run for run in chosen if _fits(run, line, required, line.model)]
        runs_by_line[line.Index] = fitting or [
            run for run in chosen if _fits(run, line, required, paper.stand_in)
        ]
    return runs_by_line


def _fits(run: Run, line: Any, required: tuple[str, ...], model: str | None) -> bool:
    """Whether a run is one of `model` that a published cell could stand beside."""
    arm = run.arm
    if not line.metric or tuple(arm[key] for key in KIND) != (model, line.method, line.task):
        return False
    budget = line.budget
    if budget is None:
        budget = (shipped("method", line.method) or {}).get("preset")
    if arm["budget"] != budget:
        return False
    requested = {"kv": str(NATIVE)} | {
        key: value for key, _, value in (word.partition("=") for word in line.settings)
    }
    if any(
        run.label(key) != value for key, value in requested.items() if key not in CHOOSE_SAMPLES
    ):
        return False
    return set(required) <= set(run.scores.groups)


def _ours(
    paper: PaperTable,
    line: Any,
    groups: tuple[str, ...],
    candidates: Sequence[Run],
    mixed: dict[Run, str],
) -> Cell:
    """What the one run that fits a published cell found there, in these groups of samples."""
    candidates = same_decode_mode(candidates)
    refuse_several(candidates, f"{line.row}, {line.column}")
    run = scored(candidates)[0]
    if paper.timed:
        return _timed_cell(run, line, mixed.get(run, ""))
    marks = run.marks(groups) + "g" * _on_generated_text(run, groups) + mixed.get(run, "")
    marks += budget_marks(run.arm_of(groups)) + "s" * bool(run.arm["model"] != line.model)
    numbers = score_numbers(run, groups)
    if line.metric in PASSED:
        passed = run.arm[line.metric]
        if missing(passed):  # some problem lacks an answer yet
            return Cell()
        numbers = {"score": passed}
    return Cell(numbers, {"score": marks}, run.folders, settings=settings_of(run))


def _on_generated_text(run: Run, groups: Iterable[str]) -> bool:
    """Whether samples of these groups (all: ()) are of texts that kvbench generated for RULER."""
    if run.arm["task"] != "ruler" or not missing(run.settings.get("task.data_dir")):
        return False
    subsets = {group.partition("/")[0] for group in groups or run.scores.groups}
    # missing: by a kvbench that had no such option
    files = {key: run.settings.get(f"task.{key}") for key in READERS}
    return any(
        subsets & READERS[key] for key, file in files.items() if missing(file) or file == GENERATED
    )


def _timed_cell(run: Run, line: Any, mixed: str) -> Cell:
    """What a timed run found of a published time, in seconds; nothing if a term is missing.

    Of several machines one that nothing disturbed is taken, then the one with the most repeats.
    """
    place = tuple(map(int, line.group.split(" x ")))
    there = [
        measured for cell, measured in run.cells().items() if (cell.tokens, cell.batch) == place
    ]
    best = max(there, key=lambda measured: (measured["disturbed"] not in (True,), measured["n"]))
    names = line.metric.split(" + ")
    times = [best[name] for name in names if not missing(best.get(name))]
    numbers = {"score": sum(times) / 1e3} if len(times) == len(names) else {}
    letters = dict.fromkeys("".join(time_marks(best, name) for name in names))
    marks = transfer_marks(best["transfer"]) + "".join(letters) + budget_marks(best) + mixed
    machine = str(best["device_name"])
    return Cell(numbers, {"score": marks}, run.folders, machine=machine, settings=settings_of(run))


def _groups_of(word: str) -> tuple[str, ...]:
    return tuple(word.split(" + ")) if word else ()


def _notes(paper: PaperTable, cells: Iterable[Cell]) -> list[str]:
    """Where the published numbers are from, and which of our runs stand beside them."""
    frame = paper.frame
    notes = [f"Published: {paper.source}."]
    for note, noted in frame[frame["note"] != ""].groupby("note", sort=False):
        notes.append(f"{'; '.join(noted['row'] + ', ' + noted['column'])}: {note}.")
    if not any(cell.mapped for cell in cells):
        return [*notes, "Published only: kvbench has no such method, model or task."]
    requested = dict.fromkeys(
        " ".join([f"task={line.task}", *line.settings]) for line in frame.itertuples() if line.task
    )
    return [
        *notes,
        (
            f"Ours: {'; '.join(requested)}, with each row's model, method and budget. Rows and"
            " cells without are published only: kvbench has no such method, model or task."
        ),
    ]
