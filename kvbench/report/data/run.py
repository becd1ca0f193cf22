"""Runs in memory: `Runs`, data frames with a line for each run, and `Run`, one of them.

A score is the plain mean over its groups of samples. It is compared with full attention sample by
sample, so that what makes all methods' samples hard or easy drops out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvbench.backends.protocol import GREEDY
from kvbench.config import show
from kvbench.memory.kinds import NATIVE
from kvbench.report.data.stats import (
    FEWEST,
    LEAST,
    RANGE_UP_TO,
    Estimate,
    difference,
    estimate,
    mean_score,
)
from kvbench.runs.quantities import JOINTLY, QUANTITIES, recorded
from kvbench.runs.stored import Record, samples_so_far
from kvbench.runs.summary import by_machine, summarise, summarise_repeats

YARDSTICK = "full"  # the method that all others are compared with
CONTROL = "random"  # as many tokens as a method keeps, over which its score is a gain
PROTOCOL = ("accounting", "dense_layers", "chat", "prefill_chunk", "question", "generated", *GREEDY)
# settings that the length and batch of a timed cell stand for
CELL = {"task.lengths", "task.batch", "task.repeats"}
# keys that stand in `Run.arm` and not in its settings
OF_ARMS = ("weights", "device_name", "metric", "run_id")
# What full attention does not depend on.
NOT_OF_FULL = {"budget", "attention", "shared_prefill", "decode", "dense_layers", "probe.every"} | {
    f"protocol.{key}" for key in ("accounting", "dense_layers", "generated")
}

# What sparse arms share, besides, where their budgets mean the same.
OF_SPARSE = ("protocol.accounting", "protocol.dense_layers", "dense_layers", "protocol.generated")


SampleKey = tuple[str, str]  # the seed and id of a sample: its name among runs of one kind


class SkippedRun(NamedTuple):
    """A run that is not in the frames, and why."""

    path: Path
    why: str


class TimedCell(NamedTuple):
    """What repeats of a timed sample share.

    Attributes
    ----------
    tokens, batch
        of the prompts.
    machine
        that they were timed on.
    """

    tokens: int
    batch: int
    machine: str

    def __str__(self) -> str:
        return f"{self.tokens} x {self.batch}, {self.machine}"


@dataclass(frozen=True)
class Scores:
    """The main score of every sample of a run, in the order they were first written.

    Of several answers to one prompt it is their mean.

    Attributes
    ----------
    ids
        of the samples.
    groups
        the group of each.
    values
        [n] 0..100; a failed sample counts 0.
    failed
        [n] bool; whether any of several answers has.
    seeds
        of the run that each sample is from; several where a run stands for several (`over_seeds`).
    contents
        [n] the same word for what is the same sample under several seeds (`content_of`).
    kl
        [n] mean KL divergence from full attention; NaN where there is none.
    """

    ids: list[str]
    groups: list[str]
    values: np.ndarray
    failed: np.ndarray
    seeds: list[str]
    contents: np.ndarray
    kl: np.ndarray

    def of(self, kl: bool) -> np.ndarray:
        """[n] the KL divergences or the scores."""
        return self.kl if kl else self.values

    @functools.cached_property
    def keys(self) -> list[SampleKey]:
        """The name of each sample."""
        return list(zip(self.seeds, self.ids, strict=True))

    def masked(self, mask: np.ndarray) -> Scores:
        """Those of the samples where the mask [n] is true."""
        fields: dict[str, Any] = {
            name: values[mask] if isinstance(values, np.ndarray) else [*compress(values, mask)]
            for name, values in vars(self).items()
            if name != "keys"
        }
        return Scores(**fields)

    def strata(self, groups: tuple[str, ...]) -> list[np.ndarray]:
        """Masks [n] of the samples of each group; of all groups for ().

        Failed samples that say no group are in none.
        """
        names = np.array(self.groups)
        all_groups = [group for group in dict.fromkeys(self.groups) if group]
        return [names == group for group in groups or all_groups or [""]]

    def valid_values(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The values in these rows that are not NaN.

        A sample that several seeds share counts once, by its mean.
        """
        rows = rows & ~np.isnan(values)
        if len(set(self.seeds)) < 2:
            return values[rows]
        # as they appear: the same order in every process
        places, _ = pd.factorize(self.contents[rows])
        return np.bincount(places, values[rows]) / np.bincount(places)


