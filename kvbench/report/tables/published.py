"""A published table with ours beside it: in each cell that kvbench can run, what it found there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbench.config import shipped
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.marks import time_marks, transfer_marks
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
from kvbench.report.data.table import DERIVED, Number, Table, groups_of
from kvbench.report.tables.cells import OF_SCORE, WITH_SCORE, Cell, ReportTable
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
    near = _near(paper, select(runs, where)) if runs else []
    table = Table(*over_seeds(runs, near)) if runs else None
    fitting = _fitting(paper, [*table.arms.values()] if table else [])
    used = sorted({run for some in fitting.values() for run in some}, key=lambda run: run.index)
    requested_keys = {word.partition("=")[0] for words in frame["settings"] for word in words}
    mixed = marks_of_mixed(used, sorted(requested_keys), allow_mixed)
    decoding_marks = marks_of_decoding(used)
    marks = {run: mixed.get(run, "") + decoding_marks.get(run, "") for run in used}
    cells = {}
    for line in frame.itertuples():
        some = fitting[line.Index]
        ours = _ours(paper, line, table, some, marks) if table and some else Cell()
        cells[rows.index(line.row), columns.index(line.column)] = _beside(line, ours)
    lines = dict(COMPARED_SECONDS if paper.timed else COMPARED_LINES)
    if any("seeds" in cell.lines for cell in cells.values()):
        lines["seeds"] = DERIVED["seeds"]
    labels: list[tuple[str, ...]] = [(str(row),) for row in rows]
    notes = _notes(paper, cells.values())
    made = ReportTable(paper.id, paper.title, ("",), labels, columns, cells, lines, notes)
    return made.noted(["method", "budget"], ["score"] if paper.timed else [])


def _beside(line: Any, ours: Cell) -> Cell:
    """Our cell with the published number."""
    lines = dict(ours.lines)
    if not missing(line.value):
        lines["published"] = Number(line.value)
        if "score" in lines and not {"g", "s"} & set(lines["score"].mark):
            lines["difference"] = Number(lines["score"].value - line.value)
    mapped = bool(line.metric and line.method and line.model)
    return replace(ours, lines=lines, mapped=mapped)


def ran(table: ReportTable) -> ReportTable:
    """The rows of a published table that ran here, and a note that counts the others.

    All rows where none ran.
    """
    there = sorted({row for (row, _), cell in table.cells.items() if "score" in cell.lines})
    others = len(table.rows) - len(there)
    if not there or not others:
        return table
    note = f"{others} rows that did not run here are not shown; --format html and csv have them."
    return table.only(there, note)


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


def _stratum(paper: PaperTable, line: Any) -> str:
    """The groups of samples of a published cell: of an average those of its row."""
    if line.metric != "macro":
        return str(line.group)
    groups = paper.frame["group"][paper.frame["row"] == line.row]
    return " + ".join(dict.fromkeys(name for words in groups for name in groups_of(words)))


def _fitting(paper: PaperTable, chosen: Sequence[Run]) -> dict[int, list[Run]]:
    """The runs that could stand beside each published cell, by its line of the paper's frame."""
    runs_by_line = {}
    for line in paper.frame.itertuples():
        required = groups_of(_stratum(paper, line)) if chosen and line.metric else ()
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
    table: Table,
    candidates: Sequence[Run],
    marks: Mapping[Run, str],
) -> Cell:
    """What the one run that fits a published cell has there, in these groups of samples."""
    candidates = same_decode_mode(candidates)
    refuse_several(candidates, f"{line.row}, {line.column}")
    run, stratum = scored(candidates)[0], _stratum(paper, line)
    if paper.timed:
        return _timed_cell(table, run, line, marks.get(run, ""))
    letters = "g" * _on_generated_text(run, groups_of(stratum)) + marks.get(run, "")
    letters += table.mark(run.index, stratum) + "s" * bool(run.arm["model"] != line.model)
    lines = table.there(run.index, OF_SCORE, stratum)
    if line.metric in PASSED:
        passed = table.number(run.index, line.metric)
        if passed is None:  # some problem lacks an answer yet
            return Cell()
        lines = {"score": passed.bare.marked(lines["score"].mark)}
    return Cell({**lines, "score": lines["score"].marked(letters)}, run)


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


def _timed_cell(table: Table, run: Run, line: Any, letters: str) -> Cell:
    """What a timed run has of a published time, in seconds; nothing if a term is missing.

    Of several machines one that nothing disturbed is taken, then the one with the most repeats.
    """
    place = tuple(map(int, line.group.split(" x ")))
    there = {cell: measured for cell, measured in run.cells.items() if cell[:2] == place}
    best = max(there, key=lambda cell: (there[cell]["disturbed"] not in (True,), there[cell]["n"]))
    names = line.metric.split(" + ")
    terms = table.there(run.index, names, str(best))
    lines = {}
    if len(terms) == len(names):
        marks = dict.fromkeys("".join(time_marks(there[best], name) for name in names))
        letters = transfer_marks(there[best]["transfer"]) + "".join(marks) + letters
        value = sum(term.value for term in terms.values()) / 1e3
        lines["score"] = Number(value, mark=letters + table.mark(run.index, str(best)))
    return Cell(lines, run, machine=best.machine)


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
