"""Sweeps whose jobs run elsewhere: processes of this machine, and a real SLURM where one is at hand.

`scripts/slurm_local.sh start` brings one up on a Debian machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from words import over

from kvbench.cli import launchers
from kvbench.config import ConfigError

WORDS = ["model=dummy-tiny", "task.lengths=[300]", "task.limit=2", "threads=1", "method=fragile", "budget=64"]
WORDS.append("sweep.shared_decode=false")  # one sample after the other

METHOD = """
import os
import signal
import time
from pathlib import Path

from kvbench.method import Method

MARK = Path(__file__).parent / "broken"


class Fragile(Method):
    # Its second sample with seed 2 sends a signal, the first time.
    samples = 0

    def begin(self, shape, budget, view, context):
        super().begin(shape, budget, view, context)
        self.samples += 1
        if context.seed == 2 and self.samples == 2 and not MARK.exists():
            MARK.touch()
            os.kill(WHOM, signal.SIGNAL)
            time.sleep(SECONDS)

    def rule(self, layer, length, generated):
        return None
"""

YAML = """
name: fragile
about: breaks
_target_: fragile.Fragile
minimum: {paper: 1, unified: 1}
preset: 64
published_dense_layers: []
"""


LOCAL = ["hydra/launcher=local", "hydra.launcher.jobs=2"]
SLURM = ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=null", "hydra.launcher.cpus_per_task=1"]


@pytest.fixture
def submitted() -> list[str]:
    """Words of a launcher: SLURM's where one runs; to ask takes seconds where it is installed and does not."""
    if shutil.which("sbatch") is None:
        return LOCAL
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True)
    return SLURM if done.stdout.strip() else LOCAL


ITSELF, LAUNCHER = "os.getpid()", "int(Path(f'/proc/{os.getppid()}/stat').read_text().split()[3])"


@pytest.fixture
def sweep(tmp_path: Path) -> Any:
    """Two jobs, of which one breaks once with this signal, which goes to itself or to the command that started it."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "fragile.yaml").write_text(YAML)

    def run(signal: str, *words: str, whom: str = ITSELF, seconds: int = 0) -> SimpleNamespace:
        method = METHOD.replace("SIGNAL", signal).replace("WHOM", whom).replace("SECONDS", str(seconds))
        (tmp_path / "fragile.py").write_text(method)
        command = [
            sys.executable,
            "-m",
            "kvbench",
            "-m",
            "--config-dir",
            str(tmp_path),
            *over([*WORDS, "seed=1,2"], words),
        ]
        command.append(f"results_dir={tmp_path / 'results'}")
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]  # as a shell starts its background jobs
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
        states = [json.loads(path.read_text())["state"] for path in tmp_path.rglob("status.json")]
        samples = [path.read_text().count("\n") for path in tmp_path.rglob("samples.jsonl")]
        ids = [
            [json.loads(line)["id"] for line in path.read_text().splitlines()]
            for path in tmp_path.rglob("samples.jsonl")
        ]
        return SimpleNamespace(
            code=done.returncode, out=done.stdout, err=done.stderr, states=states, samples=samples, ids=ids
        )

    return run


@pytest.mark.slow
def test_a_killed_job_stops_no_other_and_the_same_command_goes_on(sweep: Any, submitted: list[str]) -> None:
    broken = sweep("SIGKILL", *submitted)
    assert broken.code == 1, broken.err
    lost, last = broken.err.splitlines()[-2:]
    assert lost.startswith("kvbench: seed=2: job ") and " was lost " in lost and lost.endswith("_log.err")
    assert last == "kvbench: 1 of 2 arms did not finish; the same command goes on with them"
    assert sorted(broken.states) == ["finished", "running"] and sorted(broken.samples) == [1, 2]
    whole = sweep("SIGKILL", *submitted)
    assert whole.code == 0, whole.err
    assert whole.states == ["finished"] * 2 and whole.samples == [2] * 2


@pytest.mark.slow
def test_a_killed_shard_is_made_up_for_and_every_sample_is_there_once(sweep: Any) -> None:
    shards = [*LOCAL, "sweep.shards=2", "task.limit=4"]
    broken = sweep("SIGKILL", *shards)
    assert broken.code == 1, broken.err
    assert "seed=2: 1 arm, " in broken.out and "samples in 2 shards (sweep.shards): 2 jobs" in broken.out
    assert " (seed=2, shard 1 of 2) ended, " in broken.err
    whole = sweep("SIGKILL", *shards)
    assert whole.code == 0, whole.err
    assert whole.states == ["finished"] * 2 and whole.samples == [4] * 2
    assert all(len(set(ids)) == len(ids) == 4 for ids in whole.ids)


@pytest.mark.slow
def test_a_job_that_gets_sigterm_leaves_its_run_stopped(sweep: Any) -> None:
    broken = sweep("SIGTERM", *LOCAL)
    assert broken.code == 1 and sorted(broken.states) == ["finished", "stopped"]


@pytest.mark.slow
def test_a_sweep_that_gets_sigterm_stops_its_jobs(sweep: Any) -> None:
    broken = sweep("SIGTERM", *LOCAL, whom=LAUNCHER, seconds=600)
    assert broken.code == 143 and "stopped" in broken.states and "running" not in broken.states


def test_what_a_launcher_needs_is_said_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(one: launchers.SubmititLauncher) -> None:
        one.most()
        next(iter(one.run([launchers.SweepJob([])], tmp_path)))

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="hydra/launcher=slurm: there is no sbatch here"):
        submit(launchers.Slurm())
    (tmp_path / "sbatch").touch(mode=0o755)
    with pytest.raises(ConfigError, match="hydra/launcher=slurm: there is no srun here"):
        submit(launchers.Slurm())
    with pytest.raises(ConfigError, match=r"hydra.launcher.jobs=0: expected a whole number, 1 or more, or null"):
        submit(launchers.Local(0))
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"needs submitit; pip install 'kvbench\[slurm\]'"):
        submit(launchers.Local())


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("Invalid generic resource (gres) specification", True),
        ("Requested node configuration is not available", False),
    ],
)
def test_a_cluster_without_gpus_is_told_which_key_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, named: bool
) -> None:
    for program in ("sbatch", "srun"):
        (tmp_path / program).write_text(f"#!/bin/sh\necho 'sbatch: error: {said}' >&2\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = launchers.Slurm(gpus_per_node=1, job_name="kvbench", time=1)
    with pytest.raises(ConfigError, match="hydra.launcher: ") as refused:
        next(iter(launcher.run([launchers.SweepJob([])], tmp_path)))
    assert said in str(refused.value) and ("gpus_per_node=1" in str(refused.value)) == named


def test_no_gpus_are_asked_for_where_none_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()
    monkeypatch.setattr(launchers.shutil, "which", lambda name: name)
    executor = SimpleNamespace(update_parameters=lambda **keys: asked.update(keys))
    submitit = SimpleNamespace(SlurmExecutor=lambda *_, **__: executor)
    launchers.Slurm(gpus_per_node=0, cpus_per_task=2, mem=0).executor(submitit, tmp_path)
    assert asked == {"cpus_per_task": 2, "mem": 0}