@dataclass(frozen=True, eq=False)
class Run:
    """One run, or all that differ in their seed alone, with what can honestly be said of it.

    Groups of samples, where a method takes some, are the strata of a score; () stands for all.

    Attributes
    ----------
    index
        of its line in each frame of `Runs`.
    arm, settings
        those lines.
    scores
        of its samples.
    all_runs
        all runs that were read with it.
    """

    index: int
    arm: dict[str, Any]
    settings: dict[str, Any]
    scores: Scores
    all_runs: Runs = field(repr=False)
    _against_full: dict[tuple[str, ...], Estimate | None] = field(default_factory=dict, repr=False)
    _scores: dict[tuple[str, ...], Estimate] = field(default_factory=dict, repr=False)
    _lines: dict[Collection[Any], dict[str, Any]] = field(default_factory=dict, repr=False)

    # -- what it is

    def label(self, key: str) -> str:
        """The value of a setting as a table shows it."""
        value = self.arm[key] if key in OF_ARMS else self.settings.get(key)
        if missing(value):
            return "-"
        return f"{100 * value:g} %" if key == "budget" and isinstance(value, float) else show(value)

    @functools.cached_property
    def own_labels(self) -> dict[str, str]:
        """The settings that change what it is, as labels.

        Full attention has none that it does not depend on.
        """
        idle = NOT_OF_FULL if self.arm["method"] == YARDSTICK else ()
        return {
            key: self.label(key)
            for key, value in self.settings.items()
            if not missing(value) and key not in idle
        }

    @property
    def is_full(self) -> bool:
        """Whether it is full attention over keys and values as the model computes them."""
        return bool(self.arm["method"] == YARDSTICK and self.settings["kv"] == str(NATIVE))

    @property
    def is_timed(self) -> bool:
        """Whether it is a timed run, which has no score worth showing."""
        return not missing(self.arm["floor_ms"])

    @property
    def is_unbounded(self) -> bool:
        """Whether its budget applied in no sample.

        Its numbers are full attention's then, and rank no method.
        """
        return never_bounded(self.arm)

    @property
    def shares_decode(self) -> bool:
        """Whether it decoded together with other runs, and has no time of a whole token."""
        return bool(self.arm["decode"] == JOINTLY)

    @property
    def scored_as(self) -> tuple[str, str]:
        """Its task and metric."""
        return self.arm["task"], self.arm["metric"]

    @property
    def folders(self) -> str:
        """The folders of all its seeds, in words."""
        return "; ".join(map(str, self.arm["paths"]))

    @property
    def folder_names(self) -> list[str]:
        """The names of its folders, which are their ids."""
        return [Path(path).name for path in self.arm["paths"]]

    @functools.cached_property
    def but_for_seed(self) -> dict[str, Any]:
        """The settings without the seed, and the revision of random weights, which it decides."""
        settings = {key: value for key, value in self.settings.items() if key != "seed"}
        return (
            {**settings, "model.revision": "dummy"} if self.arm["weights"] == "random" else settings
        )

    @functools.cached_property
    def kind(self) -> tuple[str, ...]:
        """What two runs must share to be compared sample by sample.

        The seed is not part of it: each sample has its own.
        """
        shared = [f"{key}={value}" for key, value in self.but_for_seed.items() if is_shared(key)]
        return (*shared, str(self.arm["data"]))

    # -- what it stored, read anew

    def samples(self) -> list[Record]:
        """All that is stored of each of its samples, read anew.

        Raises
        ------
        ResultsError
            a line is damaged.
        """
        return self.records_of(frozenset(self.scores.keys))

    def line(self, records: Sequence[Record]) -> dict[str, Any]:
        """Its line of `Runs.arms`, of these of its samples alone."""
        return {**with_summary(self.arm, summarise(records, self.arm["metric"])), "spread": {}}

    def arm_of(self, groups: tuple[str, ...] = ()) -> dict[str, Any]:
        """Its line of `Runs.arms`, of the samples of these groups alone; of all for ().

        They are read once.
        """
        if groups and groups not in self._lines:
            records = self.samples()
            for some in {groups, *((group,) for group in self.scores.groups)}:
                self._lines[some] = self.line(
                    [record for record in records if (record.get("group") or "") in some]
                )
        return self._lines[groups] if groups else self.arm

    def on_samples_of(self, other: Run) -> dict[str, Any]:
        """Its line of `Runs.arms`, of those of its samples alone that another run has as well."""
        shared = frozenset(other.scores.keys)
        if shared.issuperset(self.scores.keys):
            return self.arm
        if shared not in self._lines:
            self._lines[shared] = self.line(self.records_of(shared))
        return self._lines[shared]

    def records_of(self, keys: Collection[SampleKey]) -> list[Record]:
        """All that is stored of its samples with these keys (`Scores.keys`)."""
        return [
            record
            for seed, path in zip(
                str(self.settings["seed"]).split(", "), self.arm["paths"], strict=True
            )
            for record in samples_so_far(Path(path)).values()
            if (seed, record.get("sample") or record["id"]) in keys
        ]

    def is_cell(self, stratum: str) -> bool:
        """Whether a stratum of its samples is a cell of a timed run."""
        return bool(stratum) and self.is_timed

    def cell(self, name: str) -> dict[str, Any]:
        """The line of a timed cell, by its name."""
        return next(line for cell, line in self.cells.items() if str(cell) == name)

    @functools.cached_property
    def cells(self) -> dict[TimedCell, dict[str, Any]]:
        """What a timed run measured, as lines of `Runs.arms`, read once.

        Of repeats each time is the median, and `spread` has the least and the largest of each time
        by its name.
        """
        repeats: dict[tuple[int, int], list[Record]] = {}
        for record in self.samples():
            repeats.setdefault((record["meta"]["length"], record["meta"]["batch"]), []).append(
                record
            )
        lines = {}
        for place, records in repeats.items():
            # else all failed, which is shown
            for machine, timed in (by_machine(records) or {"": records}).items():
                name = machine or str(self.arm["device_name"])
                summary = summarise_repeats(timed, self.arm["metric"])
                line = {**with_summary(self.arm, summary), "n": summary["repeats"]}
                lines[TimedCell(*place, name)] = {
                    **line,
                    "device_name": name,
                    "spread": summary["spread"],
                }
        return lines

    # -- its scores, alone and beside full attention's

    def score(self, groups: tuple[str, ...] = ()) -> Estimate:
        """The score, 0-100: each of these groups a stratum.

        Agreement with full attention that is whole in more than a few texts has no interval.
        """
        if groups not in self._scores:
            self._scores[groups] = self._score(groups)
        return self._scores[groups]

    def _score(self, groups: tuple[str, ...]) -> Estimate:
        strata = [
            self.scores.valid_values(self.scores.values, rows)
            for rows in self.scores.strata(groups)
        ]
        estimated = mean_score(strata)
        is_agreement = not missing(self.arm["kl_mean"])
        if is_agreement and estimated.mean == 100 and estimated.n > RANGE_UP_TO:
            return estimated._replace(low=None, high=None)
        return estimated

    @functools.cached_property
    def ranks_none(self) -> str:
        """Why scores on these samples rank no methods, by full attention's; "" where they may.

        It scores under `LEAST` or, by its interval, perhaps 0; or the interval is wider than the
        methods' scores lie apart, its own among them. Fewer than `FEWEST` samples rank none at all,
        however wide it is.
        """
        if (full := self.full()) is None:
            return ""
        score, others = full.score(), self.all_runs.scored[self.kind]
        if score.mean < LEAST or (score.low is not None and score.low <= 0):
            return f"full attention scores under {LEAST} there, or perhaps 0"
        width = score.high - score.low if score.low is not None and score.high is not None else 0.0
        wide = score.n >= FEWEST and len(others) > 1 and width > max(others) - min(others)
        return (
            "full attention's interval is wider than the methods' scores lie apart" if wide else ""
        )

    @property
    def nearness(self) -> float:
        """What arms on the same samples are ordered by: KL, or else the score, the best first."""
        return -self.score().mean if missing(self.arm["kl_mean"]) else float(self.arm["kl_mean"])

    def kl(self, groups: tuple[str, ...] = ()) -> Estimate | None:
        """The mean KL divergence from full attention over the samples of these groups, in nats.

        () stands for all groups, each a stratum where they are of one size. None where there is
        none.
        """
        strata = [
            values
            for rows in self.scores.strata(groups)
            if len(values := self.scores.valid_values(self.scores.kl, rows))
        ]
        if len({len(values) for values in strata}) > 1:
            strata = [np.concatenate(strata)]
        return estimate(strata) if strata else None

    def seeds(self, groups: tuple[str, ...]) -> dict[str, float]:
        """The score of these groups under each of the seeds that it stands for."""
        scores, strata = self.scores, self.scores.strata(groups)
        of = {
            seed: np.array([sample_seed == seed for sample_seed in scores.seeds])
            for seed in dict.fromkeys(scores.seeds)
        }
        return {
            seed: float(
                np.mean(
                    [scores.values[rows & there].mean() for rows in strata if (rows & there).any()]
                )
            )
            for seed, there in of.items()
        }

    def failed(self, groups: tuple[str, ...]) -> int:
        """Failed samples of these groups; of all for ()."""
        if not groups:
            return int(self.scores.failed.sum())
        return sum(int(self.scores.failed[rows].sum()) for rows in self.scores.strata(groups))

    def full(self, kv: str = str(NATIVE)) -> Run | None:
        """The run of full attention that it is compared with first, itself where it is one; None
        without one.

        Parameters
        ----------
        kv
            how that holds keys and values; scores are compared with native ones.
        """
        candidates = self._fulls(kv)
        return max(
            candidates,
            key=lambda run: (not run.arm["probe_every"], run.arm["n"], run.arm["updated"]),
            default=None,
        )

    def _fulls(self, kv: str = str(NATIVE)) -> list[Run]:
        """The runs of full attention that it can be compared with.

        Those that decoded as it did come before all others.
        """
        candidates = self.all_runs.full.get((*self.kind, kv), [])
        return [run for run in candidates if run.shares_decode == self.shares_decode] or candidates

    def against_full(self, groups: tuple[str, ...] = ()) -> Estimate | None:
        """As `against` full attention, computed once.

        None for full attention itself, and where scores are the agreement with it, of which its own
        is 100 by construction.
        """
        if groups not in self._against_full:
            full_runs = self._fulls()
            alone = self in full_runs or not missing(self.arm["kl_mean"])
            self._against_full[groups] = None if alone else self.against(full_runs, groups)
        return self._against_full[groups]

    def against(
        self, others: Sequence[Run], groups: tuple[str, ...] = (), kl: bool = False
    ) -> Estimate | None:
        """The mean difference to other runs on the same samples, in points; of KL in nats.

        Model, task and protocol are the same. Of several the one with the most samples counts, then
        the newest. None where these have no two of the samples, and some of each group. Samples
        that failed there are left out: nothing is known of them.
        """
        differences, scores = self.differences(others, kl), self.scores
        strata = [scores.valid_values(differences, rows) for rows in scores.strata(groups)]
        comparison = (estimate if kl else difference)(strata) if all(map(len, strata)) else None
        return comparison if comparison is not None and comparison.low is not None else None

    def differences(self, others: Sequence[Run], kl: bool = False) -> np.ndarray:
        """[n] each sample's score, or KL, less that of other runs; NaN where none there has it."""
        values_by_sample = {
            key: value
            for run in sorted(others, key=lambda run: (run.arm["n"], run.arm["updated"]))
            for key, value, lost in zip(
                run.scores.keys, run.scores.of(kl), run.scores.failed, strict=True
            )
            if not lost
        }
        other = [values_by_sample.get(key, np.nan) for key in self.scores.keys]
        return self.scores.of(kl) - np.array(other, dtype=float)

    @property
    def protected(self) -> float:
        """The share of C that it keeps at each end of the prompt; 0 where its method does not."""
        share = self.settings.get("method.protect")
        return 0.0 if missing(share) else float(share)  # type: ignore[arg-type]

    def control(self, among: Iterable[Run]) -> Run | None:
        """The run of random tokens on the same samples with the same budget, counted alike.

        None without one. Of several that which protects most of the prompt's ends, then without
        probes, with the most samples, the newest.
        """

        def counted(run: Run) -> list[str]:
            return list(map(run.label, ("budget", "kv", *OF_SPARSE)))

        def rank(run: Run) -> tuple[Any, ...]:
            arm = run.arm
            return run.protected, not arm["probe_every"], arm["n"], arm["updated"]

        controls = (run for run in among if run.arm["method"] == CONTROL and run.kind == self.kind)
        return max(
            (run for run in controls if counted(run) == counted(self)), key=rank, default=None
        )

    # -- its bytes, by its audit and that of full attention

    @property
    def acted_share(self) -> float:
        """The share of the model's layers that can have a method, as have those of full attention.

        1 where the audit says nothing of other layers: with a window, or a state.
        """
        others = self.arm["windowed_share"]
        return 1.0 if missing(others) else 1.0 - float(others)

    @property
    def bytes_read(self) -> float:
        """Bytes of KV that a decode step reads on average; NaN where its audit does not say.

        What is attended in all layers, as it is held (`kv=`), and what the method scanned of the
        stored keys. What a method reads of an index of its own is in no audit.
        """
        attended, scanned = (self.arm[f"{name}_bytes_per_step"] for name in ("attended", "read"))
        if missing(attended):
            return math.nan
        return float(attended + (0.0 if missing(scanned) else scanned))

    @property
    def bytes_stored(self) -> float:
        """Bytes that it holds for each token of the context.

        Keys and values of both tiers and the index count. NaN where the run does not say, where
        full attention does not say how many tokens there are, and where a sample failed, as it may
        be the longest.
        """
        if (full_run := self.full()) is None:
            return math.nan
        arm, full = self.on_samples_of(full_run), full_run.on_samples_of(self)
        tokens = full["attended_max"]
        if missing(arm["device_kv_bytes"]) or missing(tokens) or arm["failed"] or full["failed"]:
            return math.nan
        sizes = [arm[name] for name in ("device_kv_bytes", "host_bytes", "index_bytes")]
        held = sum(0 if missing(size) else size for size in sizes)
        return float(held / tokens / self.settings["batch"])

    @property
    def share_of_full(self) -> float:
        """Percent of the bytes that full attention holds natively; NaN where it is not known."""
        full = self.full()
        return 100 * self.bytes_stored / full.bytes_stored if full else math.nan

    def marks(self, groups: tuple[str, ...] = ()) -> str:
        """The letters of `MARKS` for the score, without those that a table adds (g, m)."""
        against = self.against_full(groups)
        flags = {
            "b": against is not None
            and against.differs
            and against.mean > 0
            and not self.ranks_none,
            "d": self.arm["weights"] == "random",
            "f": self.failed(groups) > 0,
            "o": self.arm["over_rule"] in (True,),  # and not NaN
            "q": against is not None and self._fulls()[0].shares_decode != self.shares_decode,
            "r": self.score(groups).is_range,
            "t": (self.arm["cut_samples"] or 0) > 0,
            "u": not self.arm["finished"],
            "w": bool(self.ranks_none),
        }
        return "".join(mark for mark, there in flags.items() if there)


