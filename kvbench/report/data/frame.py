"""Run folders as data frames: one line a run, one line a run and group, and the scores of every sample.

Everything is made from the sample lines, as `kvbench.runs.summary` does; nothing is written and no run is locked.
What cannot be used is left out and said why, and never stops the rest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvbench.budget import has_budget, size_of
from kvbench.config import FACTS, first_line, show
from kvbench.measure.protocol import GREEDY
from kvbench.memory.kinds import NATIVE, kv_in
from kvbench.runs.folder import tear_of
from kvbench.runs.identity import LOCAL, backend_name
from kvbench.runs.quantities import QUANTITIES, is_number, measured
from kvbench.runs.stored import (
    DAMAGED,
    Record,
    ResultsError,
    is_there,
    json_in,
    printable,
    read_run_yaml,
    read_samples,
    runs_in,
    what_of,
)
from kvbench.runs.summary import answers_of, by_machine, machine_name, summarise, summarise_repeats

YARDSTICK = "full"  # the method that all others are compared with
PROTOCOL = ("accounting", "dense_layers", "chat", "prefill_chunk", "question_as_decode", "generated", *GREEDY)
CELL = {"task.lengths", "task.batch", "task.repeats"}  # settings that the length and batch of a timed cell stand for


class LeftOut(NamedTuple):
    """A run that is not in the frames, and why."""

    path: Path
    why: str


class TimedCell(NamedTuple):
    """What repeats of a timed sample share.

    Attributes:
        tokens, batch: of the prompts.
        machine: that they were timed on.
    """

    tokens: int
    batch: int
    machine: str


@dataclass(frozen=True)
class Scores:
    """The main score of every sample of a run, in the order they were first written; of several answers the mean.

    Attributes:
        ids: of the samples.
        groups: the group of each.
        values: [n] 0..100; a failed sample counts 0.
        failed: [n] bool; whether any of several answers has.
        seeds: of the run that each sample is from; several where runs stand together (`kvbench.report.data.seeds`).
        contents: [n] the same word for what is the same sample under several seeds (`content_of`).
        kl: [n] mean KL divergence from full attention; NaN where there is none.
    """

    ids: list[str]
    groups: list[str]
    values: np.ndarray
    failed: np.ndarray
    seeds: list[str]
    contents: np.ndarray
    kl: np.ndarray


@dataclass(frozen=True)
class Runs:
    """What a report knows of run folders; the frames share their index, a number for each run.

    Attributes:
        arms: one line a run, a column for each of: path, paths (of all seeds, where it stands for several), run_id,
            model, weights, method, budget (as asked for: tokens, a share of the prompt, or None: the method has none or
            keeps to its own), task, the fields of the protocol (`PROTOCOL`) and its digest as `protocol`, seed,
            probe_every, device, dtype, shared_prefill, device_name (of the machine that the times are of), data (a
            hash), metric, finished, updated; spread, the least and the largest of several repeats or seeds by name; and
            each of `kvbench.runs.quantities`, of which score is 0-100: of several groups the plain mean of theirs, else
            the mean over samples. What a run recorded beside these has a column "<part>.<key>": a part of a decode step
            such as "breakdown_ms.select", a number of the method's own `report()` such as "audit.candidates". What a
            run did not measure is missing (NaN or None).
        groups: one line a run and group: run (the index of its arm), model, method, budget, task, group, score,
            stderr, n, failed.
        settings: one line a run, all that makes its arm: every option of method and task as "method.page_size",
            protocol and probe as on the command line, `engine`, and `kv` ("int8", or "device-host" where tiers differ);
            of a path to data its last part; what a run has no such key for is missing.
        scores: of every run, by index.
        left_out: what is not there, and why.
    """

    arms: pd.DataFrame
    groups: pd.DataFrame
    settings: pd.DataFrame
    scores: dict[int, Scores]
    left_out: list[LeftOut]

    @functools.cached_property
    def arm(self) -> dict[int, dict[str, Any]]:
        """The lines of `arms` by index: pandas is slow to read one at a time."""
        return dict(zip(self.arms.index, self.arms.to_dict("records"), strict=True))

    @functools.cached_property
    def setting(self) -> dict[int, dict[str, Any]]:
        """The lines of `settings` by index."""
        return dict(zip(self.settings.index, self.settings.to_dict("records"), strict=True))

    def only(self, chosen: Sequence[int]) -> Runs:
        """These runs, by index; the others are not left out, but were not asked for."""
        groups = self.groups[self.groups["run"].isin(chosen)] if len(self.groups) else self.groups
        scores = {run: self.scores[run] for run in chosen}
        return Runs(self.arms.loc[chosen], groups, self.settings.loc[chosen], scores, self.left_out)

    def is_yardstick(self, run: int) -> bool:
        """Whether it is full attention over keys and values as the model computes them."""
        return bool(self.arm[run]["method"] == YARDSTICK and self.setting[run]["kv"] == str(NATIVE))

    def timed(self, run: int) -> bool:
        """Whether it is a timed run, which has no score worth showing."""
        floor = self.arm[run]["floor_ms"]
        return floor is not None and floor == floor

    def cells(self, run: int) -> dict[TimedCell, dict[str, Any]]:
        """What a timed run measured, as lines of `arms`; read anew. Of repeats each time is the median, and `spread`
        has the least and the largest of each time by its name."""
        arm = self.arm[run]
        repeats: dict[tuple[int, int], list[Record]] = {}
        for record in self.samples(self.arms.loc[run]):
            repeats.setdefault((record["meta"]["length"], record["meta"]["batch"]), []).append(record)
        found = {}
        for place, records in repeats.items():
            for machine, own in (by_machine(records) or {"": records}).items():  # else all have failed, and are told
                name = machine or str(arm["device_name"])
                summary = summarise_repeats(own, arm["metric"])
                line = {**arm, **_measured(summary, arm["budget"]), "device_name": name, "n": summary["repeats"]}
                found[TimedCell(*place, name)] = {**line, "spread": summary["spread"]}
        return found

    def timed_samples(self, arm: Any) -> list[Record]:
        """The samples of an arm that were timed on the machine that its times are of."""
        found = by_machine(self.samples(arm))
        return found.get(arm.device_name) or found.get("", [])

    def samples(self, arm: Any) -> list[Record]:
        """All that is stored of each sample of an arm (a line of `arms`, or anything with its `paths`), read anew.

        Raises:
            ResultsError: a line is damaged.
        """
        return [one for path in arm.paths for one in read_samples(Path(path) / "samples.jsonl")[0].values()]


class _Run(NamedTuple):
    arm: dict[str, Any]
    settings: dict[str, Any]
    groups: list[dict[str, Any]]
    scores: Scores


def collect(folders: Sequence[Path], unfinished: bool = False) -> Runs:
    """Read all runs at or below these folders.

    Of two runs of one arm, which differ in the state of the code or the data alone, the newest stands.

    Args:
        folders: each a run folder or one above some.
        unfinished: also take runs that have not finished. Stored samples run longest first, so these are not fair.

    Raises:
        ResultsError: no run at one of the folders.
    """
    found: dict[str, _Run] = {}
    left_out = []
    for path in runs_in([Path(folder) for folder in folders]):
        try:
            run = _read(path, unfinished)
        except (ResultsError, OSError, MemoryError) as error:
            left_out.append(LeftOut(path, printable(first_line(error))))
            continue
        key = json.dumps(run.settings, sort_keys=True)
        if key in found:
            older, run = sorted((found[key], run), key=lambda one: one.arm["updated"])
            left_out.append(LeftOut(older.arm["path"], f"an older run of the same arm as {run.arm['path']}"))
        found[key] = run
    runs = list(found.values())
    groups = [{"run": index, **group} for index, run in enumerate(runs) for group in run.groups]
    return Runs(
        framed([run.arm for run in runs]),
        framed(groups),
        pd.DataFrame([run.settings for run in runs], dtype=object),
        {index: run.scores for index, run in enumerate(runs)},
        sorted(left_out),
    )


def framed(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The lines as columns; a budget stays what it is, where pandas would make 64 and None 64.0 and NaN."""
    frame = pd.DataFrame(lines)
    if lines:
        frame["budget"] = pd.Series([line["budget"] for line in lines], dtype=object)
    return frame


