"""What can honestly be said of a run: its score with an interval, the same samples under full attention, and marks.

A score is the plain mean over its groups of samples. It is compared with full attention sample by sample, so that what
makes all methods' samples hard or easy drops out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvbench.memory.kinds import NATIVE
from kvbench.report.data.frame import YARDSTICK, Runs, Scores, missing
from kvbench.report.data.stats import COVERAGE, Estimate, estimate, is_0_1, proportion
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
    "n": f"timed beside other work, which took {100 * DISTURBED:.0f} % of the cores or more: not a time of the method",
    "o": "a sample broke its method's own budget rule",
    "t": "prompts were cut in their middle, to the model's window or task.max_length: part of them was never read",
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
        "n": measured["disturbed"] in (True,),  # and not NaN
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
        self._partial = scored_in_parts(runs)
        self._against: dict[tuple[int, tuple[str, ...]], Estimate | None] = {}
        for run, arm in runs.arm.items():
            if arm["method"] == YARDSTICK:
                self._full.setdefault((*self.kind(run), runs.setting[run]["kv"]), []).append(run)

    def score(self, run: int, groups: tuple[str, ...] = ()) -> Estimate:
        """The score of a run, 0-100: of these groups (all: ()), each a stratum.

        With Wilson's interval where no run of the task has other scores than 0 and 100, else a bootstrap's.
        """
        scores = self.runs.scores[run]
        strata = [_samples(scores, scores.values, rows) for rows in _strata(scores, groups)]
        whole = what_scores(self.runs, run) not in self._partial and all(map(is_0_1, strata))
        return proportion(strata) if whole else estimate(strata)

    def kl(self, run: int) -> Estimate | None:
        """The mean KL divergence from full attention over a run's samples, in nats; None where there is none."""
        scores = self.runs.scores[run]
        found = _samples(scores, scores.kl, np.ones(len(scores.kl), bool))
        return estimate([found]) if len(found) else None

    def seeds(self, run: int, groups: tuple[str, ...] = ()) -> dict[str, float]:
        """The score of these groups (all: ()) under each of the seeds that a run stands for."""
        scores = self.runs.scores[run]
        of = {seed: np.array([one == seed for one in scores.seeds]) for seed in dict.fromkeys(scores.seeds)}
        strata = _strata(scores, groups)
        return {
            seed: float(np.mean([scores.values[rows & own].mean() for rows in strata if (rows & own).any()]))
            for seed, own in of.items()
        }

    def against_full(self, run: int, groups: tuple[str, ...] = ()) -> Estimate | None:
        """The mean difference to full attention on the same samples of the same model, task and protocol, in points.

        None for full attention itself, and where no such run has two of the samples, and some of each group. Samples
        that failed under full attention are left out: nothing is known of them. Computed once.
        """
        key = (run, groups)
        if key not in self._against:
            self._against[key] = self._compared(run, groups)
        return self._against[key]

    def _compared(self, run: int, groups: tuple[str, ...]) -> Estimate | None:
        ours, known = self.runs.scores[run], self._known(run)
        other = np.array([known.get(key, np.nan) for key in zip(ours.seeds, ours.ids, strict=True)])
        strata = [_samples(ours, ours.values - other, rows) for rows in _strata(ours, groups)]
        found = estimate(strata) if all(map(len, strata)) else None
        return found if found is not None and found.low is not None else None

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
            "t": (arm["cut_samples"] or 0) > 0,
            "u": not arm["finished"],
        }
        return "".join(mark for mark, there in found.items() if there)

    def failed(self, run: int, groups: tuple[str, ...] = ()) -> int:
        """Failed samples of these groups."""
        scores = self.runs.scores[run]
        return sum(int(scores.failed[rows].sum()) for rows in _strata(scores, groups))

    def yardstick(self, run: int, kv: str = str(NATIVE)) -> int | None:
        """The run of full attention that a run is compared with first, itself where it is one; None without one.

        Args:
            kv: how that holds keys and values; scores are compared with native ones.
        """
        alike, arm = self._full.get((*self.kind(run), kv), []), self.runs.arm
        return max(
            alike, key=lambda one: (not arm[one]["probe_every"], arm[one]["n"], arm[one]["updated"]), default=None
        )

    def _known(self, run: int) -> dict[tuple[str, ...], float]:
        """The scores of full attention to compare with, by seed and id; none for full attention itself.

        Of several runs the one with the most samples counts, then the newest. What failed is not known.
        """
        alike, arm = self._full.get((*self.kind(run), str(NATIVE)), []), self.runs.arm
        if run in alike:
            return {}
        found = {}
        for full in sorted(alike, key=lambda one: (arm[one]["n"], arm[one]["updated"])):
            theirs = self.runs.scores[full]
            for *key, value, lost in zip(theirs.seeds, theirs.ids, theirs.values, theirs.failed, strict=True):
                if not lost:
                    found[tuple(key)] = value
        return found

    def kind(self, run: int) -> tuple[str, ...]:
        """All that two runs must share to be compared sample by sample; beside the seed, which samples have."""
        shared = [f"{key}={value}" for key, value in but_for_seed(self.runs, run).items() if is_shared(key)]
        return (*shared, str(self.runs.arm[run]["data"]))


def what_scores(runs: Runs, run: int) -> tuple[str, str]:
    """The task and the metric of a run."""
    return runs.arm[run]["task"], runs.arm[run]["metric"]


def scored_in_parts(runs: Runs) -> set[tuple[str, str]]:
    """The tasks and metrics of which any sample has another score than 0 and 100.

    A share of steps or words that is 100 in all samples of one run is no 0/1 score all the same.
    """
    return {what_scores(runs, run) for run in runs.arm if not is_0_1(runs.scores[run].values)}


def but_for_seed(runs: Runs, run: int) -> dict[str, Any]:
    """The settings of a run without its seed, which is that of random weights, too."""
    settings = {key: value for key, value in runs.setting[run].items() if key != "seed"}
    random = runs.arm[run]["weights"] == "random"
    return {**settings, "model.revision": "dummy"} if random else settings


def _samples(scores: Scores, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The values in these rows that are known, one for each sample: its mean under several seeds is one value."""
    rows = rows & ~np.isnan(values)
    if len(set(scores.seeds)) < 2:
        return values[rows]
    places, _ = pd.factorize(scores.contents[rows])  # as they appear: the same order in every process
    return np.bincount(places, values[rows]) / np.bincount(places)


def is_shared(key: str) -> bool:
    """Whether runs must have this setting in common to be compared sample by sample."""
    return key not in ("method", "kv") and not key.startswith("method.") and key not in NOT_OF_FULL


def _strata(scores: Scores, groups: tuple[str, ...]) -> list[np.ndarray]:
    """[n] bool of each group's samples."""
    names = np.array(scores.groups)
    return [names == group for group in groups or dict.fromkeys(scores.groups)]