@dataclass(frozen=True)
class Runs:
    """What a report knows of run folders; the frames share their index, a number for each run.

    Attributes
    ----------
    arms
        one line a run, a column for each of: path, paths (of all seeds, where it stands for
        several), run_id, model, weights, method, budget (as asked for: tokens, a share of the
        prompt, or None: the method has none or keeps to its own), task, the fields of the protocol
        (`PROTOCOL`) and its digest as `protocol`, seed, probe_every, device, dtype, shared_prefill,
        decode ("together" or "alone"), device_name (of the machine that the times are of), data (a
        hash), metric, finished, updated; submitted, True for a run of others that stands on a
        board, which has no say in what ranks the board's methods; spread, the least and the largest
        of several repeats or seeds by name; and each of `kvbench.runs.quantities`, of which score
        is 0-100: of several groups the plain mean of theirs, else the mean over samples. What a run
        recorded beside these has a column "<part>.<key>": a part of a decode step such as
        "breakdown_ms.select", a number of the method's own `report()` such as "audit.candidates",
        any score of its task such as "scores.strict". What a run did not measure is missing (NaN or
        None).
    settings
        one line a run, all that makes its arm: every option of method and task as
        "method.page_size", protocol and probe as on the command line, `backend`, and `kv` ("int8",
        or "device-host" where tiers differ); of a path to data its last part; what a run has no
        such key for is missing.
    scores
        of every run, by index.
    skipped
        what is not there, and why.
    """

    arms: pd.DataFrame
    settings: pd.DataFrame
    scores: dict[int, Scores]
    skipped: list[SkippedRun]

    @functools.cached_property
    def _by_index(self) -> dict[int, Run]:
        """The runs by index: pandas is slow to read a line at a time."""
        lines = zip(
            self.arms.index,
            *(frame.to_dict("records") for frame in (self.arms, self.settings)),
            strict=True,
        )
        return {
            index: Run(index, arm, settings, self.scores[index], self)
            for index, arm, settings in lines
        }

    def __iter__(self) -> Iterator[Run]:
        return iter(self._by_index.values())

    def __getitem__(self, index: int) -> Run:
        return self._by_index[index]

    @functools.cached_property
    def differing(self) -> pd.DataFrame:
        """The settings in which any two of the runs differ, as text."""
        text = self.settings.map(str).astype(object)
        return text[[key for key in text if text[key].nunique() > 1]]

    @functools.cached_property
    def full(self) -> dict[tuple[str, ...], list[Run]]:
        """The runs of full attention, by what runs must share to be compared with them, and their
        `kv`.
        """
        full_runs: dict[tuple[str, ...], list[Run]] = {}
        for run in self:
            if run.arm["method"] == YARDSTICK:
                full_runs.setdefault((*run.kind, run.settings["kv"]), []).append(run)
        return full_runs

    @functools.cached_property
    def scored(self) -> dict[tuple[str, ...], list[float]]:
        """The scores by what runs must share to be compared.

        On a board with runs of others those do not count beside the board's own.
        """
        shipped, submitted = (
            dict[tuple[str, ...], list[float]](),
            dict[tuple[str, ...], list[float]](),
        )
        for run in self:
            scores_by_kind = submitted if run.arm.get("submitted") is True else shipped
            scores_by_kind.setdefault(run.kind, []).append(float(run.arm["score"]))
        return submitted | shipped

    @functools.cached_property
    def graded(self) -> set[tuple[str, str]]:
        """The tasks and metrics of which some sample has a score between 0 and 100.

        A share of steps or words that is 100 in all samples of one run is no 0/1 score all the
        same.
        """
        return {run.scored_as for run in self if set(run.scores.values) - {0.0, 100.0}}

    def only(self, chosen: Iterable[Run]) -> Runs:
        """These runs; the others are not left out, but were not asked for."""
        lines = {run.index: self[run.index] for run in chosen}
        scores, indices = {index: self.scores[index] for index in lines}, [*lines]
        some = Runs(self.arms.loc[indices], self.settings.loc[indices], scores, self.skipped)
        vars(some)["_by_index"] = {  # as pandas is slow to read lines
            index: Run(index, run.arm, run.settings, run.scores, some)
            for index, run in lines.items()
        }
        return some

    def restricted(self, parts: Mapping[int, tuple[np.ndarray, Sequence[Record]]]) -> Runs:
        """These runs, some of them with a part of their samples alone.

        Parameters
        ----------
        parts
            by index, the mask [n] of what stays of the scores, and the records of the same samples.
        """
        lines = [run.line(parts[run.index][1]) if run.index in parts else run.arm for run in self]
        scores = {
            index: of_run.masked(parts[index][0]) if index in parts else of_run
            for index, of_run in self.scores.items()
        }
        arms = framed(lines).set_axis(self.arms.index)
        return Runs(arms, self.settings, scores, self.skipped)


