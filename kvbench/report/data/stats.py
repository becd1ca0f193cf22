"""Intervals of means over few samples: scores, their differences, other numbers, ratios.

Numbers come in strata, one array for each group of samples (subset, length); a mean is the plain
mean of the strata's means, and its variance is what the spread within strata says (strata of one
sample are taken as one stratum, which shows at least the spread that they have: Cochran, Sampling
Techniques, 1977, 5A.12). All is closed form, so that the same samples have the same interval in any
order. tests/test_coverage.py simulates how often each interval holds the truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

COVERAGE = 95  # per cent
FEWEST = 8  # samples: fewer rank no methods
LEAST = 20  # points of full attention: on samples where it has fewer no method is ranked
RANGE_UP_TO = 3  # samples: of so few the least and the largest are shown, which is called a range
CAUTION = 3.0  # groups differ in how much their samples vary (see `mean_score`)
INTERVALS, RANGES = f"{COVERAGE} % intervals", "ranges"


def ranks(n: float, low: float | None, high: float | None) -> bool:
    """Whether n samples with this interval can say which of two methods is better.

    They are enough, and not all alike. No table, figure or page marks a number as better, best or
    different without it.
    """
    return n >= FEWEST and low is not None and high is not None and low < high


class Estimate(NamedTuple):
    """A mean over samples with its interval, in the units of the samples.

    The ends are None where there are too few samples.

    Attributes
    ----------
    n
        samples.
    is_range
        low and high are the least and the largest that was seen, and no interval.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    is_range: bool = False

    @property
    def differs(self) -> bool:
        """Whether a difference is more than chance: samples rank, and 0 is outside the interval."""
        if self.low is None or self.high is None:
            return False
        return ranks(self.n, self.low, self.high) and not self.low <= 0 <= self.high

    @property
    def turned(self) -> Estimate:
        """The same difference, taken the other way round."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return self._replace(mean=-self.mean, low=low, high=high)


def intervals(estimates: Iterable[Estimate]) -> str:
    """What the intervals of these estimates are called: intervals, ranges, or both."""
    kinds = {interval.is_range for interval in estimates if interval.low is not None}
    if len(kinds) > 1:
        return f"{INTERVALS}, {RANGES} of {RANGE_UP_TO} samples or fewer"
    return RANGES if True in kinds else INTERVALS


def student(degrees: float, coverage: float = COVERAGE) -> float:
    """The two-sided t of so many degrees of freedom; the normal's z of infinitely many."""
    return float(stdtrit(degrees, (1 + coverage / 100) / 2))


# -- scores ----------------------------------------------------------------------------------------


def mean_score(strata: Sequence[np.ndarray], coverage: float = COVERAGE) -> Estimate:
    """The mean of the strata's means of scores of 0 to 100.

    One stratum of 0/1 scores has Wilson's interval (1927). Of other scores, and of several strata,
    the variance is not known by the mean alone: it is taken from the spread in each stratum and one
    sample more, whose variance is `CAUTION` times that of all samples, and 0/1 scores' at most; and
    n is the number of 0/1 samples of one stratum whose mean would vary as much (effective sample
    size, Korn and Graubard 1998), with Student's t of Satterthwaite's degrees of freedom (1946) for
    z; or, where that is narrower, Wilson's of 0/1 scores, than which none vary more. So samples
    that are all alike have an interval, too: 0 in 13 of 13 is 0 to 22.8.

    Parameters
    ----------
    strata
        [n] each, none empty.
    coverage
        of the interval, per cent.
    """
    shares = [values / 100 for values in strata]
    mean = sum(float(values.mean()) for values in shares) / len(shares)
    n = len(shares) ** 2 / sum(1 / len(values) for values in shares)
    width = student(math.inf, coverage) ** 2 / n  # z^2 / n, by which Wilson's interval goes
    if mean * (1 - mean) > 1e-12 and not (len(shares) == 1 and np.isin(shares[0], (0, 1)).all()):
        every = np.concatenate(shares)
        # their variance over that of 0/1 shares of the same mean
        dispersion = float(every.var()) / (float(every.mean()) * (1 - float(every.mean())))
        dispersion = min(1.0, CAUTION * dispersion or 1.0)
        spread = _spread(shares, mean, dispersion)
        own = student(spread.degrees, coverage) ** 2 * spread.variance / (mean * (1 - mean))
        width = min(width, own)  # no scores vary more than those that are 0 or 1
    centre = mean + width / 2
    half = math.sqrt(max(0.0, width * mean * (1 - mean)) + width**2 / 4)
    low, high = (100 * (centre + side) / (1 + width) for side in (-half, half))
    return Estimate(
        100 * mean,
        min(100 * mean, max(0.0, low)),
        max(100 * mean, min(100.0, high)),
        sum(map(len, strata)),
    )


