"""All numbers of runs as one long table, of which every report, figure and page is a view.

A line says of an arm (a run, or all runs that differ in their seed alone) and a stratum of its
samples one quantity: its value, the ends of its interval, over how many samples, with which marks,
and which arm it is paired with. Lines are made when they are read: `Table.number` makes one,
`Table.numbers` those of some arms and quantities, `Table.frame` all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvbench.report.data.marks import budget_marks, time_marks, transfer_marks
from kvbench.report.data.run import CONTROL, OF_ARMS, YARDSTICK, Run, Runs, missing
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.select import select
from kvbench.report.data.stats import Estimate
from kvbench.runs.quantities import NUMBERS, Quantity, named

NONE = "-"  # of what is not there
WHOLE = ""  # the stratum of all samples of an arm
# Times with the transfers of a step in them.
TRANSFERRED = {"tpot_ms_p50", "tpot_ms_mean", "breakdown_ms.transfer"}
# What follows from an arm's samples beside `NUMBERS`, each with how it is called and printed.
DERIVED = {
    "against_full": Quantity("against_full", "", "against full", digits=1),
    "gain": Quantity("gain", "", f"gain over {CONTROL}", digits=1, better="more"),
    "samples": Quantity("samples", "", "samples", digits=0),
    "seeds": Quantity("seeds", "", "seeds, and their scores", digits=1),
}
# of single groups of samples, too, in `Table.frame`
OF_STRATA = ("score", "against_full", "kl_mean", "samples", "failed")


class Number(NamedTuple):
    """A line of the table but for its arm, quantity and stratum.

    Attributes
    ----------
    value
        as stored: bytes, milliseconds, points of a score; `Quantity.scaled` has it in the unit of
        its heading.
    low, high
        its interval; of counts and times the least and the largest of several seeds or repeats;
        None where there is none.
    n
        samples, or of a difference pairs of samples.
    mark
        letters of `kvbench.report.data.marks.MARKS` that stand beside it.
    paired
        index of the arm that it is the difference to; None where it is none.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 0
    mark: str = ""
    paired: int | None = None

    @classmethod
    def of(cls, estimate: Estimate, mark: str = "", paired: int | None = None) -> Number:
        """An estimate as a line."""
        low, high = (None if end is None else float(end) for end in estimate[1:3])
        return cls(float(estimate.mean), low, high, int(estimate.n), mark, paired)

    @property
    def estimate(self) -> Estimate:
        """The value with its interval, which a range of few samples is not."""
        return Estimate(self.value, self.low, self.high, self.n, "r" in self.mark)

    @property
    def bare(self) -> Number:
        """The value and its marks alone."""
        return Number(self.value, n=self.n, mark=self.mark)

    def marked(self, letters: str) -> Number:
        """The same with further marks."""
        return self._replace(mark=self.mark + letters)

    @property
    def differs(self) -> bool:
        """Whether a difference is more than chance: enough pairs, and 0 outside the interval."""
        return self.estimate.differs


COLUMNS = ("arm", "quantity", "stratum", *Number._fields)


