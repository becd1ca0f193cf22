"""Reads run folders: one line a run, and the scores of every sample.

Everything is made from the sample lines, as `kvbench.runs.summary` does; nothing is written and no
run is locked. A run that cannot be used is left out with the reason, and never stops the rest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvbench.backends.protocol import GREEDY
from kvbench.config import FACTS, MethodConfig, first_line, show
from kvbench.memory.kinds import kv_in
from kvbench.report.data.run import (
    PROTOCOL,
    Run,
    Runs,
    Scores,
    SkippedRun,
    columns_of,
    framed,
    is_shared,
    missing,
)
from kvbench.runs.folder import tear_of
from kvbench.runs.identity import LOCAL
from kvbench.runs.plausible import refuse_impossible
from kvbench.runs.quantities import ALONE, is_number, machine_name
from kvbench.runs.stored import (
    DAMAGED,
    Record,
    ResultsError,
    archive_version,
    backend_name,
    is_there,
    json_in,
    printable,
    read_run_yaml,
    runs_in,
    samples_so_far,
    what_of,
)
from kvbench.runs.summary import answers_of, summarise
from kvbench.runs.versions import versions_in

# Options of tasks that came later than runs that kvbench ships, and what these did before there was
# a choice.
LATER: dict[str, dict[str, Any]] = {"passkey": {"variant": "quest"}}

_Contents = dict[tuple[str, ...], str]  # `content_of` samples, by protocol, seed and id


class _Read(NamedTuple):
    """What one folder holds."""

    arm: dict[str, Any]
    settings: dict[str, Any]
    scores: Scores


def collect(folders: Sequence[Path], unfinished: bool = False) -> Runs:
    """Read all runs at or below these folders.

    Of two runs of one arm, which differ only in the state of the data, the newest is taken.

    Parameters
    ----------
    folders
        each a run folder or one above some.
    unfinished
        also take runs that have not finished. Stored samples run longest first, so these are not
        fair.

    Raises
    ------
    ResultsError
        no run at one of the folders.
    """
    runs_by_settings: dict[str, _Read] = {}
    skipped = []
    for path in runs_in([Path(folder) for folder in folders]):
        try:
            run = _read_once(path, unfinished, archive_version(path / "run.yaml"))
        except (ResultsError, OSError, MemoryError) as error:
            skipped.append(SkippedRun(path, printable(first_line(error))))
            continue
        key = json.dumps(run.settings, sort_keys=True)
        if key in runs_by_settings:
            older, run = sorted(
                (runs_by_settings[key], run), key=lambda candidate: candidate.arm["updated"]
            )
            contents = dict(zip(older.scores.ids, older.scores.contents, strict=True))
            theirs = zip(run.scores.ids, run.scores.contents, strict=True)
            differs = any(contents.get(id, content) != content for id, content in theirs)
            other = ", on other data of that name" * differs
            skipped.append(
                SkippedRun(
                    older.arm["path"], f"an older run of the same arm as {run.arm['path']}{other}"
                )
            )
        runs_by_settings[key] = run
    return _framed([*runs_by_settings.values()], sorted(skipped))


def gathered(runs: Iterable[Run], skipped: list[SkippedRun]) -> Runs:
    """Runs that were read apart, beside each other; none is taken for another's newer one."""
    return _framed([_Read(run.arm, run.settings, run.scores) for run in runs], skipped)


def _framed(runs: Sequence[_Read], skipped: list[SkippedRun]) -> Runs:
    _name_data(runs)
    return Runs(
        framed([run.arm for run in runs]),
        pd.DataFrame([run.settings for run in runs], dtype=object),
        {index: run.scores for index, run in enumerate(runs)},
        skipped,
    )