def difference(strata: Sequence[np.ndarray], coverage: float = COVERAGE) -> Estimate:
    """The mean of the strata's means of differences of scores on the same samples, in points.

    It is what was gained less what was lost, each with the interval of `mean_score` between 0 and
    the largest difference that was seen, and both together by MOVER with their correlation within
    strata (Zou and Donner 2008; of 0/1 scores Newcombe 1998). So it has a width where all pairs are
    alike: 0 of 480 pairs that differ are up to .8 points either way.

    Parameters
    ----------
    strata
        [n] each, none empty.
    coverage
        of the interval, per cent.
    """
    largest = max(float(np.abs(values).max()) for values in strata) or 100.0
    shares = [100 * values / largest for values in strata]
    gains, losses = ([np.clip(side * values, 0, None) for values in shares] for side in (1, -1))
    gained, lost = mean_score(gains, coverage), mean_score(losses, coverage)
    assert gained.low is not None and gained.high is not None
    assert lost.low is not None and lost.high is not None
    both = _correlation(gains, losses)
    low = _together(gained.mean - gained.low, lost.high - lost.mean, both)
    high = _together(gained.high - gained.mean, lost.mean - lost.low, both)
    mean, low, high = (part * largest / 100 for part in (gained.mean - lost.mean, low, high))
    return Estimate(mean, mean - low, mean + high, gained.n)


def _together(first: float, second: float, correlation: float) -> float:
    """The distance to an end of a difference, by those to the ends of its parts."""
    return math.sqrt(max(0.0, first**2 + second**2 - 2 * correlation * first * second))


def _correlation(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """Of two numbers on the same samples, within strata; 0 where one of them does not vary."""
    a, b = (np.concatenate([values - values.mean() for values in some]) for some in (first, second))
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm > 0 else 0.0


# -- other numbers ---------------------------------------------------------------------------------


def estimate(strata: Sequence[np.ndarray], coverage: float = COVERAGE) -> Estimate:
    """The mean of the strata's means of any numbers, with Student's interval.

    Of numbers that are never negative, such as a KL divergence or a time, it is Student's of the
    mean's logarithm (delta method), as they are skewed. There is no interval of one sample, nor of
    a stratum that alone has one.

    Parameters
    ----------
    strata
        [n] each, none empty.
    coverage
        of the interval, per cent.
    """
    every = np.concatenate(strata)
    n, mean = len(every), sum(float(values.mean()) for values in strata) / len(strata)
    if sum(len(values) == 1 for values in strata) == 1:
        return Estimate(mean, None, None, n)
    if n <= RANGE_UP_TO:
        return Estimate(mean, float(every.min()), float(every.max()), n, is_range=True)
    half = _half(strata, coverage)
    if mean > 0 and every.min() >= 0:
        return Estimate(mean, mean * math.exp(-half / mean), mean * math.exp(half / mean), n)
    return Estimate(mean, mean - half, mean + half, n)


def ratio(
    above: Sequence[np.ndarray], below: Sequence[np.ndarray], coverage: float = COVERAGE
) -> Estimate:
    """The mean of the strata's means of one number over that of another on the same samples.

    With Student's interval of its logarithm, whose variance is that of the samples' parts of both
    means (delta method, paired).

    Parameters
    ----------
    above, below
        [n] each, none empty, none negative; not all of below are 0. There is no interval of one
        sample, nor of a stratum that alone has one, nor of a ratio of 0.
    coverage
        of the interval, per cent.
    """
    n = sum(map(len, above))
    top, bottom = (
        sum(float(values.mean()) for values in some) / len(some) for some in (above, below)
    )
    value = top / bottom
    if sum(len(values) == 1 for values in above) == 1 or value == 0:
        return Estimate(value, None, None, n)
    if n <= RANGE_UP_TO:
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.concatenate(above) / np.concatenate(below)
        return Estimate(value, float(each.min()), float(each.max()), n, is_range=True)
    parts = [over / top - under / bottom for over, under in zip(above, below, strict=True)]
    factor = math.exp(_half(parts, coverage))
    return Estimate(value, value / factor, value * factor, n)


def _half(strata: Sequence[np.ndarray], coverage: float) -> float:
    """Half the width of Student's interval; 0 where nothing varies."""
    spread = _spread(strata)
    if spread.variance == 0:
        return 0.0
    return student(spread.degrees, coverage) * math.sqrt(spread.variance)


class _Spread(NamedTuple):
    """The variance of a mean of strata's means, and the degrees of freedom of that variance."""

    variance: float
    degrees: float


def _spread(
    strata: Sequence[np.ndarray], prior: float | None = None, dispersion: float = 1.0
) -> _Spread:
    """How a mean of strata's means varies, by the spread in each of them.

    Parameters
    ----------
    prior
        the mean over all strata of shares of 0 to 1: each stratum counts as one sample more, with
        the variance of 0/1 shares there times this dispersion. None: it does not.
    """
    single = [values for values in strata if len(values) == 1]
    pooled = [np.concatenate(single)] if single else []
    several = [values for values in strata if len(values) > 1]
    variances, degrees = [], []
    for values, weight in (
        *((some, 1) for some in several),
        *((some, len(single)) for some in pooled),
    ):
        n = len(values)
        squares, freedom = float(((values - values.mean()) ** 2).sum()), n - 1
        if prior is not None:
            share = (float(values.sum()) + prior) / (n + 1)
            squares, freedom = squares + dispersion * share * (1 - share), n
        variances.append(weight**2 * squares / freedom / n if freedom else 0.0)
        degrees.append(freedom)
    whole = sum(variances)
    parts = sum(
        part**2 / freedom for part, freedom in zip(variances, degrees, strict=True) if freedom
    )
    return _Spread(whole / len(strata) ** 2, whole**2 / parts if parts else 1.0)
