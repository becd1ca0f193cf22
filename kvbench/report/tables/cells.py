"""What tables are made of: places, in each of which some lines of the long table stand.

`kvbench.report.data.select` says which runs share a place, `kvbench.report.tables.formats` how it
is printed.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvbench.models.hub import weights_origin
from kvbench.report.data.marks import MARKS
from kvbench.report.data.run import YARDSTICK, Run
from kvbench.report.data.select import probed, scored
from kvbench.report.data.stats import COVERAGE, FEWEST
from kvbench.report.data.table import DERIVED, WHOLE, Number, Table, quantity_of
from kvbench.runs.quantities import METHOD_TIME, QUANTITIES, Quantity

# What every table shows beside a score: its interval, the difference to full attention, attended /
# C, its samples.
WITH_SCORE = {
    "interval": Quantity("interval", "", f"{COVERAGE} % interval", digits=1),
    "against_full": DERIVED["against_full"],
    "attended_share": QUANTITIES["attended_share"],
    "samples": DERIVED["samples"],
}
# Of the settings that a caption says these come first.
FIRST = (
    "model",
    "task",
    "method",
    "budget",
    "task.lengths",
    "protocol.question",
    "protocol.accounting",
    "seed",
)

SAME = "The same in all rows"
Place = tuple[int, int]  # row and column
WHOLE_SCORE = {"score": QUANTITIES["score"], **WITH_SCORE}
# The same in less room: with its interval, and a star where it surely differs from full
# attention's.
BRIEFEST_SCORE = {
    "brief_score": Quantity(
        "brief_score", "", "score", digits=1, better="more", label=f"score [{COVERAGE} % interval]"
    )
}
# Where it is the share of tokens at which full attention has the same most likely one.
SAME_TOP = {
    "brief_score": BRIEFEST_SCORE["brief_score"]._replace(
        label=f"same top, % [{COVERAGE} % interval]"
    )
}
BRIEF_SCORE = {
    **BRIEFEST_SCORE,
    "brief_against_full": Quantity("brief_against_full", "", "against full", digits=1),
    "samples": WITH_SCORE["samples"],
}
# What a score is shown by that can be asked for alone.
PARTS = {
    name: line for name, line in {**WITH_SCORE, **BRIEF_SCORE}.items() if name not in QUANTITIES
} | {"gain": DERIVED["gain"]}
# The lines of the long table that stand in a place where any part of a score is shown.
OF_SCORE = ("score", "against_full", "attended_share", "samples", "failed", "seeds")
OF_BUDGET = ("budget_tokens", "unbounded_samples")  # in every place
BARE = {"attended_share", *OF_BUDGET}  # of which no more than the value stands beside others


@dataclass(frozen=True)
class Cell:
    """What stands at one row and column of a table.

    Attributes
    ----------
    lines
        lines of the long table by their quantity; beside a paper's number also "published" and
        "difference".
    arm
        that the score, or else the first of the lines, is of; None where nothing of ours stands.
    mapped
        a run of ours could stand here.
    machine
        that its times are of; "" where it has none.
    """

    lines: Mapping[str, Number] = field(default_factory=dict)
    arm: Run | None = None
    mapped: bool = True
    machine: str = ""

    @classmethod
    def of(
        cls,
        table: Table,
        some: Sequence[Run],
        names: Sequence[str],
        stratum: str = WHOLE,
        marks: Mapping[Run, str] | None = None,
    ) -> Cell:
        """These quantities of a stratum: probes of the run with them, all others of that without.

        Parameters
        ----------
        some
            at most one run with probes and one without.
        marks
            letters of each run, which stand at its first number.
        """
        cell, letters = cls(), dict[Run, str]()
        for name in names:
            is_probe = quantity_of(name).part == "probe"
            for run in probed(some) if is_probe else scored(some):
                letters.setdefault(run, (marks or {}).get(run, "") + table.mark(run.index, stratum))
                there = table.there(run.index, _beside(name, names), stratum)
                if there:
                    first = next(iter(there))
                    there[first] = there[first].marked(letters[run])
                    letters[run] = ""
                    is_time = quantity_of(name).is_time or run.is_cell(stratum)
                    machine = str(table.line(run.index, stratum)["device_name"]) * is_time
                    cell = cell.beside(there, name, machine)
        arm = next(iter(letters), None)
        bounds = table.there(arm.index, OF_BUDGET, stratum) if arm else {}
        return replace(cell.beside(bounds, ""), arm=arm)

    def beside(self, lines: Mapping[str, Number], name: str, machine: str = "") -> Cell:
        """The same with the lines of one value more, whose name is the one that was asked for."""
        both = dict(self.lines)
        for key, line in lines.items():
            if key not in both:
                both[key] = line.bare if key in BARE and key != name else line
            elif key == name:
                both[key] = line._replace(mark=both[key].mark)
        return replace(self, lines=both, machine=machine or self.machine)

    @property
    def run(self) -> str:
        """The folders of the arm; "" where nothing of ours stands."""
        return self.arm.folders if self.arm else ""

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings of the arm, as labels."""
        return self.arm.own_labels if self.arm else {}

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """Every number of the lines, in the unit of its heading.

        The ends of an interval have the name with "_low" and "_high".
        """
        return self.flat(scaled=True)

    def flat(self, scaled: bool = False) -> dict[str, float]:
        """Every number of the lines by name, as stored or in the unit of its heading."""
        numbers: dict[str, float] = {}
        for name, line in self.lines.items():
            scale = quantity_of(name).unit.scale if scaled else 1.0
            ends = {name: line.value, f"{name}_low": line.low, f"{name}_high": line.high}
            numbers |= {key: scale * float(end) for key, end in ends.items() if end is not None}
            if name in COUNTED and line.low is not None:
                numbers[COUNTED[name]] = float(line.n)
        return numbers

    @property
    def marks(self) -> dict[str, str]:
        """The letters of each quantity that has some."""
        return {name: line.mark for name, line in self.lines.items() if line.mark}

    def marked(self, names: Collection[str], letters: str) -> Cell:
        """The same with further letters at these quantities."""
        lines = {name: line.marked(letters * (name in names)) for name, line in self.lines.items()}
        return replace(self, lines=lines)

    def shown(self, name: str) -> Number | None:
        """The line that a value of a table is printed from."""
        return self.lines.get(SHOWN_BY.get(name, name))

    @property
    def differs_from_full(self) -> bool:
        """Whether its score differs from full attention's by more than chance.

        Its samples may rank methods.
        """
        return (
            self.ranks_methods
            and "against_full" in self.lines
            and self.lines["against_full"].differs
        )

    @property
    def ranks_methods(self) -> bool:
        """Whether it may rank a method by its score.

        Its budget applied, full attention answers its samples, and methods differ there.
        """
        return self.was_bounded and "w" not in self.marks.get("score", "")

    @property
    def was_bounded(self) -> bool:
        """Whether its budget applied in any of its samples, or it has none.

        Else no number of it ranks a method.
        """
        return not any("x" in letters for letters in self.marks.values())


