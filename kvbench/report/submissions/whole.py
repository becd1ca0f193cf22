"""What is wrong with a run by itself: unfinished, damaged, or numbers that do not agree.

`kvbench submit` asks before it packs, `kvbench board` asks again of what came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.report.data.run import Run, missing
from kvbench.runs.identity import earlier_ids, run_id
from kvbench.runs.plausible import TINY, is_near
from kvbench.runs.quantities import is_number
from kvbench.runs.stored import Record, json_in, read_run_yaml
from kvbench.runs.summary import summarise

TIMES = ("ttft_s", "tt2t_s", "tpot_ms", "breakdown_ms", "prefill_ms")

# What each check is about, for readers.
ALONE = {
    "whole": "finished, no sample failed, every sample with an audit, each answered once",
    "fit": "no probe, no smoke run, no random weights, no timed run",
    "audit": "no method broke its own budget rule, and C is what was asked for",
    "identity": "the run's id is the hash of the settings that it shows",
    "numbers": (
        "finite and possible; scores from 0 to 1, KL the mean of its steps, no more attended than"
        " there is"
    ),
    "summary": "says what the samples say",
}


def named(run: Run) -> str:
    """A run in words, for a message: its task, arm and folder."""
    arm = "-".join(word for word in (run.label("method"), run.label("budget")) if word != "-")
    return f"{run.label('task')}, {arm} ({run.folder_names[0]})"


def faults(run: Run) -> list[str]:
    """What is wrong with a run, a clause each; [] for a whole one.

    Parameters
    ----------
    run
        of one folder, as `kvbench.report.data.frame.collect` reads it.
    """
    path, records = Path(run.arm["path"]), run.samples()
    problems = [*_unfit(run, path), *_audits(records), *_identity(path)]
    return [*problems, *_summary(run, path, records)]


def _unfit(run: Run, path: Path) -> Iterator[str]:
    arm = run.arm
    if not arm["finished"]:
        yield f"unfinished, {arm['n']} samples so far; the same command goes on"
    if arm["failed"]:
        first = next(str(record["error"]) for record in run.samples() if record.get("error"))
        yield (
            f"{arm['failed']} of {arm['n']} samples failed ({first[:120]}); the same command tries"
            " them again"
        )
    if arm["probe_every"]:
        yield (
            f"probe.every={arm['probe_every']}: probes cost time and memory; expected a run with"
            " probe.every=0"
        )
    if read_run_yaml(path)["config"].get("smoke"):
        yield "smoke=true: a paper's experiment made small; expected the whole one"
    if arm["weights"] == "random":
        yield "model.weights=dummy: random weights score nothing; expected a pretrained model"
    if run.is_timed:
        yield f"task={arm['task']}: timed runs have no score and give no rows"


def _audits(records: list[Record]) -> Iterator[str]:
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


def _identity(path: Path) -> Iterator[str]:
    written = read_run_yaml(path)
    expected = run_id(written["identity"])
    if written["run_id"] != expected or path.name not in (expected, *earlier_ids(expected)):
        yield "its settings are not those of its run id: run.yaml was changed"


def times_of(record: Mapping[str, Any]) -> tuple[float, ...]:
    """The times of a sample: no two samples have the same ones."""
    parts = (record.get(name) for name in TIMES)
    times: Iterator[Any] = (
        time for part in parts for time in (part.values() if isinstance(part, dict) else [part])
    )
    return tuple(float(time) for time in times if is_number(time))


def _summary(run: Run, path: Path, records: list[Record]) -> Iterator[str]:
    stored, recomputed = json_in(path / "summary.json"), summarise(records, run.arm["metric"])
    if run.arm["finished"] and (
        wrong := next(_differences(_comparable(recomputed), _comparable(stored)), "")
    ):
        yield f"summary.json does not say what its samples say: {wrong}"


def _comparable(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary of any version has: how many samples, scores, KL, and the audit."""
    near = summary.get("fidelity")
    kl = near.get("kl_mean") if isinstance(near, dict) else None
    return {name: summary.get(name) for name in ("score", "n", "failed", "scores", "audit")} | {
        "kl_mean": kl
    }


def _differences(recomputed: Any, stored: Any, where: str = "") -> Iterator[str]:
    if isinstance(recomputed, dict):
        for key, value in recomputed.items():
            yield from _differences(
                value, stored.get(key) if isinstance(stored, dict) else None, f"{where}.{key}"
            )
    elif is_number(recomputed) and is_number(stored):
        if not is_near(recomputed, stored, TINY):
            yield f"{where.lstrip('.')} is {stored:g}, and {recomputed:g} of the samples"
    elif recomputed != stored and not missing(recomputed):
        yield (
            f"{where.lstrip('.')} is {str(stored)[:40]}, and {str(recomputed)[:40]} of the samples"
        )
