"""How often a 95 % interval holds the truth, simulated on made samples whose truth is known.

Wanted: 93 to 97 %. Where scores are few steps from their floor no interval can err in 5 %: it errs less (the numbers
above 97). `python tests/test_coverage.py` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from kvbench.report.data.stats import Estimate, difference, estimate, mean_score, ratio

Strata = Sequence[np.ndarray]
RNG = np.random.Generator
STEPS = (1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 10, 3, 1)  # parts of an answer in RULER's 13 tasks
TASKS = {  # the share of parts that is found, of each
    "near the floor": (0, 0, 0, 0, 0, 0, 0, 0, 0.02, 0.05, 0.1, 0.1, 0.2),
    "in the middle": (0, 0, 0.05, 0.3, 0.5, 0.6, 0.8, 0.9, 1, 1, 1, 1, 0.95),
    "near the top": (1, 1, 1, 1, 1, 1, 0.98, 0.95, 0.95, 0.9, 0.8, 0.7, 0.6),
}
CHANGES = ((0, 0),) * 5 + ((0, 0.1), (0.05, 0.05), (0.1, 0.3), (0, 0.9), (0, 1), (0.2, 0.2), (0, 0.5), (0.02, 0.1))


class Made(NamedTuple):
    """Samples that can be drawn again and again, the mean that they have, and its interval."""

    name: str
    draw: Callable[[RNG], Strata]
    truth: float
    interval: Callable[[Strata], Estimate]
    exact: bool  # no floor is near: the interval is to err in 3 to 7 %


def whole_and_half(n: int, share: float) -> Made:
    return Made(f"0/1, n={n}, p={share}", lambda r: [100.0 * (r.random(n) < share)], 100 * share, mean_score, False)


def in_steps(n: int, share: float) -> Made:
    """Four needles a prompt, which are found together or not."""
    return Made(
        f"quarters, n={n}, p={share}",
        lambda r: [25.0 * r.binomial(4, r.beta(share, 1 - share, n))],
        100 * share,
        mean_score,
        n * min(share, 1 - share) >= 2.5,
    )


def ruler(name: str, a_task: int) -> Made:
    return Made(
        f"13 tasks of {a_task}, {name}",
        lambda r: [100 * r.binomial(steps, p, a_task) / steps for p, steps in zip(TASKS[name], STEPS, strict=True)],
        100 * float(np.mean(TASKS[name])),
        mean_score,
        a_task >= 8,
    )


def changed(r: RNG, n: int, gained: float, lost: float, steps: int) -> np.ndarray:
    draws = r.random(n)
    side = (draws < gained).astype(float) - ((draws >= gained) & (draws < gained + lost))
    return 100 * side * r.integers(1, steps + 1, n) / steps


def pairs(n: int, gained: float, lost: float, steps: int) -> Made:
    return Made(
        f"pairs, n={n}, +{gained} -{lost}, {steps} steps",
        lambda r: [changed(r, n, gained, lost, steps)],
        100 * (gained - lost) * (steps + 1) / 2 / steps,
        difference,
        n * min(gained, lost) >= 5,
    )


def ruler_pairs(a_task: int) -> Made:
    means = [100 * (up - down) * (steps + 1) / 2 / steps for (up, down), steps in zip(CHANGES, STEPS, strict=True)]
    return Made(
        f"pairs, 13 tasks of {a_task}",
        lambda r: [changed(r, a_task, *change, steps) for change, steps in zip(CHANGES, STEPS, strict=True)],
        float(np.mean(means)),
        difference,
        a_task >= 8,
    )


def divergences(n: int, spread: float, strata: int = 1) -> Made:
    """Lognormal; of the shipped runs' KL the spread of logarithms is .2 to .65."""
    return Made(
        f"KL, n={n}{f' of {strata} lengths' if strata > 1 else ''}, spread {spread}",
        lambda r: [np.exp(spread * r.standard_normal(n // strata)) for _ in range(strata)],
        float(np.exp(spread**2 / 2)),
        estimate,
        spread < 0.6,
    )


def of_two(n: int, spread: float) -> Made:
    def drawn(r: RNG) -> Strata:
        below = np.exp(spread * r.standard_normal(n))
        return [2 * below * np.exp(0.3 * r.standard_normal(n)), below]

    truth = 2 * float(np.exp(0.3**2 / 2))
    return Made(f"KL over KL, n={n}, spread {spread}", drawn, truth, lambda two: ratio(two[:1], two[1:]), n >= 26)


CASES = [
    *(whole_and_half(n, share) for n in (12, 26, 104) for share in (0.05, 0.3)),
    *(in_steps(n, share) for n in (12, 26, 104) for share in (0.05, 0.2, 0.5, 0.9)),
    *(ruler(name, a_task) for name in TASKS for a_task in (1, 2, 8)),
    *(pairs(n, *change, steps) for n in (12, 26, 104) for change in ((0.05, 0.3), (0.3, 0.3)) for steps in (1, 4)),
    *(pairs(n, 0, 0.1, 4) for n in (26, 104)),
    *map(ruler_pairs, (1, 2, 8)),
    *(divergences(n, spread) for n in (12, 26, 48) for spread in (0.3, 0.6)),
    divergences(12, 0.3, 3),
    *(of_two(n, 0.4) for n in (12, 26, 48)),
]


def coverage(made: Made, draws: int) -> float:
    """Per cent of intervals that hold the truth."""
    rng, held = np.random.default_rng(11), 0
    for _ in range(draws):
        found = made.interval(made.draw(rng))
        assert found.low is not None and found.high is not None
        held += found.low - 1e-9 <= made.truth <= found.high + 1e-9
    return 100 * held / draws


@pytest.mark.parametrize("made", CASES[::4], ids=[made.name for made in CASES[::4]])
def test_some_intervals_hold_the_truth_as_often_as_they_say(made: Made) -> None:
    found = coverage(made, 300)  # whose own error is 1.3 points
    assert found >= 90 and (not made.exact or found <= 99.4)


@pytest.mark.slow
@pytest.mark.parametrize("made", CASES, ids=[made.name for made in CASES])
def test_intervals_hold_the_truth_as_often_as_they_say(made: Made) -> None:
    found = coverage(made, 4000)  # whose own error is .34 points
    assert found >= 92.3 and (not made.exact or found <= 97.7)


if __name__ == "__main__":
    for made in CASES:
        print(f"| {made.name} | {coverage(made, 4000):.1f} |")