def _name_data(runs: Iterable[_Read]) -> None:
    """Give runs of a model and task one `data` where all prompts that they share are the same.

    Runs of one protocol share prompts; what these show holds under any protocol.
    """
    by_task: dict[str, dict[str, _Contents]] = {}  # by data, of one model and task
    places = []
    for run in runs:
        shared = {
            key: value
            for key, value in run.settings.items()
            if is_shared(key) and not missing(value)
        }
        shared.pop("seed")
        task = {
            key: shared.pop(key)
            for key in list(shared)
            if key.partition(".")[0] in ("model", "task")
        }
        under = json.dumps(shared, sort_keys=True, default=str)
        samples = zip(run.scores.seeds, run.scores.ids, strict=True)
        prompts = {
            (under, *sample): str(content)
            for sample, content in zip(samples, run.scores.contents, strict=True)
        }
        by_data = by_task.setdefault(json.dumps(task, sort_keys=True, default=str), {})
        by_data[run.arm["data"]] = prompts | by_data.get(run.arm["data"], {})
        places.append((run.arm, by_data))
    for arm, by_data in places:
        arm["data"] = next(
            data
            for data in by_data
            if data == arm["data"] or _same(by_data[data], by_data[arm["data"]])
        )


def _same(ours: _Contents, theirs: _Contents) -> bool:
    """Whether some samples are in both, and these are the same prompts."""
    both = ours.keys() & theirs.keys()
    return bool(both) and all(ours[sample] == theirs[sample] for sample in both)


def _read_once(path: Path, unfinished: bool, version: tuple[int, ...] | None) -> _Read:
    """As `_read`; a run of an archive is read once."""
    if version is None:
        return _read(path, unfinished)
    run = _archived(path, unfinished, version)
    return run._replace(arm=dict(run.arm))  # whose data is named by the runs beside it


@functools.lru_cache(maxsize=4096)
def _archived(path: Path, unfinished: bool, version: tuple[int, ...]) -> _Read:
    return _read(path, unfinished)


def _read(path: Path, unfinished: bool) -> _Read:
    """One run.

    Raises
    ------
    ResultsError
        why it cannot be used.
    """
    written = read_run_yaml(path) if is_there(path / "run.yaml") else {}
    records = samples_so_far(path)
    if tear := tear_of(path, len(records)):
        raise ResultsError(tear)
    finished = is_there(path / "summary.json")
    if not finished and not unfinished:
        raise ResultsError(f"unfinished, {len(records)} samples so far; --unfinished shows it")
    if not records:
        raise ResultsError("no sample yet")
    try:
        identity, config = written["identity"], written["config"]
        refuse_impossible(path, written, records.values())
        settings = _settings(identity, config)
        # A run that began in a sweep and one alone are one run: its samples say where they began.
        settings["shared_prefill"] = any(
            record.get("shared_prefill") for record in records.values()
        )
        metric = str(config["metric"])
        scores = _scores(records.values(), metric, str(settings["seed"]))
        summary = summarise(records.values(), metric)
        arm = _arm(path, written, settings, summary)
    except DAMAGED as error:
        raise ResultsError(f"not as kvbench writes it ({what_of(error)})") from error
    status = json_in(path / "status.json")
    arm |= {"metric": metric, "finished": finished, "updated": str(status.get("updated", ""))}
    return _Read(arm, settings, scores)