class Table:
    """The numbers of some runs.

    Attributes
    ----------
    runs
        all that were read, one for all that differ in their seed alone; an arm's name is its index
        there.
    arms
        those of them that were chosen, by index.
    """

    def __init__(self, runs: Runs, chosen: Iterable[Run] | None = None) -> None:
        self.runs = runs
        self.arms = {run.index: run for run in (runs if chosen is None else chosen)}
        self._leads: dict[tuple[int, int, bool], Number | None] = {}

    @classmethod
    def of(cls, runs: Runs, where: Sequence[str] = (), by_seed: bool = False) -> Table:
        """The numbers of the runs that match these words.

        Parameters
        ----------
        where
            as `kvbench.report.data.select.select` takes them, such as "task=ruler".
        by_seed
            each seed is an arm of its own.

        Raises
        ------
        ConfigError
            no such key, or no run has the value.
        """
        chosen = select(runs, where)
        return cls(runs, chosen) if by_seed else cls(*over_seeds(runs, chosen))

    # -- one number

    def number(self, arm: int, quantity: str, stratum: str = WHOLE) -> Number | None:
        """A quantity of an arm; None where it was not measured.

        Parameters
        ----------
        quantity
            of `NUMBERS` or `DERIVED`, a part of a step such as "breakdown_ms.select", or a number
            of the method's own such as "audit.candidates".
        stratum
            a group of samples such as "niah_single_1", or several as "a + b", each of which counts
            as much; of a timed run what `strata` names; `WHOLE` for all samples.
        """
        run, groups = self.runs[arm], groups_of(stratum)
        if quantity in _ESTIMATED and not run.is_cell(stratum):
            return _ESTIMATED[quantity](run, groups)
        if quantity == "kl_mean" and (kl := run.kl(groups)) and kl.low is not None:
            return Number.of(kl, "r" * kl.is_range)
        line = self.line(arm, stratum)
        value: Any = line.get(quantity)
        if missing(value):
            return None
        mark = "a" * (quantity == "memory_bytes" and line["memory"] == "counted")
        if named(quantity).is_time:
            timed = run.is_cell(stratum)
            mark = transfer_marks(line["transfer"]) * (not timed or quantity in TRANSFERRED)
            mark += time_marks(line, quantity) * (not timed or named(quantity).part != "hardware")
        low, high = line["spread"].get(quantity, (None, None))
        return Number(float(value), low, high, line["n"], mark)

    def there(self, arm: int, quantities: Iterable[str], stratum: str = WHOLE) -> dict[str, Number]:
        """Those of these quantities of an arm that were measured."""
        numbers = {name: self.number(arm, name, stratum) for name in quantities}
        return {name: number for name, number in numbers.items() if number is not None}

    def line(self, arm: int, stratum: str = WHOLE) -> Mapping[str, Any]:
        """All that is recorded of a stratum of an arm's samples, as a line of `Runs.arms`."""
        run = self.runs[arm]
        return run.cell(stratum) if run.is_cell(stratum) else run.arm_of(groups_of(stratum))

    def mark(self, arm: int, stratum: str = WHOLE) -> str:
        """The letters of a stratum as a whole: its budget never applied, or not always."""
        return budget_marks(self.line(arm, stratum))

    def strata(self, arm: int) -> list[str]:
        """The strata of an arm: all samples, and each group or each timed cell."""
        run = self.runs[arm]
        groups = run.cells if run.is_timed else dict.fromkeys(filter(None, run.scores.groups))
        return [WHOLE, *map(str, groups)]

    # -- two arms

    def lead(self, arm: int, other: int, quantity: str = "score") -> Number | None:
        """An arm's score, or its "kl_mean", less another's on the same samples.

        None where they share too few.
        """
        key = arm, other, quantity == "kl_mean"
        if key not in self._leads:
            lead = self.runs[arm].against([self.runs[other]], kl=key[2])
            turned = lead and Number.of(lead.turned, paired=arm)
            self._leads[key] = lead and Number.of(lead, paired=other)
            self._leads[other, arm, key[2]] = turned
        return self._leads[key]

    def leads(self, arms: Iterable[int], quantity: str = "score") -> pd.DataFrame:
        """The differences of every two of these arms that share enough samples, both ways."""
        arms = list(arms)
        pairs = [(arm, other) for arm in arms for other in arms if arm != other]
        there = ((pair, self.lead(*pair, quantity)) for pair in pairs)
        lines = [(arm, quantity, WHOLE, *lead) for (arm, _), lead in there if lead is not None]
        return pd.DataFrame(lines, columns=[*COLUMNS])

    # -- many numbers

    def numbers(
        self,
        quantities: Sequence[str],
        arms: Iterable[int] | None = None,
        strata: Sequence[str] | None = (WHOLE,),
    ) -> pd.DataFrame:
        """The lines of these quantities that were measured, with columns `COLUMNS`.

        Parameters
        ----------
        arms
            None: all that were chosen.
        strata
            None: each of every arm.
        """
        lines = self._lines(quantities, self.arms if arms is None else arms, strata)
        frame = pd.DataFrame(lines, columns=[*COLUMNS])
        return frame.astype({"low": float, "high": float, "paired": "Int64"})

    def _lines(
        self, quantities: Sequence[str], arms: Iterable[int], strata: Sequence[str] | None
    ) -> Iterator[tuple[Any, ...]]:
        for arm in arms:
            for stratum in self.strata(arm) if strata is None else strata:
                for quantity in quantities:
                    if number := self.number(arm, quantity, stratum):
                        yield (arm, quantity, stratum, *number)

    def wide(
        self, quantities: Sequence[str], arms: Iterable[int] | None = None, stratum: str = WHOLE
    ) -> pd.DataFrame:
        """A line an arm: its labels, and of each quantity the value under its name.

        Its interval, n, mark and paired arm are columns such as "score.low", "score.n".
        """
        long = self.numbers(quantities, arms, (stratum,)).set_index(["arm", "quantity"])
        parts = [long[field].unstack("quantity") for field in Number._fields]
        for field, part in zip(Number._fields[1:], parts[1:], strict=True):
            part.columns = [f"{name}.{field}" for name in part]
        index = [*(self.arms if arms is None else arms)]
        return self.labels.loc[index].join(pd.concat(parts, axis=1))

    @functools.cached_property
    def labels(self) -> pd.DataFrame:
        """What each arm is, as text: its settings as on the command line, `OF_ARMS` and `runs`.

        `runs` are its folders.
        """
        keys = [*OF_ARMS, *self.runs.settings]
        lines = [
            {key: run.label(key) for key in keys} | {"runs": run.folders}
            for run in self.arms.values()
        ]
        return pd.DataFrame(lines, index=[*self.arms], dtype=object)

    @property
    def quantities(self) -> list[str]:
        """The names of all numbers that some arm has."""
        listed = [name for name in self.runs.arms if named(name).is_number and name in NUMBERS]
        parts = [name for name in self.runs.arms if "." in name]
        return [*listed, *DERIVED, *parts]

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """Every number of every arm: of all its samples, and of each group those of `OF_STRATA`.

        A timed run has each of its cells. A mark is that of the number and that of the stratum.
        """
        lines: list[tuple[Any, ...]] = []
        for arm, run in self.arms.items():
            whole, *others = self.strata(arm)
            some = self.quantities if run.is_timed else OF_STRATA
            lines += self._lines(self.quantities, [arm], [whole])
            lines += self._lines(some, [arm], others)
        frame = pd.DataFrame(lines, columns=[*COLUMNS])
        places = list(zip(frame["arm"], frame["stratum"], strict=True))
        marks = {place: self.mark(*place) for place in set(places)}
        frame["mark"] = frame["mark"] + [marks[place] for place in places]
        return frame.astype({"low": float, "high": float, "paired": "Int64"})

    # -- for other programs

    def export(self) -> pd.DataFrame:
        """`frame` with what each arm is beside its numbers, which are as stored."""
        labels = self.labels.drop(columns="runs").assign(run=self.labels["runs"])
        there = [key for key in labels if (labels[key] != "-").any()]
        return self.frame.join(labels[there], on="arm")

    def to_csv(self, path: Path) -> None:
        """Write `export` as CSV."""
        path.write_text(csv_of(self.export()), encoding="utf-8")

    def to_parquet(self, path: Path) -> None:
        """Write `export` as Parquet."""
        self.export().to_parquet(path, index=False)


