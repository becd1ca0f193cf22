"""Intervals of scores on few samples, alone or paired.

Of 0/1 scores by Wilson, of their differences by Tango, of repeats by Student, of others by
bootstrap. Scores come in strata, one array for each group of samples (subset, length); the estimate
is the plain mean of their means. A bootstrap resamples each stratum on its own, n samples by n - 1
of them: n of n would have (n - 1) / n of the variance that the mean has, of pairs half (Rao and Wu,
Resampling Inference With Complex Survey Data, 1988). Strata of one sample show no spread alone;
they are resampled as one stratum, which shows at least the spread that they have (collapsed strata:
Cochran, Sampling Techniques, 1977, 5A.12). Small strata whose samples are all alike show none
either, such as tasks that are answered always or never: what they may hide is added as Wilson's
interval has it, between the least and the largest sample of all strata, for all of them together
(stratified as by Yan and Su 2010). The resamples follow from a fixed seed: the same scores give the
same interval in every process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
COVERAGE = 95  # per cent
Z = NormalDist().inv_cdf((1 + COVERAGE / 100) / 2)
SEED = 0
# Student's t of that coverage for 1 to 10 degrees of freedom; from there a series in 1 / degrees is
# right to .2 %.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
FEWEST = 8  # samples: fewer rank no methods
LEAST = 20  # points of full attention: on samples where it has fewer no method is ranked
# samples: of so few the ends of a percentile bootstrap are the least and the largest
RANGE_UP_TO = 3
SCORES = (0.0, 100.0)  # between which they lie
INTERVALS, RANGES = f"{COVERAGE} % intervals", "ranges"


def ranks(n: float, low: float | None, high: float | None) -> bool:
    """Whether n samples with this interval can say which of two methods is better.

    They are enough, and not all alike. No table, figure or page marks a number as better, best or
    different without it.
    """
    return n >= FEWEST and low is not None and high is not None and low < high


class Estimate(NamedTuple):
    """A mean over samples with its interval, in the units of the scores.

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


def is_0_1(values: np.ndarray) -> bool:
    """Whether all of these scores, 0..100, are one or the other."""
    return bool(np.isin(values, (0.0, 100.0)).all())