# The lines that parts of a score are printed from, by part.
SHOWN_BY = {"brief_score": "score", "interval": "score", "brief_against_full": "against_full"}
# Names of the count of a line in `Cell.flat`.
COUNTED = {"against_full": "pairs", "kl_mean": "kl_mean_samples"}


def _beside(name: str, names: Sequence[str]) -> list[str]:
    """The quantities that stand in a place for one value; of others that were asked for none."""
    if name == "score" or name in PARTS.keys() - {"gain"}:
        return [key for key in OF_SCORE if key == name or key not in names]
    return [key for key in (name, f"{name}_error") if key == name or key in QUANTITIES]


@dataclass(frozen=True)
class ReportTable:
    """Rows and columns of cells.

    Attributes
    ----------
    id
        a word for file names and labels.
    title
        one line.
    axes
        what the labels of a row are, such as ("method", "budget").
    rows
        the labels of each row.
    columns
        the labels; [""] where the quantities stand side by side instead.
    cells
        by row and column; where there is none, nothing is there.
    lines
        the quantities that each cell shows, by name.
    notes
        what a reader must know, a sentence each.
    heads
        the labels of each column one by one, where it has several.
    shared
        how many labels of a row, from the first, may be printed once above all rows that have them.
    """

    id: str
    title: str
    axes: tuple[str, ...]
    rows: list[tuple[str, ...]]
    columns: list[str]
    cells: dict[Place, Cell]
    lines: dict[str, Quantity]
    notes: list[str]
    heads: tuple[tuple[str, ...], ...] = ()
    shared: int = 0

    def section(self, row: int) -> str:
        """The labels that a row shares with its neighbours, in words."""
        shared = zip(self.axes[: self.shared], self.rows[row], strict=False)
        return ", ".join(
            label if axis in ("model", "task") else f"{axis.rpartition('.')[2]}={label}"
            for axis, label in shared
        )

    def only(self, rows: Sequence[int], *notes: str) -> ReportTable:
        """These of its rows, in this order; with further notes before its own."""
        cells = {
            (place, column): cell
            for place, row in enumerate(rows)
            for column in range(len(self.columns))
            if (cell := self.cells.get((row, column)))
        }
        rest = [self.rows[row] for row in rows]
        return replace(self, rows=rest, cells=cells, notes=[*notes, *self.notes])

    def by_arm(self, arms: Sequence[Run]) -> ReportTable:
        """The same table, its rows in the order of these arms."""
        places = {arm: place for place, arm in enumerate(arms)}
        order = {row: places[cell.arm] for (row, _), cell in self.cells.items() if cell.arm}
        return self.only(sorted(order, key=lambda row: order[row]))

    def brief(self) -> ReportTable:
        """The same table without what few of its cells have, and what is the same in all rows."""
        cells = self.cells.values()
        count = {name: sum(cell.shown(name) is not None for cell in cells) for name in self.lines}
        lines = {name: self.lines[name] for name in self.lines if 2 * count[name] > len(cells)}
        lines.pop("seeds", None)
        notes = [note for note in self.notes if not note.startswith(SAME)]
        return replace(self, lines=lines, notes=notes)

    def noted(
        self, labelled: Collection[str], times: Collection[str] = (), more: Sequence[str] = ()
    ) -> ReportTable:
        """The same with what a reader must know of its cells.

        Parameters
        ----------
        labelled
            the settings that its labels say.
        times
            names of the times that are marked by their machine.
        more
            further notes.
        """
        cells, machines = _mark_machines(self.cells, times)
        notes = [*self.notes, *notes_of(cells.values(), self.lines), *machines, *more]
        notes += _acted_notes(cell.arm for cell in cells.values() if cell.arm is not None)
        return replace(self, cells=cells, notes=[*notes, *captions(cells.values(), labelled)])


