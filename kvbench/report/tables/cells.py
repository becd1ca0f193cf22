"""What tables are made of: cells with numbers, and the notes below a table.

`kvbench.report.data.select` says which runs share a cell, `kvbench.report.tables.formats` how a
table is printed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.models.hub import weights_origin
from kvbench.report.data.control import CONTROL, gain_of
from kvbench.report.data.marks import MARKS
from kvbench.report.data.run import NOT_OF_FULL, YARDSTICK, Run, missing
from kvbench.report.data.stats import COVERAGE, FEWEST, RESAMPLES, Estimate
from kvbench.runs.quantities import METHOD_TIME, QUANTITIES, Quantity

# What every table shows beside a score: its interval, the difference to full attention, attended /
# C, its samples.
WITH_SCORE = {
    "interval": Quantity("interval", "", f"{COVERAGE} % interval", digits=1),
    "against_full": Quantity("against_full", "", "against full", digits=1),
    "attended_share": QUANTITIES["attended_share"],
    "samples": Quantity("samples", "", "samples", digits=0),
}
# where any has several
SEEDS = {"seeds": Quantity("seeds", "", "seeds, and their scores", digits=1)}

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
    "brief_score": (
        BRIEFEST_SCORE["brief_score"]._replace(label=f"same top, % [{COVERAGE} % interval]")
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
} | {"gain": Quantity("gain", "", f"gain over {CONTROL}", digits=1, better="more")}


@dataclass(frozen=True)
class Cell:
    """The numbers at one row and column of a table.

    Attributes
    ----------
    numbers
        by the name of a quantity, in the unit of its heading; its interval, or the least and
        largest of several runs or repeats, has the same name with "_low" and "_high", an error over
        tokens "_error"; a difference to full attention has its "pairs" of samples, a published
        number "published" and "difference".
    marks
        letters of `MARKS`, by the name of the quantity that they stand at.
    run
        the folder that the score, or else the first of the numbers, is from, of several seeds all
        of them; "" where nothing of ours stands.
    mapped
        a run of ours could stand here.
    machine
        that its times are of; "" where it has none.
    seed
        of its run, of several all of them.
    settings
        of its run, as labels (`settings_of`).
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    mapped: bool = True
    machine: str = ""
    seed: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def differs_from_full(self) -> bool:
        """Whether its score differs from full attention's by more than chance.

        Its samples may rank methods.
        """
        numbers = self.numbers
        if not {"against_full", "against_full_low", "against_full_high", "pairs"} <= numbers.keys():
            return False
        low, high = numbers["against_full_low"], numbers["against_full_high"]
        difference = Estimate(numbers["against_full"], low, high, int(numbers["pairs"]))
        return self.ranks_methods and difference.differs

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
        by row and column; where there is none, nothing was found.
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


def settings_of(run: Run) -> dict[str, str]:
    """The settings of a run that change what it is, as labels.

    Full attention has none that it does not depend on.
    """
    idle = NOT_OF_FULL if run.arm["method"] == YARDSTICK else ()
    return {
        key: run.label(key)
        for key, value in run.settings.items()
        if not missing(value) and key not in idle
    }


def captions(cells: Iterable[Cell], parts: Iterable[str], labelled: Collection[str]) -> list[str]:
    """What the labels of a table do not say of its runs.

    The settings that all share; those that all of a part share; and those in which runs differ for
    another reason. Options in which methods differ are left to CSV.

    Parameters
    ----------
    parts
        of each cell, what its row is of, such as "tiny, passkey".
    labelled
        the settings that its labels say.
    """
    of_parts: dict[str, list[Mapping[str, str]]] = {}
    for cell, part in zip(cells, parts, strict=True):
        if cell.settings:
            of_parts.setdefault(part, []).append(cell.settings)
    every = list(itertools.chain(*of_parts.values()))
    keys = [key for key in dict.fromkeys([*FIRST, *itertools.chain(*every)]) if key not in labelled]
    others = [key for key in keys if len(_values(key, every)) > 1 and not key.startswith("method.")]
    by_part = [
        key
        for key in others
        if all(len(_values(key, settings)) < 2 for settings in of_parts.values())
    ]
    lines = {
        "The same in all rows": _shared(keys, every),
        **{part: _shared(by_part, settings) for part, settings in of_parts.items()},
        "Not the same in all rows": [
            f"{key}={' | '.join(_values(key, every))}" for key in others if key not in by_part
        ],
    }
    origins = {
        settings["model"]: weights_origin(settings.get("model.revision", "")) for settings in every
    }
    weights = [f"Weights of {model}: {words}." for model, words in origins.items() if words]
    return weights + [f"{what}: {'; '.join(words)}." for what, words in lines.items() if words]


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