def missing(value: Any) -> bool:
    """Whether a frame's value is there for want of another: None or NaN."""
    return value is None or value != value


def _read(path: Path, unfinished: bool) -> _Run:
    """One run.

    Raises:
        ResultsError: why it cannot be used.
    """
    written = read_run_yaml(path) if is_there(path / "run.yaml") else {}
    records, _ = read_samples(path / "samples.jsonl")
    if tear := tear_of(path, len(records)):
        raise ResultsError(tear)
    finished = is_there(path / "summary.json")
    if not finished and not unfinished:
        raise ResultsError(f"unfinished, {len(records)} samples so far; --unfinished shows it")
    if not records:
        raise ResultsError("no sample yet")
    try:
        identity, config = written["identity"], written["config"]
        settings = _settings(identity, config)
        # A run that began in a sweep and one alone are one run: its samples say where they began.
        settings["shared_prefill"] = any(record.get("shared_prefill") for record in records.values())
        metric = str(config["metric"])
        scores = _scores(records.values(), metric, str(settings["seed"]))
        summary = summarise(records.values(), metric)
        arm = _arm(path, written, settings, summary)
    except DAMAGED as error:
        raise ResultsError(f"not as kvbench writes it ({what_of(error)})") from error
    arm |= {"metric": metric, "finished": finished, "updated": _updated(path)}
    own = {key: arm[key] for key in ("model", "method", "budget", "task")}
    groups = [{**own, "group": group, **values} for group, values in _groups(summary, scores).items()]
    return _Run(arm, settings, groups, scores)