def _acted_notes(runs: Iterable[Run]) -> list[str]:
    """What is said of models in which methods act on some of the layers alone."""
    shares = {run.settings["model"]: run.acted_share for run in runs}
    return [
        f"In {model} {share:.0%} of the layers have full attention, and with it a budget."
        for model, share in shares.items()
        if share < 1
    ]


def captions(cells: Iterable[Cell], labelled: Collection[str]) -> list[str]:
    """What the labels of a table do not say of its runs.

    The settings that all share; those that all of a model and task share, where labels say these;
    and those in which runs differ for another reason. Options in which methods differ are left to
    CSV.

    Parameters
    ----------
    labelled
        the settings that its labels say, in their order.
    """
    of_parts: dict[str, list[Mapping[str, str]]] = {}
    named = [key for key in labelled if key in ("model", "task")]
    for settings in (cell.settings for cell in cells if cell.settings):
        part = ", ".join(settings.get(key, "-") for key in named)
        of_parts.setdefault(part, []).append(settings)
    every = list(itertools.chain(*of_parts.values()))
    keys = [key for key in dict.fromkeys([*FIRST, *itertools.chain(*every)]) if key not in labelled]
    others = [key for key in keys if len(_values(key, every)) > 1 and not key.startswith("method.")]
    by_part = [key for key in others if all(len(_values(key, of)) < 2 for of in of_parts.values())]
    differing = [key for key in others if key not in by_part]
    lines = {
        SAME: _shared(keys, every),
        **{part: _shared(by_part, settings) for part, settings in of_parts.items()},
        "Not the same in all rows": [
            f"{key}={' | '.join(_values(key, every))}" for key in differing
        ],
    }
    said = [f"{what}: {'; '.join(words)}." for what, words in lines.items() if words]
    return _origins(every) + said


def _origins(every: Iterable[Mapping[str, str]]) -> list[str]:
    """What the weights of models were made of, where that is not what their names say."""
    origins = {
        settings["model"]: weights_origin(settings.get("model.revision", "")) for settings in every
    }
    return [f"Weights of {model}: {words}." for model, words in origins.items() if words]