def _settings(identity: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which arms may differ, as on the command line.

    What only states a fact (`FACTS`) is left out; of a path to data its last part counts.
    """
    arm_config = identity["config"]
    method = arm_config["method"]
    task = LATER.get(arm_config["task"]["name"], {}) | arm_config["task"]
    settings = {
        "model": str(config["model_name"]),
        "model.revision": identity["model_revision"],
        "method": str(method["name"]),
        "budget": _budget(arm_config),
        "task": str(task["name"]),
        "seed": _whole(arm_config, "seed"),
        "batch": _whole(arm_config, "batch"),
        "attention": arm_config["attention"],
        "kv": _kv(identity),
        "backend": backend_name(arm_config),
        "decode": identity.get("decode") or ALONE,
        "device": identity["device"],
        "dtype": identity["dtype"],
        "dense_layers": show(identity["dense_layers"]),
        **_versions(identity),
    }
    if "fused" in identity:
        settings["fused"] = printable(show(identity["fused"]))
    shape = identity.get("model_shape") or {}  # of random weights, whose name does not say it
    settings |= {
        f"model.config.{printable(key)}": printable(show(value)) for key, value in shape.items()
    }
    protocol = {**GREEDY, **arm_config["protocol"]}
    sections = {"protocol": protocol, "probe": arm_config["probe"], "method": method, "task": task}
    settings |= {
        f"{section}.{printable(key)}": _shown(value)
        for section, values in sections.items()
        for key, value in values.items()
        if key not in FACTS | {"name", "_target_", "preset"}
    }
    for key in (key for key, value in task.items() if value == LOCAL):
        settings[f"task.{key}"] = Path(str(config["task"][key])).name
    return settings


def _shown(value: Any) -> Any:
    """A setting as a frame has it: a list or a mapping as text."""
    shown = show(value) if isinstance(value, list | tuple | dict) else value
    return printable(shown) if isinstance(shown, str) else shown


def _versions(identity: Mapping[str, Any]) -> dict[str, str]:
    """The versions of the code that made the numbers.

    Runs of other versions of the harness, the backend or the task are not paired.
    """
    versions = {key: printable(show(value)) for key, value in versions_in(identity).items()}
    harness = versions.pop("harness")
    # which stands in the name of the kind: full attention holds its tokens otherwise
    versions.pop("kv", None)
    return {"harness": harness, **{f"{key}.version": value for key, value in versions.items()}}


def _kv(identity: Mapping[str, Any]) -> str:
    """How keys and values are held; a code of a later version than the first says which."""
    later = {
        kind: number for kind, number in versions_in(identity).get("kv", {}).items() if number != 1
    }
    return " ".join(
        [
            str(kv_in(identity["config"])),
            *(f"{kind}:v{number}" for kind, number in sorted(later.items())),
        ]
    )


def _whole(arm_config: Mapping[str, Any], key: str) -> int:
    value = arm_config[key]
    if type(value) is not int:
        raise ResultsError(f"not as kvbench writes it ({key}={show(value)[:40]}: no whole number)")
    return value


def _budget(arm_config: Mapping[str, Any]) -> int | float | None:
    """The budget that a run had: a preset's size where none was set; None: it has none."""
    method = MethodConfig.of(arm_config["method"])
    if not method.has_budget:
        return None
    return method.preset if arm_config["budget"] is None else arm_config["budget"]


def _scores(records: Iterable[Record], metric: str, seed: str) -> Scores:
    samples = list(answers_of(records))
    first = [answers[0] for answers in samples]
    lost = [any(answer.get("error") for answer in answers) for answers in samples]
    scores = [[_score(answer, metric) for answer in answers] for answers in samples]
    near = [(record.get("fidelity") or {}).get("kl_mean") for record in first]
    return Scores(
        ids=[record.get("sample") or record["id"] for record in first],
        groups=list(map(_group, first)),
        values=np.array([100.0 * statistics.fmean(of_sample) for of_sample in scores]),
        failed=np.array(lost),
        seeds=[seed] * len(first),
        contents=np.array([record.get("content") or content_of(record) for record in first]),
        kl=np.array(
            [
                kl if is_number(kl) and not failed else math.nan
                for kl, failed in zip(near, lost, strict=True)
            ],
            float,
        ),
    )


def _group(record: Record) -> str:
    group = str(record.get("group") or "")
    if not group.isprintable():
        raise ResultsError(
            f"sample {record['id']} is of a group with characters that are not to be printed"
        )
    return group


def content_of(record: Record) -> str:
    """What a sample is but for its seed, as a word: two samples with one word are the same prompt.

    By its id, answers, length and facts, the same in every process. A compacted record has it as
    `content`.
    """
    sample_id = record.get("sample") or record["id"]
    facts = json.dumps(
        [sample_id, record.get("answers"), record.get("prompt_tokens"), record.get("meta")],
        sort_keys=True,
    )
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _score(record: Record, metric: str) -> float:
    """The main score of a record, 0..1; 0 where it failed."""
    value: Any = 0.0 if record.get("error") else (record.get("scores") or {}).get(metric)
    if not is_number(value):
        raise ResultsError(
            f"sample {record['id']} has no number as its {metric}, but {show(value)}"
        )
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
        **{key: settings[key] for key in ("device", "dtype", "shared_prefill", "decode")},
        "device_name": machine_name(summary.get("machine") or {}) or config["device_name"],
        "data": str(identity["data"]),
        **columns_of(summary, settings["budget"]),
        "spread": {},
    }