def csv_of(frame: pd.DataFrame) -> str:
    """A frame as CSV that is safe to open in a spreadsheet."""
    text = frame.select_dtypes(exclude="number")
    safe = {
        key: text[key].map({word: plain_csv(word) for word in text[key].unique()}) for key in text
    }
    return frame.assign(**safe).rename(columns=plain_csv).to_csv(index=False, lineterminator="\n")


def plain_csv(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula.

    Text that begins like one gets an apostrophe, a number never.
    """
    if not isinstance(value, str) or not re.match(r"[=+\-@\t\r\n＝＋－＠]", value) or value == NONE:
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def quantity_of(name: str) -> Quantity:
    """What a name of the table's `quantity` column stands for, with its heading and digits."""
    return DERIVED.get(name) or named(name)


def groups_of(stratum: str) -> tuple[str, ...]:
    """The groups of a stratum such as "a + b"; () for all."""
    return tuple(stratum.split(" + ")) if stratum else ()


# -- what is estimated of the samples of an arm, in some groups


def _score(run: Run, groups: tuple[str, ...]) -> Number:
    return Number.of(run.score(groups), run.marks(groups))


def _against_full(run: Run, groups: tuple[str, ...]) -> Number | None:
    against, full = run.against_full(groups), run.full()
    if against is None or full is None:
        return None
    return Number.of(against, "r" * against.is_range, full.index)


def _gain(run: Run, groups: tuple[str, ...]) -> Number | None:
    """A score less that of as many random tokens, in points.

    None for full attention, for the control itself, and where no control ran.
    """
    control = None if run.arm["method"] == YARDSTICK else run.control(run.all_runs)
    if control is None or control.index == run.index:
        return None
    gain = run.against([control], groups)
    return gain and Number.of(gain, paired=control.index)


def _samples(run: Run, groups: tuple[str, ...]) -> Number:
    n = run.score(groups).n
    return Number(float(n), n=n)


def _failed(run: Run, groups: tuple[str, ...]) -> Number:
    return Number(float(run.failed(groups)), n=run.score(groups).n)


def _seeds(run: Run, groups: tuple[str, ...]) -> Number | None:
    """How many seeds an arm stands for, with the least and the largest score of one."""
    scores = run.seeds(groups).values()
    return Number(len(scores), min(scores), max(scores), len(scores)) if len(scores) > 1 else None


_ESTIMATED: dict[str, Callable[[Run, tuple[str, ...]], Number | None]] = {
    "score": _score,
    "against_full": _against_full,
    "gain": _gain,
    "samples": _samples,
    "failed": _failed,
    "seeds": _seeds,
}
