"""What can be said of scores on few samples: intervals, of 0/1 scores by Wilson, of others by bootstrap; paired ones.

Scores come in strata, one array for each group of samples (subset, length); the estimate is the plain mean of their
means. A bootstrap resamples each stratum on its own. Strata of one sample show no spread alone; they are resampled as
one stratum, which shows at least the spread that they have (collapsed strata: Cochran, Sampling Techniques, 1977,
5A.12). The resamples follow from a fixed seed: the same scores give the same interval in every process.
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
FEWEST = 8  # samples: fewer rank no methods
RANGE_UP_TO = 3  # samples: of so few the ends of a percentile bootstrap are the least and the largest
INTERVALS, RANGES = f"{COVERAGE} % intervals", "ranges"


def ranks(n: float, low: float | None, high: float | None) -> bool:
    """Whether n samples with this interval say which of two methods is better: enough of them, and not all alike.

    No table, figure or page marks a number as better, best or different without it.
    """
    return n >= FEWEST and low is not None and high is not None and low < high


class Estimate(NamedTuple):
    """A mean over samples with its interval, in the units of the scores; None where there are too few samples for one.

    Attributes:
        n: samples.
        is_range: low and high are the least and the largest that was seen, and no interval.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    is_range: bool = False

    @property
    def differs(self) -> bool:
        """Whether a difference is more than chance: its samples rank, and 0 is not in its interval."""
        return ranks(self.n, self.low, self.high) and not self.low <= 0 <= self.high  # type: ignore[operator]


def intervals(found: Iterable[Estimate]) -> str:
    """What the intervals of these estimates are called: intervals, ranges, or both."""
    kinds = {one.is_range for one in found if one.low is not None}
    if len(kinds) > 1:
        return f"{INTERVALS}, {RANGES} of {RANGE_UP_TO} samples or fewer"
    return RANGES if True in kinds else INTERVALS


def is_0_1(values: np.ndarray) -> bool:
    """Whether all of these scores, 0..100, are one or the other."""
    return bool(np.isin(values, (0.0, 100.0)).all())


def proportion(strata: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means of scores that are 0 or 100, with Wilson's interval (1927).

    Between samples that all scored alike it has a width, as it should: 40 of 40 is 91.2 to 100. The k strata of n_i
    samples count as the k^2 / sum(1 / n_i) samples of one, whose mean would vary as theirs at most.

    Args:
        strata: [n] each, none empty.
    """
    mean = sum(float(values.mean()) for values in strata) / len(strata)
    share, n = mean / 100, len(strata) ** 2 / sum(1 / len(values) for values in strata)
    centre, half = share + Z**2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = (100 * (centre + side) / (1 + Z**2 / n) for side in (-half, half))
    return Estimate(mean, max(0.0, min(mean, low)), min(100.0, max(mean, high)), sum(map(len, strata)))


def estimate(strata: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means, with the percentile interval of `RESAMPLES` resamples (Efron 1979).

    Args:
        strata: [n] each, none empty; scores, or differences of scores on the same samples (paired bootstrap). There is
            no interval where one stratum alone has one sample.
    """
    n = sum(map(len, strata))
    mean = sum(float(values.mean()) for values in strata) / len(strata)
    means = _resampled(strata)
    if means is None:
        return Estimate(mean, None, None, n)
    tail = (100 - COVERAGE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), n, n <= RANGE_UP_TO)


def ratio(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means of one number over that of another, taken on the same samples (paired bootstrap).

    Args:
        above, below: [n] each, none empty. There is no interval where one stratum alone has one sample.
    """
    n = sum(map(len, above))
    mean = sum(float(own.mean()) for own in above) / sum(float(own.mean()) for own in below)
    tops, bottoms = _resampled(above), _resampled(below)
    if tops is None or bottoms is None:
        return Estimate(mean, None, None, n)
    tail = (100 - COVERAGE) / 2
    low, high = np.percentile(tops / bottoms, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), n, n <= RANGE_UP_TO)


def _resampled(strata: Sequence[np.ndarray]) -> np.ndarray | None:
    """[RESAMPLES] means of the strata's means; None where one alone has one sample, whose spread nothing shows."""
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
    """[RESAMPLES, n] how much of a resample of n samples each is; strata of one size have weights of their own."""
    rng = np.random.default_rng((SEED, n, stratum))
    return rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
