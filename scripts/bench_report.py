"""How long a report takes over many run folders, and how much memory; prints one JSON object.

Synthetic runs with samples as a real run writes them go to a temporary folder; then a process of its own makes each
report, and its wall time and its peak resident memory are taken. Keys: runs, samples (of each run), megabytes (of all
folders), and for each report seconds, cpu_seconds and peak_mib.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvbench.config import shipped
from kvbench.runs.folder import RunFolder
from kvbench.runs.summary import summarise

METHODS = ("full", "topk", "icecache", "quest", "snapkv", "streaming_llm", "pariskv", "lychee")
GROUPS = 4
PARTS = ("index_build", "index_update", "select", "transfer", "attention", "model", "other")
REPORTS = {
    "import": ["--help"],
    "summary": [],
    "table": ["--rows", "method,budget,seed", "--columns", "task", "--format", "markdown"],
    "html": ["--format", "html", "--out", os.devnull],
}


def main() -> None:
    """Make the folders, measure each report, print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=200, help="of each run")
    parser.add_argument("--reports", default=",".join(REPORTS), help=f"some of {','.join(REPORTS)}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"writing {given.runs} runs of {given.samples} samples", file=sys.stderr)
        write(Path(folder), given.runs, given.samples)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        found: dict[str, Any] = {"runs": given.runs, "samples": given.samples, "megabytes": round(size / 1e6, 1)}
        for name in given.reports.split(","):
            found[name] = measured([*REPORTS[name], *([folder] if name != "import" else [])])
            print(f"{name}: {found[name]}", file=sys.stderr)
    print(json.dumps(found))


def write(folder: Path, runs: int, samples: int) -> None:
    """Runs over methods, budgets, tasks and seeds."""
    os.fsync = lambda descriptor: None  # they need not survive a power cut
    rng = random.Random(0)
    for number in range(runs):
        method, rest = METHODS[number % len(METHODS)], number // len(METHODS)
        budget, task, seed = (64, 256, 1024)[rest % 3], ("passkey", "ruler")[rest // 3 % 2], rest // 6
        if method == "full" and rest % 3:
            method = "pyramidkv"  # full attention has no budget, so one run of it is enough
        own = {
            "budget": budget,
            "seed": seed,
            "attention": "auto",
            "protocol": {"accounting": "paper", "dense_layers": "auto", "chat": "auto", "prefill_chunk": 4096},
            "probe": {"every": 0},
            "method": {"name": method, "minimum": {"paper": None if method == "full" else 16}, "preset": 256},
            "task": {"name": task, "lengths": [1024, 2048, 4096, 8192], "unit": "tokens"},
        }
        own["protocol"] |= {"question_as_decode": False, "generated": "free"}
        identity = {"config": own, "model_revision": "folder-0", "device": "cpu", "dtype": "float32", "number": number}
        chosen = {"method": "quest", "task": task, "model": "tiny"}
        whole = {group: shipped(group, name) for group, name in chosen.items()}
        config = {**own, **whole, "model_name": "tiny", "metric": "accuracy", "device_name": "cpu"}
        with RunFolder.open(folder, task, "tiny", f"{method}-{budget}", identity, config) as run:
            for sample in range(samples):
                run.add(record(rng, sample, budget))
            run.finish(summarise(run.records.values(), "accuracy"))


def record(rng: random.Random, number: int, budget: int) -> dict[str, Any]:
    """A sample's line as `kvbench.measure.arm` makes it, of 64 generated tokens."""
    ids = [rng.randrange(4096) for _ in range(64)]
    length = 1024 * 2 ** (number % GROUPS)
    return {
        "id": f"sample-{number}",
        "group": str(length),
        "meta": {"length": length, "depth": number % 20 * 5.0},
        "answers": [str(ids[0])],
        "chat": False,
        "prompt_tokens": length,
        "error": None,
        "output": " ".join(map(str, ids)),
        "scores": {"accuracy": float(rng.random() < 0.8)},
        "output_ids": ids,
        "audit": {
            "attended_mean": budget * rng.uniform(0.8, 1.2),
            "attended_max": budget,
            "budget": budget,
            "device_kv_bytes": 12_000_000,
            "index_bytes": 100_000,
            "host_bytes": 0,
            "moved_bytes_per_step": 0.0,
            "over_rule": False,
            "executor": "torch",
        },
        "tpot_ms": {"mean": rng.uniform(4, 6), "p50": 5.0, "p95": 7.0},
        "breakdown_ms": {part: rng.random() for part in PARTS},
        "ttft_s": rng.random(),
        "tt2t_s": rng.random(),
        "prefill_ms": {part: rng.random() for part in PARTS},
    }


def measured(words: list[str]) -> dict[str, float]:
    """Seconds and peak memory of a report in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "kvbench", "report", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"kvbench.report {' '.join(words)} failed: exit code {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(used.ru_maxrss / 2**10, 1),
    }


if __name__ == "__main__":
    main()
