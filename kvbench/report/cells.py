"""What tables are made of: cells with numbers, how a score is put into one, and the notes below a table.

Which run stands where is of `kvbench.report.select`, how a table is printed of `kvbench.report.formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.report.evidence import MARKS, Evidence
from kvbench.report.stats import COVERAGE, RESAMPLES
from kvbench.runs.quantities import QUANTITIES, Quantity

# What a score never stands without: its interval, its distance to full attention, what it attended, its samples.
WITH_SCORE = {
    "interval": Quantity("interval", "", f"{COVERAGE} % interval", digits=1),
    "against_full": Quantity("against_full", "", "against full", digits=1),
    "attended_share": QUANTITIES["attended_share"],
    "samples": Quantity("samples", "", "samples", digits=0),
}
WHOLE_SCORE = {"score": QUANTITIES["score"], **WITH_SCORE}
# The same in less room: with its interval, and a star where it surely differs from full attention's.
BRIEFEST_SCORE = {
    "brief_score": Quantity("brief_score", "", "score", digits=1, better="more", label=f"score [{COVERAGE} % interval]")
}
BRIEF_SCORE = {
    **BRIEFEST_SCORE,
    "brief_against_full": Quantity("brief_against_full", "", "against full", digits=1),
    "samples": WITH_SCORE["samples"],
}


@dataclass(frozen=True)
class Cell:
    """What stands at one row and column of a table.

    Attributes:
        numbers: by the name of a quantity, in the unit of its heading; an interval has "low" and "high", a difference
            to full attention also "against_full_low" and "_high" and its "pairs" of samples, a published number
            "published" and "difference".
        marks: letters of `MARKS`, by the name of the quantity that they stand at.
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
        columns: the labels; [""] where the quantities stand side by side instead.
        cells: by row and column; where there is none, nothing was found.
        lines: the quantities that each cell shows, by name.
        notes: what a reader must know, a sentence each.
        heads: the labels of each column apart, where it has several.
        shared: so many labels of a row, the first, may stand once above all rows that have them.
    """

    id: str
    title: str
    axes: tuple[str, ...]
    rows: list[tuple[str, ...]]
    columns: list[str]
    cells: dict[tuple[int, int], Cell]
    lines: dict[str, Quantity]
    notes: list[str]
    heads: tuple[tuple[str, ...], ...] = ()
    shared: int = 0

    def section(self, row: int) -> str:
        """The labels that a row shares with its neighbours, in words."""
        shared = zip(self.axes[: self.shared], self.rows[row], strict=False)
        return ", ".join(
            label if axis in ("model", "task") else f"{axis.rpartition('.')[2]}={label}" for axis, label in shared
        )


def score_numbers(evidence: Evidence, run: int, groups: tuple[str, ...]) -> dict[str, float]:
    """A run's score of these groups (all: ()) with all that it never stands without, as `Cell.numbers`."""
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
    return {name: float(value) for name, value in found.items() if not missing(value)}


def beyond_noise(numbers: Mapping[str, float]) -> bool:
    """Whether a score differs from full attention's on the same samples by more than chance: no 0 in the interval."""
    return numbers.get("against_full_low", 0.0) > 0 or numbers.get("against_full_high", 0.0) < 0


def missing(value: Any) -> bool:
    """Whether a frame's value is there for want of another: None or NaN."""
    return value is None or value != value


def notes_of(cells: Iterable[Cell], lines: Mapping[str, Quantity]) -> list[str]:
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
    if "brief_score" in lines and any(beyond_noise(cell.numbers) for cell in cells):
        notes.append(f"*: not full attention's by chance: the {COVERAGE} % interval of the difference leaves out 0.")
    used = {letter for cell in cells for letters in cell.marks.values() for letter in letters}
    notes += [f"{letter}: {meaning}." for letter, meaning in MARKS.items() if letter in used]
    probes = {name for name, line in lines.items() if line.part == "probe"}
    if any(probes & cell.numbers.keys() for cell in cells):
        notes.append("Recall and the other probes are of runs with probe.every, which may have other samples.")
    return notes
