"""kill -9 at any moment of a run: after the next starts every sample is there once, as in a run that nobody broke."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLS = 20  # at a random moment of a running process
TORN = 7  # more, by the process itself inside its first, second ... write
SAMPLES = 60

WORDS = [
    "model=dummy-tiny",
    "task.lengths=[300]",
    "budget=64",
    "threads=1",
    "protocol.prefill_chunk=128",
]

# Arms that share each prefill, the keys at each depth that make as many samples in all, and the kills.
ARMS = {"snapkv": (3, KILLS), "full,quest,snapkv": (1, KILLS // 2)}

# Importing torch takes seconds. One process does it once, before any thread starts, and each run is a fork of it. It
# prints a line for each: how it ended, and how many samples were on the disk by then.
FORKS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from kvbench.engine import batch
from kvbench.runs import run
from kvbench.runs.sweep import run as run_alone, run_shared
from kvbench.cli.checks import read_config
from kvbench.config import conf_dir

torch.set_num_threads(1)
batch.MOST_ROWS = 6  # of two samples, so that they end now and then
broken, unbroken, kills, torn = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
methods, words = sys.argv[5].split(","), sys.argv[6:]
with initialize_config_dir(str(conf_dir()), version_base="1.3"):
    configs = {
        folder: [
            read_config(compose("config", [*words, f"method={method}", f"results_dir={folder}"])) for method in methods
        ]
        for folder in (broken, unbroken)
    }
for config in configs[broken]:
    run.prepare(config)  # imports the rest
moments = random.Random(5)


def start(results_dir, before=lambda: None):
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        status = 1
        try:
            before()
            if len(methods) == 1:
                run_alone(configs[results_dir][0])
            else:
                run_shared(configs[results_dir])
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child):
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def samples():
    return sum(file.read_bytes().count(b"\\n") for file in Path(broken).glob("runs/**/samples.jsonl"))


def killed_after(child, new_samples, seconds):
    enough = samples() + new_samples
    while samples() < enough and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return ended(child)


def killed_in_write(left):
    # The left-th write or replacement of a file is cut short by kill -9: of the lock, run.yaml, the status, a sample.
    write, replace = os.write, os.replace

    def torn_write(file, data):
        nonlocal left
        left -= 1
        if left:
            return write(file, data)
        write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def torn_replace(*paths):
        nonlocal left
        left -= 1
        if left:
            return replace(*paths)
        os.kill(os.getpid(), signal.SIGKILL)

    os.write, os.replace = torn_write, torn_replace


began = time.perf_counter()
print("unbroken:", ended(start(unbroken)), 0, flush=True)
whole = time.perf_counter() - began
for _ in range(kills):
    # From the start of a process to its third sample.
    moment = moments.randrange(3), moments.uniform(0, 1.5) * whole / 60
    print("random:", killed_after(start(broken), *moment), samples(), flush=True)
for left in range(1, torn + 1):
    print("torn:", ended(start(broken, lambda: killed_in_write(left))), samples(), flush=True)
print("last:", ended(start(broken)), samples(), flush=True)
"""


def folders(results_dir: Path) -> dict[str, Path]:
    """The run folder of each arm."""
    return {file.parent.parent.name: file.parent for file in sorted(results_dir.glob("runs/*/*/*/*/run.yaml"))}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    timings = {
        "breakdown_ms",
        "machine",
        *(() if record.get("decode") == "together" else ("tpot_ms", "ttft_s", "tt2t_s", "prefill_ms")),
    }
    assert timings < record.keys()
    return {key: value for key, value in record.items() if key not in timings}


@pytest.mark.slow
@pytest.mark.parametrize("methods", ARMS)
def test_after_many_kills_every_sample_is_there_once_and_as_if_there_had_been_none(
    methods: str, tmp_path: Path
) -> None:
    (keys, kills), broken, unbroken = ARMS[methods], tmp_path / "broken", tmp_path / "unbroken"
    # Only one thread may be there when a process forks.
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS, str(broken), str(unbroken), str(kills), str(TORN), methods, *WORDS]
    command += [f"task.keys={keys}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    starts = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    ends = [(kind, end.rpartition(" ")[0]) for kind, end in starts]
    killed = [("random:", "signal 9")] * kills + [("torn:", "signal 9")] * TORN
    assert ends == [("unbroken:", "exit 0"), *killed, ("last:", "exit 0")], done.stdout + done.stderr
    counts = [int(end.rpartition(" ")[2]) for _, end in starts]
    assert counts == sorted(counts), "a sample that was on the disk is gone"
    assert len(set(counts)) > kills / 2, "the kills came while samples were made"
    assert counts[-2] < counts[-1] == SAMPLES, "the last kill came before the end"

    ours, theirs = folders(broken), folders(unbroken)
    assert len(ours) == methods.count(",") + 1 and ours.keys() == theirs.keys()
    for arm, folder in ours.items():
        found, expected = lines(folder), lines(theirs[arm])
        assert len(found) == len(expected) == len({record["id"] for record in found}) == SAMPLES // len(ours)
        assert {record["id"]: without_timings(record) for record in found} == {
            record["id"]: without_timings(record) for record in expected
        }
        summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, theirs[arm])]
        for summary in summaries:
            assert summary.pop("latency") and summary.pop("machine", True)
        assert summaries[0] == summaries[1]
        assert json.loads((folder / "status.json").read_text())["state"] == "finished"
