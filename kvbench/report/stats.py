"""What can be said of scores on few samples: bootstrap intervals, alone and paired.

Scores come in strata, one array for each group of samples (subset, length); the estimate is the plain mean of their
means, and each stratum is resampled on its own. The resamples follow from a fixed seed, so the same scores give the
same interval in every process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
COVERAGE = 95  # per cent, between two percentiles
SEED = 0


class Estimate(NamedTuple):
    """A mean over samples with its bootstrap interval, in the units of the scores; None where a stratum has one sample.

    Attributes:
        n: samples.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(strata: Sequence[np.ndarray]) -> Estimate:
    """The mean of the strata's means, with the percentile interval of `RESAMPLES` resamples (Efron 1979).

    Args:
        strata: [n] each, none empty; scores, or differences of scores on the same samples (paired bootstrap).
    """
    n = sum(map(len, strata))
    mean = sum(float(values.mean()) for values in strata) / len(strata)
    if min(map(len, strata)) < 2:
        return Estimate(mean, None, None, n)
    means = sum(_weights(len(values), index) @ values for index, values in enumerate(strata)) / len(strata)
    tail = (100 - COVERAGE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), n)


@functools.lru_cache(maxsize=32)
def _weights(n: int, stratum: int) -> np.ndarray:
    """[RESAMPLES, n] how much of a resample of n samples each is; strata of one size are resampled apart."""
    rng = np.random.default_rng((SEED, n, stratum))
    return rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