def _values(key: str, some: Iterable[Mapping[str, str]]) -> list[str]:
    """The values of a setting in these settings; full attention counts only where it has it."""
    return sorted(
        {
            settings.get(key, "-")
            for settings in some
            if key in settings or settings["method"] != YARDSTICK
        }
    )


def _shared(keys: Iterable[str], some: Sequence[Mapping[str, str]]) -> list[str]:
    """Those of these keys that are set to one value in all settings, as "key=value"."""
    values = {key: _values(key, some) for key in keys}
    return [f"{key}={one[0]}" for key, one in values.items() if len(one) == 1 and one != ["-"]]


def _mark_machines(
    cells: Mapping[Place, Cell], times: Collection[str]
) -> tuple[dict[Place, Cell], list[str]]:
    """The cells, and a note on the machines that these times of theirs were taken on.

    Of several machines each has a number, which marks its times.
    """
    timed = {
        place: cell
        for place, cell in cells.items()
        if cell.machine and not cell.lines.keys().isdisjoint(times)
    }
    counts = Counter(cell.machine for cell in timed.values()).most_common()
    if len(counts) < 2:
        return dict(cells), [f"Times are of {name}." for name, _ in counts]
    number = {name: str(index) for index, (name, _) in enumerate(counts, 1)}
    marked = {place: cell.marked(times, number[cell.machine]) for place, cell in timed.items()}
    names = "; ".join(f"{number[name]}: {name}" for name, _ in counts)
    return {**cells, **marked}, [
        f"Times are of several machines, and those of two are not comparable: {names}."
    ]


def compared(cells: Iterable[Cell]) -> str:
    """How many scores a star can stand at, and at how many it would by chance alone, in words."""
    count = sum(
        (line := cell.lines.get("against_full")) is not None and line.n >= FEWEST for cell in cells
    )
    chance = count * (1 - COVERAGE / 100)
    return f"{count} comparison{'s' * (count != 1)}, of which chance alone marks about {chance:.1g}"


# How to read a number that a table has, by its name; ERROR: errors over tokens, STAR: a star.
NOTES = {
    "score_low": (
        f"Score: the plain mean over groups of samples. {COVERAGE} % interval: Wilson's, of several"
        " groups or graded scores with the spread within groups."
    ),
    "kl_mean_low": (
        f"KL from full attention: with its {COVERAGE} % interval over samples, by Student. Full"
        " attention's own row there is 0, and its score 100, by construction: no score is compared"
        " with it."
    ),
    "ERROR": (
        "±: standard error over tokens, as in llama.cpp: too small, as tokens of a text are not"
        " independent."
    ),
    "seeds": (
        "Seeds: how many there are, and the lowest and highest score of one; intervals are over the"
        " samples of all. Other numbers are means, times medians, with the least and largest of the"
        " seeds."
    ),
    "against_full": (
        "Against full: points, paired on the same samples under full attention, where it was run on"
        " them."
    ),
    "STAR": (
        f"*: differs from full attention: over {FEWEST} samples or more, and 0 is not in the"
        f" {COVERAGE} % interval of the paired differences. {{compared}}."
    ),
    "own_ms": f"{METHOD_TIME.capitalize()}.",
}


def notes_of(cells: Iterable[Cell], lines: Mapping[str, Quantity]) -> list[str]:
    """How to read these cells: explains what is in them, and nothing else."""
    cells = list(cells)
    there = {name for cell in cells for name in cell.numbers}
    if any(f"{name}_error" in there for name in lines):
        there.add("ERROR")
    if "brief_score" in lines and any(cell.differs_from_full for cell in cells):
        there.add("STAR")
    notes = [note for name, note in NOTES.items() if name in there]
    notes = [note.replace("{compared}", compared(cells)) for note in notes]
    used = {letter for cell in cells for letters in cell.marks.values() for letter in letters}
    notes += [f"{letter}: {meaning}." for letter, meaning in MARKS.items() if letter in used]
    if any(line.part == "probe" and name in there for name, line in lines.items()):
        notes.append(
            "Recall and the other probes are of runs with probe.every, which may have other"
            " samples."
        )
    return notes
