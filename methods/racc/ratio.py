"""The compression ratio of RACC: the paper's formulas (appendix A.1) and what a generation really
held.

Of every n generated tokens a share alpha of all that is older stays, so what was kept i
compressions ago has shrunk to alpha^i of itself. All ratios are to the tokens that full attention
would hold at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def compression_ratio(alpha: float, compressions: int, beta: float) -> float:
    """P_R of formula (4): the share of generated tokens that are kept after so many compressions,
    plus retrieved ones.

    alpha (alpha^n - 1) / (n (alpha - 1)) + beta, the sum of alpha + alpha^2 + ... + alpha^n over n,
    plus beta.

    Parameters
    ----------
    alpha
        share of the older tokens that each compression keeps, in [0, 1].
    compressions
        n = generated tokens over tokens between two compressions, at least 1.
    beta
        retrieved tokens as a share.
    """
    if alpha == 1:
        return 1 + beta
    return alpha * (1 - alpha**compressions) / (compressions * (1 - alpha)) + beta


def alpha_for(ratio: float, compressions: int, beta: float) -> float:
    """The alpha whose `compression_ratio` is `ratio`; 1 where nothing need be dropped.

    Raises
    ------
    ValueError
        the retrieved tokens alone exceed the ratio.
    """
    if ratio <= beta:
        raise ValueError(
            f"a ratio of {ratio} is not above beta={beta}, the share that is retrieved"
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # formula (4) grows with alpha: halve the interval down to the last bit
        middle = (low + high) / 2
        if compression_ratio(middle, compressions, beta) < ratio:
            low = middle
        else:
            high = middle
    return high


def share(ratio: float, count: int) -> int:
    """`ratio` of `count`, rounded down; a product such as 0.29 * 100 = 28.999999999999996 is 29."""
    return math.floor(round(ratio * count, 9))


def retained(
    compressions: int,
    alpha: float,
    every: int,
    window: int,
    linked: Callable[[int], int] = lambda number: 0,
) -> int:
    """Generated tokens on the device right after the last of so many compressions, linked ones
    among them.

    Parameters
    ----------
    every, window
        n and w; the w most recent tokens are not compressed.
    linked
        retrieved tokens that compression number 1, 2, ... moves back and the next one compresses.
    """
    size = 0
    for number in range(1, compressions + 1):
        size = share(alpha, size + every - window) + window + linked(number)
    return size


def actual_ratio(entries: Sequence[float], total: float) -> dict[str, float]:
    """The ratio P that a generation had: at its end, on average over its steps, and at its peak.

    Parameters
    ----------
    entries
        tokens on the device after each step.
    total
        tokens that full attention would hold after the last.
    """
    if not entries or not total:
        return {}
    return {
        "ratio_end": entries[-1] / total,
        "ratio_mean": math.fsum(entries) / len(entries) / total,
        "ratio_peak": max(entries) / total,
    }
