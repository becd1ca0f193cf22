"""How long threads should spin while they wait for one another: decode steps alone, and beside other work.

Between two parallel regions torch's OpenMP threads spin, so that the next region starts at once; beside other work they
spin on cores that somebody needs. Each setting decodes in a process of its own, since OpenMP reads it as it is loaded;
settings take turns, round after round, so that a noisy machine disturbs all alike. "Beside other work" is one busy
process for each core.

    python scripts/bench_threads.py                                      the small model
    python scripts/bench_threads.py model=smollm2-135m-instruct --rounds 2

Prints one JSON object as its last line:
  ratios     of each method and surrounding, ms a token of every setting over the library's own (`spin=300000`)
  ms         the medians over rounds that the ratios are of
  rounds     ms a token of every round
  cores, settings
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
LIBRARY = "spin=300000"  # what GNU's OpenMP does where nothing is set: some milliseconds
SETTINGS = {
    LIBRARY: {"GOMP_SPINCOUNT": "300000"},
    "spin=30000": {"GOMP_SPINCOUNT": "30000"},
    "spin=10000": {"GOMP_SPINCOUNT": "10000"},
    "spin=3000": {"GOMP_SPINCOUNT": "3000"},
    "spin=1000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SURROUNDINGS = ("alone", "loaded")


def main() -> None:
    """Time every case, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="settings of every run, such as model=NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=["full", "icecache"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.rounds):
        for surrounding in SURROUNDINGS:
            with busy(os.cpu_count() or 1) if surrounding == "loaded" else contextlib.nullcontext():
                for method in options.methods:
                    for setting in options.settings:
                        spent = decode(method, setting, options)
                        found.setdefault(f"{method} {surrounding}", {}).setdefault(setting, []).append(spent)
                        print(
                            f"{turn + 1}/{options.rounds} {method} {surrounding} {setting}: {spent:.1f} ms a token",
                            flush=True,
                        )
    medians = {case: {name: statistics.median(times) for name, times in by.items()} for case, by in found.items()}
    ratios = {case: {name: round(spent / by[LIBRARY], 3) for name, spent in by.items()} for case, by in medians.items()}
    result = {
        "ratios": ratios,
        "ms": {case: {name: round(spent, 2) for name, spent in by.items()} for case, by in medians.items()},
        "rounds": found,
        "cores": os.cpu_count(),
        "settings": vars(options),
    }
    print(json.dumps(result))


def decode(method: str, setting: str, options: argparse.Namespace) -> float:
    """Mean milliseconds of a decode step, in a process with this setting."""
    environment = {key: value for key, value in os.environ.items() if key not in OPENMP} | SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        task = [f"task.lengths=[{options.length}]", f"task.steps={options.steps}", "task.prefill=false"]
        task.append("task.keys=synthetic_attention")
        command = [sys.executable, "-m", "kvbench", "task=latency", f"method={method}", f"results_dir={folder}", *task]
        done = subprocess.run([*command, *options.words], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr.strip().splitlines()[-1])
        (record,) = [
            json.loads(line) for path in Path(folder).rglob("samples.jsonl") for line in path.read_text().splitlines()
        ]
    return float(record["tpot_ms"]["mean"])


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute and never wait, while the block runs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