def proportion(strata: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means of scores that are 0 or 100, with Wilson's interval (1927).

    Between samples that all scored alike it has a width, as it should: 40 of 40 is 91.2 to 100. The
    k strata of n_i samples count as the k^2 / sum(1 / n_i) samples of one, whose mean would vary as
    theirs at most.

    Parameters
    ----------
    strata
        [n] each, none empty.
    """
    mean = sum(float(values.mean()) for values in strata) / len(strata)
    share, n = mean / 100, len(strata) ** 2 / sum(1 / len(values) for values in strata)
    centre, half = (
        share + Z**2 / (2 * n),
        Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)),
    )
    low, high = (100 * (centre + side) / (1 + Z**2 / n) for side in (-half, half))
    return Estimate(
        mean, max(0.0, min(mean, low)), min(100.0, max(mean, high)), sum(map(len, strata))
    )


def estimate(strata: Sequence[np.ndarray], bounds: tuple[float, float] | None = None) -> Estimate:
    """The mean of the strata's means, with a percentile interval of `RESAMPLES` resamples.

    After Efron (1979); wider by what strata without spread may hide.

    Parameters
    ----------
    strata
        [n] each, none empty; scores, or differences of scores on the same samples (paired
        bootstrap). There is no interval where one stratum alone has one sample.
    bounds
        between which samples may lie that nobody saw, where more than `RANGE_UP_TO` are all alike.
    """
    n = sum(map(len, strata))
    if bounds and n > RANGE_UP_TO and np.ptp(np.concatenate(strata)) == 0:
        return _constant_estimate(np.concatenate(strata), *bounds)
    mean = sum(float(values.mean()) for values in strata) / len(strata)
    means = _resampled(strata)
    if means is None:
        return Estimate(mean, None, None, n)
    tail = (100 - COVERAGE) / 2
    ends, every = np.percentile(means, [tail, 100 - tail]), np.concatenate(strata)
    low, high = (
        mean + side * math.hypot(max(0.0, side * (end - mean)), _hidden(strata, bound))
        for side, end, bound in zip((-1, 1), ends, (every.min(), every.max()), strict=True)
    )
    # The mean of scores that are all alike may be a last bit off them.
    low, high = min(mean, max(low, float(every.min()))), max(mean, min(high, float(every.max())))
    return Estimate(mean, low, high, n, n <= RANGE_UP_TO)


def _hidden(strata: Sequence[np.ndarray], bound: float) -> float:
    """How far the mean may lie nearer to a bound, by samples that strata without spread hide."""
    constant = [values for values in strata if len(values) > 1 and np.ptp(values) == 0]
    hidden = [
        Z**2 / (Z**2 + len(constant) * len(values)) * abs(bound - float(values[0]))
        for values in constant
    ]
    single = [float(values[0]) for values in strata if len(values) == 1]
    if len(set(single)) == 1:  # collapsed strata, as many
        hidden.append(len(single) * Z**2 / (Z**2 + len(single)) * abs(bound - single[0]))
    return sum(hidden) / len(strata)


def _constant_estimate(values: np.ndarray, least: float, most: float) -> Estimate:
    """The mean of [n] values that are all alike, with what samples elsewhere may hide.

    They lie anywhere between these bounds, as many as Wilson's interval has of one kind where none
    was seen.
    """
    mean, share = float(values[0]), Z**2 / (len(values) + Z**2)
    return Estimate(mean, mean - share * (mean - least), mean + share * (most - mean), len(values))


def difference(strata: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means of differences of scores on the same samples, in points.

    Of 0/1 scores with the score interval of paired proportions (Tango 1998), as bootstrap and
    normal ones have no width where all pairs are alike: 0 of 480 pairs that differ are up to .8
    points either way. That is the interval of other scores whose differences are all alike, too: of
    the share of samples in which they may differ, up to 100 points. Else it is as `estimate`.
    Strata count as in `proportion`.

    Parameters
    ----------
    strata
        [n] each, none empty.
    """
    every = np.concatenate(strata)
    if np.isin(every, (-100.0, 0.0, 100.0)).all():
        n = len(strata) ** 2 / sum(1 / len(values) for values in strata)
        shares = [[float((values == side).mean()) for values in strata] for side in (100, -100)]
        gained, lost = (n * sum(side_shares) / len(strata) for side_shares in shares)
        low, high = -100 * _most(lost, gained, n), 100 * _most(gained, lost, n)
        return Estimate(100 * (gained - lost) / n, low, high, len(every))
    if np.ptp(every) == 0:
        return _constant_estimate(every, -100.0, 100.0)
    return estimate(strata)


def _most(gained: float, lost: float, n: float) -> float:
    """The largest difference of two paired proportions that a score test does not reject.

    By bisection (Tango 1998).
    """
    least, most = (gained - lost) / n, 1.0
    for _ in range(50):
        middle = (least + most) / 2
        variance = middle * (1 - middle)
        linear = (2 * n - gained + lost) * middle - gained - lost
        # likeliest share of lost pairs
        alone = (math.sqrt(linear**2 + 8 * n * lost * variance) - linear) / (4 * n)
        if n * middle - gained + lost > Z * math.sqrt(n * (2 * alone + variance)):
            most = middle
        else:
            least = middle
    return most


def repeated(values: np.ndarray) -> Estimate:
    """The mean of repeats with Student's interval, which narrows with more of them.

    Parameters
    ----------
    values
        [n], a number of each repeat; of one there is no interval.
    """
    n, mean = len(values), float(values.mean())
    if n == 1:
        return Estimate(mean, None, None, n)
    half = student(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def student(degrees: int) -> float:
    """The two-sided t of `COVERAGE` per cent.

    Above ten degrees of freedom by Abramowitz and Stegun (1964), 26.7.5.
    """
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    return Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)


def ratio(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means of one number over that of another.

    Both are taken on the same samples (paired bootstrap).

    Parameters
    ----------
    above, below
        [n] each, none empty; not all of below are 0. There is no interval where one stratum alone
        has one sample, and where below is 0 on so many that a resample has nothing else.
    """
    n = sum(map(len, above))
    mean = sum(float(values.mean()) for values in above) / sum(
        float(values.mean()) for values in below
    )
    tops, bottoms = _resampled(above), _resampled(below)
    if tops is None or bottoms is None or not bottoms.all():
        return Estimate(mean, None, None, n)
    tail = (100 - COVERAGE) / 2
    low, high = np.percentile(tops / bottoms, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), n, n <= RANGE_UP_TO)


def _resampled(strata: Sequence[np.ndarray]) -> np.ndarray | None:
    """[RESAMPLES] means of the strata's means.

    None where one stratum alone has one sample, whose spread nothing shows.
    """
    single = [values for values in strata if len(values) == 1]
    if len(single) == 1:
        return None
    several = [values for values in strata if len(values) > 1]
    sums = [_weights(len(values), index) @ values for index, values in enumerate(several)]
    if single:
        sums.append(len(single) * _weights(len(single), len(several)) @ np.concatenate(single))
    return np.sum(sums, axis=0) / len(strata)


@functools.lru_cache(maxsize=32)
def _weights(n: int, stratum: int) -> np.ndarray:
    """[RESAMPLES, n] how much of a resample each of n samples is.

    Strata of one size have weights of their own.
    """
    rng = np.random.default_rng((SEED, n, stratum))
    return rng.multinomial(n - 1, np.full(n, 1 / n), size=RESAMPLES) / (n - 1)