def _settings(identity: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """All that tells this arm from others, as on the command line; what only the files say of themselves left out."""
    own = identity["config"]
    method, task = own["method"], own["task"]
    settings = {
        "model": str(config["model_name"]),
        "model.revision": identity["model_revision"],
        "method": str(method["name"]),
        "budget": _budget(own),
        "task": str(task["name"]),
        "seed": _whole(own, "seed"),
        "batch": _whole(own, "batch"),
        "attention": own["attention"],
        "kv": str(kv_in(own)),
        "backend": backend_name(own),
        "device": identity["device"],
        "dtype": identity["dtype"],
        "dense_layers": show(identity["dense_layers"]),
    }
    protocol = {**GREEDY, **own["protocol"]}
    sections = {"protocol": protocol, "probe": own["probe"], "method": method, "task": task}
    for section, values in sections.items():
        for key, value in values.items():
            if key not in FACTS | {"name", "_target_", "preset"}:
                shown = show(value) if isinstance(value, list | tuple | dict) else value
                settings[f"{section}.{printable(key)}"] = printable(shown) if isinstance(shown, str) else shown
    for key in (key for key, value in task.items() if value == LOCAL):
        settings[f"task.{key}"] = Path(str(config["task"][key])).name
    return settings


def _whole(own: Mapping[str, Any], key: str) -> int:
    value = own[key]
    if type(value) is not int:
        raise ResultsError(f"not as kvbench writes it ({key}={show(value)[:40]}: no whole number)")
    return value


def _budget(own: Mapping[str, Any]) -> int | float | None:
    """The budget as it counts: a preset's size where none was given, and None for a method that has no budget."""
    return size_of(own["budget"], own["method"]) if has_budget(own["method"]) else None


def _scores(records: Iterable[Record], metric: str, seed: str) -> Scores:
    ids, groups, values, failed, contents, kl = [], [], [], [], [], []
    for answers in answers_of(records):
        record = answers[0]
        asked: str = record.get("sample") or record["id"]
        lost = any(answer.get("error") for answer in answers)
        ids.append(asked)
        groups.append(_group(record))
        values.append(100.0 * statistics.fmean(_score(answer, metric) for answer in answers))
        failed.append(lost)
        contents.append(record.get("content") or content_of(record))
        near = (record.get("fidelity") or {}).get("kl_mean")
        kl.append(near if is_number(near) and not lost else math.nan)
    return Scores(
        ids, groups, np.array(values), np.array(failed), [seed] * len(ids), np.array(contents), np.array(kl, float)
    )


def _group(record: Record) -> str:
    group = str(record.get("group") or "")
    if not group.isprintable():
        raise ResultsError(f"sample {record['id']} is of a group with characters that are not to be printed")
    return group


def content_of(record: Record) -> str:
    """What a sample is but for its seed, as a word: two samples with one word are the same prompt.

    By its id, answers, length and facts, the same in every process. A compacted record has it as `content`.
    """
    asked = record.get("sample") or record["id"]
    told = json.dumps([asked, record.get("answers"), record.get("prompt_tokens"), record.get("meta")], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _score(record: Record, metric: str) -> float:
    """The main score of a record, 0..1; 0 where it failed."""
    value = 0.0 if record.get("error") else (record.get("scores") or {}).get(metric)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ResultsError(f"sample {record['id']} has no number as its {metric}, but {show(value)}")
    return float(value)


def _arm(
    path: Path, written: Mapping[str, Any], settings: Mapping[str, Any], summary: Mapping[str, Any]
) -> dict[str, Any]:
    identity, config = written["identity"], written["config"]
    dummy = str(identity["model_revision"]).startswith("dummy-")
    return {
        "path": path,
        "paths": (path,),
        "run_id": written["run_id"],
        **{key: settings[key] for key in ("model", "method", "budget", "task")},
        "weights": "random" if dummy else "pretrained",
        **{key: settings[f"protocol.{key}"] for key in PROTOCOL},
        "protocol": identity["protocol"],
        "seed": settings["seed"],
        "probe_every": settings["probe.every"],
        **{key: settings[key] for key in ("device", "dtype", "shared_prefill")},
        "device_name": machine_name(summary.get("machine") or {}) or config["device_name"],
        "data": identity["data"],
        **_measured(summary, settings["budget"]),
        "spread": {},
    }


def _measured(summary: Mapping[str, Any], budget: Any) -> dict[str, Any]:
    """All that a summary holds by the names of the columns; without a budget nothing is measured against one."""
    missing = dict.fromkeys(() if budget else ("attended_share", "budget_tokens"))
    return {**dict.fromkeys(QUANTITIES), **measured(summary), **missing}


def _groups(summary: Mapping[str, Any], scores: Scores) -> Mapping[str, Mapping[str, Any]]:
    """The summary's groups; where all samples are of one, that one."""
    if "groups" in summary:
        groups: Mapping[str, Mapping[str, Any]] = summary["groups"]
        return groups
    only = scores.groups[0]
    return {only: {key: summary[key] for key in ("score", "stderr", "n", "failed")}} if only else {}


def _updated(path: Path) -> str:
    return str(json_in(path / "status.json").get("updated", ""))
