"""What can honestly be said of a run: its score with an interval, the same samples under full attention, and marks.

A score is the plain mean over its groups of samples. It is compared with full attention sample by sample, so that what
makes all methods' samples hard or easy drops out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvbench.report.frame import YARDSTICK, Runs, Scores, missing
from kvbench.report.stats import COVERAGE, Estimate, estimate
from kvbench.runs.summary import DISTURBED

WIDE = 2  # times of repeats that lie further apart are marked

# Marks stand beside a number, and a table says below what those in it mean.
MARKS = {
    "a": "counted: weights, what the stores reserve, and the index; on a GPU the most that torch's allocator held",
    "b": f"scores better than full attention on the same samples, beyond noise (paired bootstrap, {COVERAGE} %): look "
    "for the reason before believing it",
    "c": "simulated transfers: copies from memory to memory, as there is no GPU",
    "d": "random (dummy) weights: bytes and times have a meaning, scores have none",
    "e": "attended in place: bytes to a device were counted, not copied, and are in no time",
    "f": "with failed samples, which count 0",
    "g": "on texts that kvbench generates, not on the files of RULER's own scripts (task.haystack, task.squad, "
    "task.hotpotqa, task.words): other samples than the paper's, so no difference is shown",
    "l": "without the times of some samples, taken on another machine, with other threads or beside other work",
    "m": "under another protocol than most of the table",
    "o": "a sample broke its method's own budget rule",
    "t": f"timed beside other work, which took {100 * DISTURBED:.0f} % of the cores or more: not a time of the method",
    "u": "unfinished: not all samples yet",
    "v": f"the largest of these times is more than {WIDE} times the least: look for what disturbed them",
}


def transfer_marks(transfer: object) -> str:
    """The letters for times of runs whose `transfer` is this: how tokens came to the device, where there was none."""
    return "c" * ("simulated" in str(transfer)) + "e" * ("in place" in str(transfer))


def time_marks(measured: Mapping[str, Any], name: str) -> str:
    """The letters for a time by its name, in a line of `Runs.arms` or `Runs.cells`: when and where it was taken."""
    low, high = measured["spread"].get(name, (0.0, 0.0))
    found = {
        "l": not missing(measured["left_out"]) and measured["left_out"] > 0,
        "t": measured["disturbed"] in (True,),  # and not NaN
        "v": high > WIDE * low,
    }
    return "".join(mark for mark, there in found.items() if there)


# What full attention does not depend on.
NOT_OF_FULL = {"budget", "attention", "shared_prefill", "dense_layers", "probe.every"} | {
    f"protocol.{key}" for key in ("accounting", "dense_layers", "generated")
}


class Evidence:
    """The scores of runs, alone and against full attention."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._full: dict[tuple[str, ...], list[int]] = {}
        self._against: dict[tuple[int, tuple[str, ...]], Estimate | None] = {}
        for run, arm in runs.arm.items():
            if arm["method"] == YARDSTICK:
                self._full.setdefault(self._kind(run), []).append(run)

    def score(self, run: int, groups: tuple[str, ...] = ()) -> Estimate:
        """The score of a run, 0-100: of these groups (all: ()), each a stratum."""
        scores = self.runs.scores[run]
        return estimate([scores.values[rows] for rows in _strata(scores, groups)])

    def against_full(self, run: int, groups: tuple[str, ...] = ()) -> Estimate | None:
        """The mean difference to full attention on the same samples of the same model, task and protocol, in points.

        None for full attention itself, and where no such run has two of the samples of each group. Samples that
        failed under full attention are left out: nothing is known of them. Computed once.
        """
        key = (run, groups)
        if key not in self._against:
            self._against[key] = self._compared(run, groups)
        return self._against[key]

    def _compared(self, run: int, groups: tuple[str, ...]) -> Estimate | None:
        full = self._full_of(run)
        if full is None:
            return None
        ours, theirs = self.runs.scores[run], self.runs.scores[full]
        known = {
            key: value for key, value, lost in zip(theirs.ids, theirs.values, theirs.failed, strict=True) if not lost
        }
        other = np.array([known.get(key, np.nan) for key in ours.ids])
        differences = ours.values - other
        strata = [differences[rows] for rows in _strata(ours, groups)]
        strata = [values[~np.isnan(values)] for values in strata]
        return estimate(strata) if min(map(len, strata)) > 1 else None

    def marks(self, run: int, groups: tuple[str, ...] = ()) -> str:
        """The letters of `MARKS` that a run's score deserves, but for the table's own (m)."""
        arm, scores = self.runs.arm[run], self.runs.scores[run]
        against = self.against_full(run, groups)
        failed = any(scores.failed[rows].any() for rows in _strata(scores, groups))
        found = {
            "b": against is not None and against.low is not None and against.low > 0,
            "d": arm["weights"] == "random",
            "f": failed,
            "o": arm["over_rule"] in (True,),  # and not NaN
            "u": not arm["finished"],
        }
        return "".join(mark for mark, there in found.items() if there)

    def failed(self, run: int, groups: tuple[str, ...] = ()) -> int:
        """Failed samples of these groups."""
        scores = self.runs.scores[run]
        return sum(int(scores.failed[rows].sum()) for rows in _strata(scores, groups))

    def _full_of(self, run: int) -> int | None:
        """The full attention run to compare with: of those alike, the one with the most samples, then the newest."""
        alike = self._full.get(self._kind(run), [])
        if run in alike:
            return None
        arm = self.runs.arm
        return max(alike, key=lambda full: (arm[full]["n"], arm[full]["updated"]), default=None)

    def _kind(self, run: int) -> tuple[str, ...]:
        """All that two runs must share to be compared sample by sample."""
        shared = [f"{key}={value}" for key, value in self.runs.setting[run].items() if _is_shared(key)]
        return (*shared, str(self.runs.arm[run]["data"]))


def _is_shared(key: str) -> bool:
    return key != "method" and not key.startswith("method.") and key not in NOT_OF_FULL


def _strata(scores: Scores, groups: tuple[str, ...]) -> list[np.ndarray]:
    """[n] bool of each group's samples."""
    names = np.array(scores.groups)
    return [names == group for group in groups or dict.fromkeys(scores.groups)]
