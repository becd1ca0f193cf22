"""Run folders for the tests of reports, written by `RunFolder` as a run writes them, without a model."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.budget import Budget
from kvbench.cli.report import main as report
from kvbench.report.data.table import Number, quantity_of
from kvbench.report.tables.cells import Cell
from kvbench.runs.folder import RunFolder
from kvbench.runs.summary import summarise


def csv_lines(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[dict[str, str]]:
    """The lines of the table that the report on a folder is as CSV, by its heads."""
    capsys.readouterr()
    assert report([str(folder), "--format", "csv", *words]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def cell_of(numbers: Mapping[str, float], marks: Mapping[str, str] | None = None, mapped: bool = True) -> Cell:
    """A cell with these numbers, as `Cell.numbers` has them, and marks by name."""
    lines = {}
    for name in numbers:
        if name == "pairs" or name.endswith(("_low", "_high")):
            continue
        value, low, high = (numbers.get(f"{name}{end}") for end in ("", "_low", "_high"))
        count = int(numbers.get("pairs" if name == "against_full" else "samples", 0))
        scale = quantity_of(name).unit.scale
        ends = [None if end is None else end / scale for end in (low, high)]
        lines[name] = Number(value / scale, *ends, count, (marks or {}).get(name, ""))
    return Cell(lines, mapped=mapped)


Scores = Mapping[str, Sequence[float]]  # by group


def record(name: str, group: str, score: Any, **more: Any) -> dict[str, Any]:
    """A sample's line; `score` 0..1."""
    return {
        "id": name,
        "group": group,
        "meta": {"length": 1024, "depth": 0.0},
        "answers": ["1"],
        "prompt_tokens": 1024,
        "error": None,
        "output": "1",
        "scores": {"accuracy": score},
        "audit": {
            "attended_mean": 80.0,
            "attended_max": 96,
            "device_kv_bytes": 2**20,
            "attended_bytes_per_step": 2.0**20,
            "moved_bytes_per_step": 0.0,
            "over_rule": False,
        },
        "tpot_ms": {"mean": 4.0, "p50": 4.0, "p95": 5.0},
        "breakdown_ms": {"attention": 1.0, "model": 3.0},
        "ttft_s": 0.5,
        "tt2t_s": 0.6,
        **more,
    }


def together(scores: Scores | Sequence[float], **parts: float) -> list[dict[str, Any]]:
    """Samples as `records`, that decoded together with other arms: no times but of these parts of a step."""
    made = records(scores, decode="together", shared_prefill=True, breakdown_ms={"attention": 1.0, **parts})
    return [{key: value for key, value in one.items() if key not in ("tpot_ms", "ttft_s", "tt2t_s")} for one in made]


def timed(length: int, ms: float, **more: Any) -> dict[str, Any]:
    """A sample of task=latency: a prompt of one row whose tokens take so many milliseconds."""
    own = {
        "meta": {"length": length, "batch": 1},
        "tpot_ms": {"mean": ms, "p50": ms, "p95": ms},
        "hardware": {"floor_ms": 1.0, "copy_bandwidth": 1e10, "memory": "counted"},
    }
    return record(f"latency-{length}-1-0", f"{length} x 1", 1.0, **{**own, **more})


def records(scores: Scores | Sequence[float], **more: Any) -> list[dict[str, Any]]:
    """Samples "<group>-<number>"; a plain sequence is one group without a name."""
    groups: Scores = scores if isinstance(scores, Mapping) else {"": scores}
    return [
        record(f"{group}-{number}", group, score, **more)
        for group, own in groups.items()
        for number, score in enumerate(own)
    ]


def stored(
    results: Path,
    method: str = "quest",
    budget: int | float | None = 64,
    samples: Scores | Sequence[Any] = (1.0, 0.0),
    *,
    task: str = "passkey",
    model: str = "tiny",
    finished: bool = True,
    options: Mapping[str, Any] | None = None,
    paths: Mapping[str, str] | None = None,
    protocol: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    **identity: Any,
) -> Path:
    """A run folder; its path.

    Args:
        samples: scores, or whole records.
        options: of the task.
        paths: options of the task that lead to data.
        protocol: where it differs from the default.
        config: further keys of the run's config, such as "metric" or "seed".
        identity: further keys of its identity, such as "data", "source" or "decode".
    """
    whole = {"accounting": "paper", "dense_layers": "auto", "chat": "auto", "prefill_chunk": 4096}
    accountings = ("paper", (protocol or {}).get("accounting", "paper"))
    minimum = dict.fromkeys(accountings, None if method == "full" else 16)
    own = {
        "budget": budget,
        "batch": 1,
        "seed": 0,
        "attention": "auto",
        "kv": {"device": "native", "host": "native"},
        "backend": {"name": "hf"},
        "protocol": {**whole, "question": "with", "generated": "free", **(protocol or {})},
        "probe": {"every": 0},
        "method": {"name": method, "minimum": minimum, "preset": 256},
        "task": {"name": task, "unit": "tokens", **(options or {}), **dict.fromkeys(paths or {}, "local")},
    }
    more = {"metric": "accuracy", "model_name": model, "device_name": "cpu, 1 threads", **(config or {})}
    own |= {key: value for key, value in more.items() if key in own}
    known = {"model_revision": "folder-1", "protocol": "p", "data": "d", "device": "cpu", "dtype": "float32"}
    known |= {"dense_layers": []}
    lines = list(samples) if samples and not isinstance(samples, Mapping) and isinstance(samples[0], dict) else None
    size = Budget(None) if method == "full" else Budget(256 if budget is None else budget, minimum=16)
    written = {**own, **more, "task": {**own["task"], **(paths or {})}}
    with RunFolder.open(
        results, task, model, f"{method}-{budget}", {"config": own, **known, **identity}, written
    ) as folder:
        for one in lines or records(samples):  # type: ignore[arg-type]
            folder.add(with_budget(one, size, own["protocol"]["accounting"]))
        if finished:
            folder.finish(summarise(folder.records.values(), "accuracy"))
    return folder.path


def with_budget(line: Mapping[str, Any], size: Budget, accounting: str) -> dict[str, Any]:
    """A sample's line, whose audit has the budget that its run had and keeps to it, if it says none."""
    audit = line.get("audit")
    if not audit or "budget" in audit:
        return {**line}
    tokens = None if size.size is None else size.tokens(line["prompt_tokens"])
    more = {"attended_mean": min(audit["attended_mean"], tokens)} if tokens and accounting == "unified" else {}
    return {**line, "audit": {**audit, "budget": tokens, **more}}


def archived(results: Path, archive: Path) -> Path:
    """The runs of a results folder in an archive, as tar packs them."""
    with tarfile.open(archive, "w:xz", format=tarfile.USTAR_FORMAT) as packed:
        packed.add(results / "runs", "runs")
    return archive