def seeds_of(cells: Iterable[Cell]) -> dict[str, Quantity]:
    """The quantities beside a score where runs of several seeds are one."""
    return SEEDS if any("seeds" in cell.numbers for cell in cells) else {}


def kl_numbers(kl: Estimate) -> dict[str, float]:
    """A KL divergence and its interval over samples, as `Cell.numbers`."""
    if kl.low is None:
        return {}
    ends = {"kl_mean": kl.mean, "kl_mean_low": kl.low, "kl_mean_high": kl.high}
    numbers = {name: float(value) for name, value in ends.items() if value is not None}
    return {**numbers, "kl_mean_samples": float(kl.n)}


def gain_numbers(run: Run, groups: tuple[str, ...]) -> dict[str, float]:
    """What a run's score of these groups gains over random tokens, as `Cell.numbers`."""
    gain = gain_of(run, groups)
    if gain is None:
        return {}
    ends = {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
    return {name: float(value) for name, value in ends.items() if value is not None}


def score_numbers(run: Run, groups: tuple[str, ...]) -> dict[str, float]:
    """A run's score of these groups (all: ()) and what is shown beside it, as `Cell.numbers`."""
    score, against = run.score(groups), run.against_full(groups)
    seeds = run.seeds(groups).values()
    numbers = {
        "score": score.mean,
        "score_low": score.low,
        "score_high": score.high,
        "against_full": against and against.mean,
        "against_full_low": against and against.low,
        "against_full_high": against and against.high,
        "pairs": against and against.n,
        "attended_share": run.arm_of(groups)["attended_share"],
        "samples": score.n,
        "failed": run.failed(groups),
    }
    if len(seeds) > 1:
        numbers |= {"seeds": len(seeds), "seeds_low": min(seeds), "seeds_high": max(seeds)}
    return {name: float(value) for name, value in numbers.items() if not missing(value)}


def mark_machines(
    cells: Mapping[Place, Cell], times: Collection[str]
) -> tuple[dict[Place, Cell], list[str]]:
    """The cells, and a note on the machines that these times of theirs were taken on.

    Of several machines each has a number, which marks its times.
    """
    timed = {
        place: cell
        for place, cell in cells.items()
        if cell.machine and not cell.numbers.keys().isdisjoint(times)
    }
    counts = Counter(cell.machine for cell in timed.values()).most_common()
    if len(counts) < 2:
        return dict(cells), [f"Times are of {name}." for name, _ in counts]
    number = {name: str(index) for index, (name, _) in enumerate(counts, 1)}
    marked = {}
    for place, cell in timed.items():
        letters = {
            name: cell.marks.get(name, "") + number[cell.machine]
            for name in times
            if name in cell.numbers
        }
        marked[place] = replace(cell, marks={**cell.marks, **letters})
    names = "; ".join(f"{number[name]}: {name}" for name, _ in counts)
    return {**cells, **marked}, [
        f"Times are of several machines, and those of two are not comparable: {names}."
    ]


def ends(
    spread: Mapping[str, tuple[float, float]], lines: Mapping[str, Quantity]
) -> dict[str, float]:
    """The ends of a spread as `Cell.numbers` has them, of these quantities."""
    return {
        f"{name}_{end}": lines[name].scaled(value)
        for name, both in spread.items()
        if name in lines
        for end, value in zip(("low", "high"), both, strict=True)
    }


def bounds_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The tokens of a budget, and in how many samples it never applied, as `Cell.numbers`.

    `line` is one of `Runs.arms`.
    """
    names = ("budget_tokens", "unbounded_samples")
    return {name: float(line[name]) for name in names if not missing(line.get(name))}


def compared(cells: Iterable[Cell]) -> str:
    """How many scores a star can stand at, and at how many it would by chance alone, in words."""
    count = sum(cell.numbers.get("pairs", 0) >= FEWEST for cell in cells)
    chance = count * (1 - COVERAGE / 100)
    return f"{count} comparison{'s' * (count != 1)}, of which chance alone marks about {chance:.1g}"


# How to read a number that a table has, by its name; ERROR: errors over tokens, STAR: a star.
NOTES = {
    "score_low": (
        f"Score: the plain mean over groups of samples. {COVERAGE} % interval: Wilson's where all"
        " scores of a task are 0 or 100, else a bootstrap over the samples of each group"
        f" ({RESAMPLES:,} resamples), with what those that all scored alike may hide."
    ),
    "kl_mean_low": (
        f"KL from full attention: with its {COVERAGE} % bootstrap interval over samples. Full"
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
