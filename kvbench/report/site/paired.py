"""Who beats whom: arms on the same samples, tested by pairs, and corrected for their number.

The test of a pair turns the signs of its differences at random (Fisher, The Design of Experiments,
1935, 21): all ways to turn them where the samples are few, else `FLIPS` of them from a fixed seed.
Holm's rule (1979) corrects for the number of pairs that could be told apart. "Not tested" is
another word than "not shown": too few samples, or none in common, say nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvbench.report.data.run import Run
from kvbench.report.data.stats import COVERAGE, FEWEST, Estimate

FLIPS = 9_999
ALL_UP_TO = 13  # samples of which all ways to turn the signs are taken: 2 ** 13
ALPHA = 1 - COVERAGE / 100
Verdict = Literal["better", "worse", "not shown", "not tested"]


class Paired(NamedTuple):
    """How far a run is ahead of another, the p value of that, and the least that it could be."""

    lead: float
    p: float
    least: float


def paired(first: Run, other: Run, kl: bool) -> Paired | None:
    """Two runs on the samples that both have and that failed in neither.

    In nats of KL or points of score, the plain mean over groups. None where they share fewer than
    `FEWEST` samples.
    """
    differences = first.differences([other], kl)
    differences[first.scores.failed] = np.nan
    there = ~np.isnan(differences)
    if there.sum() < FEWEST:
        return None
    groups = np.array(first.scores.groups)[there]
    _, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
    parts = differences[there] / counts[places] / len(counts) * (-1 if kl else 1)
    lead = float(parts.sum())
    turned = np.abs(_signs(len(parts)) @ parts)
    p = float(np.mean(turned >= abs(lead) - 1e-9))
    return Paired(lead, p, max(2.0 ** (1 - np.count_nonzero(parts)), 1 / len(turned)))


@functools.lru_cache(maxsize=16)
def _signs(n: int) -> np.ndarray:
    """[ways, n] signs; the first way turns none."""
    if n <= ALL_UP_TO:
        return 1.0 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    drawn = np.random.default_rng((0, n)).integers(0, 2, (FLIPS, n))
    return np.vstack([np.ones(n), 1.0 - 2.0 * drawn])


def holm(values: Sequence[float], least: Sequence[float] | None = None) -> list[bool]:
    """Which of these p values stand at 5 % for all of them together.

    Parameters
    ----------
    values
        of each pair.
    least
        the smallest that each could have. Pairs that could stand at no number are not counted
        (Tarone, Biometrics 46, 1990), such as those that differ in two samples.
    """
    least = least or [0.0] * len(values)
    count = next(
        (k for k in range(1, len(values) + 1) if sum(p <= ALPHA / k for p in least) <= k), 0
    )
    able = [place for place, p in enumerate(least) if count and p <= ALPHA / count]
    kept = [False] * len(values)
    for rank, place in enumerate(sorted(able, key=lambda place: values[place])):
        if values[place] > ALPHA / (len(able) - rank):
            break
        kept[place] = True
    return kept


def verdicts(pairs: Sequence[tuple[Run, Run]], kl: bool) -> list[Verdict]:
    """What may be said of the first run of each pair beside the second."""
    results = [paired(first, other, kl) for first, other in pairs]
    tested = [result for result in results if result is not None]
    kept = iter(holm([result.p for result in tested], [result.least for result in tested]))
    return [
        "not tested"
        if result is None
        else "not shown"
        if not next(kept)
        else "better"
        if result.lead > 0
        else "worse"
        for result in results
    ]


def word_of(lead: Estimate | None) -> Verdict:
    """What may be said of a paired difference by its interval."""
    if lead is None or lead.n < FEWEST:
        return "not tested"
    if not lead.differs:
        return "not shown"
    return "better" if lead.mean > 0 else "worse"
