"""What is wrong with a run by itself: unfinished, damaged, or with numbers that do not agree with one another.

`kvbench submit` asks before it packs, `kvbench board` asks again of what came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.report.data.run import Run, missing
from kvbench.runs.identity import earlier_ids, run_id
from kvbench.runs.quantities import is_number
from kvbench.runs.stored import Record, contents, json_in, json_of, read_run_yaml
from kvbench.runs.summary import summarise

NEAR = 1e-3  # relative: samples are packed with five digits
TINY = 1e-6  # of KL in nats, which is rounded about 0
TIMES = ("ttft_s", "tt2t_s", "tpot_ms", "breakdown_ms", "prefill_ms")

# What each check is about, for readers.
ALONE = {
    "whole": "finished, no sample failed, every sample with an audit, each answered once",
    "fit": "no probe, no smoke run, no random weights, no timed run",
    "audit": "no method broke its own budget rule, and C is what was asked for",
    "identity": "the run's id is the hash of the settings that it shows",
    "numbers": "finite; scores from 0 to 1, KL the mean of its steps, nothing negative",
    "summary": "says what the samples say",
}


def named(run: Run) -> str:
    """A run in words, for a message: its task, arm and folder."""
    arm = "-".join(word for word in (run.label("method"), run.label("budget")) if word != "-")
    return f"{run.label('task')}, {arm} ({run.folder_names[0]})"


def faults(run: Run) -> list[str]:
    """What is wrong with a run, a clause each; [] for a whole one.

    Args:
        run: of one folder, as `kvbench.report.data.frame.collect` reads it.
    """
    path, records = Path(run.arm["path"]), run.samples()
    found = [*_unfit(run, path), *_audits(run, records), *_identity(path), *_numbers(run, records)]
    return [*found, *_summary(run, path, records)]


def _unfit(run: Run, path: Path) -> Iterator[str]:
    arm = run.arm
    if not arm["finished"]:
        yield f"unfinished, {arm['n']} samples so far; the same command goes on"
    if arm["failed"]:
        first = next(str(record["error"]) for record in run.samples() if record.get("error"))
        yield f"{arm['failed']} of {arm['n']} samples failed ({first[:120]}); the same command tries them again"
    answered: dict[str, dict[str, Any]] = {}
    for one in map(json_of, contents(path / "samples.jsonl").splitlines()):
        answer = {key: value for key, value in one.items() if key != "scores"}  # which `kvbench score` writes anew
        if not one.get("error") and answered.setdefault(one["id"], answer) != answer:
            yield f"sample {one['id']} is there twice, with another answer"
            break
    if arm["probe_every"]:
        yield f"probe.every={arm['probe_every']}: probes cost time and memory; expected a run with probe.every=0"
    if read_run_yaml(path)["config"].get("smoke"):
        yield "smoke=true: a paper's experiment made small; expected the whole one"
    if arm["weights"] == "random":
        yield "model.weights=dummy: random weights score nothing; expected a pretrained model"
    if run.is_timed:
        yield f"task={arm['task']}: timed runs have no score and give no rows"


def _audits(run: Run, records: list[Record]) -> Iterator[str]:
    asked = run.settings["budget"]
    for record in records:
        audit = record.get("audit") or {}
        if record.get("error"):
            continue
        if not is_number(audit.get("attended_mean")) or not is_number(audit.get("device_kv_bytes")):
            yield f"sample {record['id']} has no audit"
            return
        if audit.get("over_rule") is not False:
            yield f"sample {record['id']} broke its method's own budget rule"
            return
        context = record["prompt_tokens"] - (record.get("question_tokens") or 0)  # a share is of what is compressed
        size = asked * context if isinstance(asked, float) else asked
        if size is not None and not abs((audit.get("budget") or 0) - size) < 1 + NEAR * size:
            yield f"sample {record['id']} had a budget of {audit.get('budget')} tokens; {run.label('budget')} was asked"
            return


def _identity(path: Path) -> Iterator[str]:
    written = read_run_yaml(path)
    own = run_id(written["identity"])
    if written["run_id"] != own or path.name not in (own, *earlier_ids(own)):
        yield "its settings are not those of its run id: run.yaml was changed"


def _numbers(run: Run, records: list[Record]) -> Iterator[str]:
    for record in records:
        near = record.get("fidelity") or {}
        steps = (near.get("steps") or {}).get("kl") or [near.get("kl_mean", 0.0)]
        scores = (record.get("scores") or {}).values()
        audit = {key: value for key, value in (record.get("audit") or {}).items() if is_number(value)}
        if not all(is_number(score) and 0 <= score <= 1 for score in scores):
            yield f"sample {record['id']} has a score that is no number from 0 to 1"
        elif min(steps) < 0 or not _alike(fmean(steps), near.get("kl_mean", 0.0), TINY):
            yield f"sample {record['id']} has a KL that is not the mean of its steps"
        elif any(value < 0 for value in [*audit.values(), *times_of(record)]):
            yield f"sample {record['id']} has a negative number of bytes, tokens or seconds"
        elif audit.get("attended_mean", 0.0) > audit.get("attended_max", math.inf) * (1 + NEAR):
            yield f"sample {record['id']} attended more on average than at most"
        else:
            continue
        return


def times_of(record: Mapping[str, Any]) -> tuple[float, ...]:
    """The times of a sample: no two samples have the same ones."""
    parts = (record.get(name) for name in TIMES)
    each: Iterator[Any] = (time for part in parts for time in (part.values() if isinstance(part, dict) else [part]))
    return tuple(float(time) for time in each if is_number(time))


def _summary(run: Run, path: Path, records: list[Record]) -> Iterator[str]:
    stored, made = json_in(path / "summary.json"), summarise(records, run.arm["metric"])
    if run.arm["finished"] and (wrong := next(_differences(_said(made), _said(stored)), "")):
        yield f"summary.json does not say what its samples say: {wrong}"


def _said(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary of any version has: how many samples, scores, KL, and the audit."""
    near = summary.get("fidelity")
    kl = near.get("kl_mean") if isinstance(near, dict) else None
    return {name: summary.get(name) for name in ("score", "n", "failed", "scores", "audit")} | {"kl_mean": kl}


def _differences(made: Any, stored: Any, where: str = "") -> Iterator[str]:
    if isinstance(made, dict):
        for key, value in made.items():
            yield from _differences(value, stored.get(key) if isinstance(stored, dict) else None, f"{where}.{key}")
    elif is_number(made) and is_number(stored):
        if not _alike(made, stored, TINY):
            yield f"{where.lstrip('.')} is {stored:g}, and {made:g} of the samples"
    elif made != stored and not missing(made):
        yield f"{where.lstrip('.')} is {str(stored)[:40]}, and {str(made)[:40]} of the samples"


def _alike(one: float, other: float, most: float) -> bool:
    return abs(one - other) <= most + NEAR * max(abs(one), abs(other))
