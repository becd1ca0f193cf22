"""Where one method becomes faster than another."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvbench.runs.quantities import QUANTITIES

TIME = QUANTITIES["tpot_ms_mean"]
Times = Mapping[int, float]  # milliseconds a token by prompt tokens


def crossing(method: Times, full: Times) -> float | None:
    """Prompt tokens from which on a method is faster than full attention.

    Only the lengths that both have count. Between two lengths it is interpolated, both axes
    logarithmic. It is the shortest length if the method is faster at all of them, and None if it is
    not faster at the longest.
    """
    lengths = sorted(method.keys() & full.keys())
    ratios = [math.log(method[tokens] / full[tokens]) for tokens in lengths]
    if not ratios or ratios[-1] >= 0:
        return None
    slower = [index for index, ratio in enumerate(ratios) if ratio >= 0]
    if not slower:
        return float(lengths[0])
    last = slower[-1]
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** share)