def is_shared(key: str) -> bool:
    """Whether runs must have this setting in common to be compared sample by sample."""
    return key not in ("method", "kv") and not key.startswith("method.") and key not in NOT_OF_FULL


def columns_of(summary: Mapping[str, Any], budget: Any) -> dict[str, Any]:
    """All that a summary holds, by column; without a budget nothing is compared with one."""
    absent = dict.fromkeys(
        () if budget else ("attended_share", "budget_tokens", "unbounded_samples")
    )
    return {**dict.fromkeys(QUANTITIES), **recorded(summary), **absent}


def with_summary(arm: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `Runs.arms` with what a summary of some of its samples holds.

    Nothing of the run's own summary is left in it.
    """
    plain_columns = {key: value for key, value in arm.items() if "." not in key}
    return {**plain_columns, **columns_of(summary, arm["budget"])}


def never_bounded(line: Mapping[str, Any]) -> bool:
    """Whether a line is of samples in none of which the budget applied.

    Lines are those of `Runs.arms` or `Run.cells`.
    """
    count = line["unbounded_samples"]
    return not missing(count) and bool(count) and count >= line["n"] - line["failed"]


def framed(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The lines as columns.

    A budget stays what it is, where pandas would make 64 and None 64.0 and NaN.
    """
    frame = pd.DataFrame(lines)
    if lines:
        frame["budget"] = pd.Series([line["budget"] for line in lines], dtype=object)
    return frame


def missing(value: Any) -> bool:
    """Whether a value of a frame is None or NaN."""
    return value is None or value != value
