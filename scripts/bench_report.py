"""How long a report takes over many run folders, and how much memory; prints one JSON object.

A run of one sample is copied to a temporary folder under other methods, budgets and seeds, with as
many samples as asked for; then a process of its own makes each report, and its wall time and its
peak resident memory are taken. Keys: runs, samples (of each run), megabytes (of all folders), and
for each report seconds, cpu_seconds and peak_mib.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import command_line, print_result, say

from kvbench.runs.folder import RunFolder
from kvbench.runs.stored import read_run_yaml, read_samples
from kvbench.runs.summary import summarise

METHODS = ("topk", "icecache", "quest", "snapkv", "streaming_llm", "pyramidkv", "pariskv", "lychee")
REPORTS = {
    "import": ["--help"],
    "summary": [],
    "table": ["--rows", "method,budget,seed", "--columns", "task", "--format", "markdown"],
    "html": ["--format", "html", "--out", os.devnull],
}


def main() -> None:
    """Make the folders, measure each report, print the result."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=200, help="of each run")
    parser.add_argument("--reports", nargs="+", default=list(REPORTS), choices=REPORTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        say(f"writing {options.runs} runs of {options.samples} samples")
        write(Path(folder), options.runs, options.samples)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        result: dict[str, Any] = {
            "runs": options.runs,
            "samples": options.samples,
            "megabytes": size / 1e6,
        }
        for name in options.reports:
            result[name] = measured([*REPORTS[name], *([folder] if name != "import" else [])])
            say(f"{name}: {result[name]}")
    print_result(result)


def write(folder: Path, runs: int, samples: int) -> None:
    """Copies of one run, over methods, budgets and seeds."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as once:
        words = [
            "task=passkey",
            "task.lengths=[1024]",
            "task.limit=1",
            "method=quest",
            f"results_dir={once}",
        ]
        # In a process of its own: a child's peak memory is at least its parent's.
        subprocess.run(
            [sys.executable, "-m", "kvbench", *words], check=True, stdout=subprocess.DEVNULL
        )
        (path,) = (file.parent for file in Path(once).rglob("run.yaml"))
        ran, record = (
            read_run_yaml(path),
            next(iter(read_samples(path / "samples.jsonl")[0].values())),
        )
    os.fsync = lambda descriptor: None  # they need not survive a power cut
    for number in range(runs):
        method, rest = METHODS[number % len(METHODS)], number // len(METHODS)
        choices = {"budget": (64, 256, 1024)[rest % 3], "seed": rest // 3}
        config = {**ran["config"], **choices, "method": {**ran["config"]["method"], "name": method}}
        identity = {
            **ran["identity"],
            "config": {**ran["identity"]["config"], **choices, "method": config["method"]},
        }
        with RunFolder.open(
            folder, "passkey", "tiny", f"{method}-{choices['budget']}", identity, config
        ) as copy:
            for sample in range(samples):
                copy.add(
                    {
                        **record,
                        "id": f"sample-{sample}",
                        "scores": {"accuracy": float(rng.random() < 0.8)},
                    }
                )
            copy.finish(summarise(copy.records.values(), "accuracy"))


def measured(words: list[str]) -> dict[str, float]:
    """Seconds and peak memory of a report in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbench", "report", *words], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(
            f"kvbench report {' '.join(words)} failed: exit code"
            f" {os.waitstatus_to_exitcode(status)}"
        )
    return {
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 2**10,
    }


if __name__ == "__main__":
    main()
