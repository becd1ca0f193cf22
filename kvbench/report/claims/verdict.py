"""From numbers to verdicts: whole intervals decide, and too few samples decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvbench.report.claims.claim import Criterion
from kvbench.report.data.stats import Estimate


class Verdict(Enum):
    """What can be said of a claim, or of one of its criteria."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_TESTABLE = "not testable here"
    NOT_MEASURED = "not measured"

    def of(self, count: int) -> str:
        """The verdict of so many claims, in words."""
        plural = {Verdict.HOLDS: "hold", Verdict.FAILS: "do not hold"}
        return self.value if count == 1 else plural.get(self, self.value)


# Of the verdicts on a claim's criteria the first of these decides: one that fails refutes the
# claim, but a claim has no verdict while a criterion is not measured, as any part of the runs would
# then show failures alone. None can hold of which a part is a time of a device that nobody had.
DECIDING = (
    *(Verdict.NOT_MEASURED, Verdict.FAILS, Verdict.NOT_TESTABLE),
    *(Verdict.UNDECIDED, Verdict.HOLDS),
)


class Setting(Enum):
    """How far what was measured is what the paper measured."""

    HERE = "settled here"
    STAND_IN = "stand-in"
    NOWHERE = "not testable here"


class Finding(NamedTuple):
    """A number that was measured.

    Attributes
    ----------
    value
        the estimate.
    low, high
        its interval; None where there are too few samples for one.
    n
        samples.
    note
        what it is of, in words.
    is_range
        whether low and high are the least and the largest of all, which no more samples narrow.
    used_share
        of n the share that the interval is over.
    taken
        samples that were taken for each of n; where there are several rivals others choose the
        best.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    note: str = ""
    is_range: bool = True
    used_share: float = 1.0
    taken: float = 1.0


class Missing(NamedTuple):
    """Why a number is not there: which runs are missing, or what must be built.

    Missing runs come with the command that makes them.
    """

    why: str


def exactly(value: float, note: str = "") -> Finding:
    """A number without chance: counted, or printed."""
    return Finding(value, value, value, 1, note)


def estimated(found: Estimate) -> Finding:
    """A mean over samples."""
    return Finding(*found[:4], is_range=found.is_range)


def ranged(values: np.ndarray, note: str = "") -> Finding:
    """The median of [n] numbers with the least and the largest: all must lie within the bounds."""
    return Finding(
        float(np.median(values)), float(values.min()), float(values.max()), len(values), note
    )


def judge(criterion: Criterion, finding: Finding | Missing) -> Verdict:
    """Whether the whole interval meets the bounds (holds), or none of it does (fails).

    Fewer samples than n decide nothing.
    """
    if isinstance(finding, Missing):
        return Verdict.NOT_MEASURED
    if finding.n < criterion.n or finding.low is None or finding.high is None:
        return Verdict.UNDECIDED
    least = float("-inf") if criterion.at_least is None else criterion.at_least
    most = float("inf") if criterion.at_most is None else criterion.at_most
    if least <= finding.low and finding.high <= most:
        return Verdict.HOLDS
    return Verdict.FAILS if finding.high < least or finding.low > most else Verdict.UNDECIDED


def of_all(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim whose criteria that decide have these."""
    return min(verdicts, key=DECIDING.index, default=Verdict.NOT_TESTABLE)
