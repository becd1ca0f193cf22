"""Sweeps: arms that one prefill can serve are one job, end each for itself, and give what runs of their own give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from words import over

import kvbench.runs.sweep
from kvbench.cli import main as cli
from kvbench.cli.compose import composed
from kvbench.cli.launchers import Local
from kvbench.cli.plan import described, differing, grouped, parts, planned
from kvbench.config import ConfigError, bind_methods
from kvbench.runs.run import open_folder, prepare

bind_methods()

WORDS = ["model=dummy-tiny", "task.lengths=[300]", "task.limit=2"]
SAME = ("id", "output_ids", "scores", "audit", "prompt_tokens", "error")


@pytest.fixture
def sweep(tmp_path: Path, capsys: Any) -> Any:
    """Run a sweep within this process: its exit code and what it printed to stdout and stderr."""

    def run(*words: str, folder: str = "results") -> SimpleNamespace:
        code = cli.main(["-m", *over(WORDS, words), f"results_dir={tmp_path / folder}"])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The arms that each shared prefill was made for."""
    made: list[int] = []
    real = kvbench.runs.sweep.SharedPrompts

    def noted(arms: Any, prompts: Any, *progress: Any) -> Any:
        made.append(len(arms))
        return real(arms, prompts, *progress)

    monkeypatch.setattr(kvbench.runs.sweep, "SharedPrompts", noted)
    return made


def records(root: Path) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Records by seed, arm and sample."""
    found = {}
    for path in root.glob("runs/*/*/*/*/samples.jsonl"):
        config = yaml.safe_load((path.parent / "run.yaml").read_text())["config"]
        for record in map(json.loads, path.read_text().splitlines()):
            found[config["seed"], path.parts[-3], record["id"]] = record
    return found


@pytest.mark.slow
def test_a_sweep_prefills_each_sample_once_and_gives_what_runs_of_their_own_give(
    sweep: Any, prefills: list[int], tmp_path: Path
) -> None:
    words = ["method=full,quest,snapkv", "budget=64,128", "seed=0,1"]
    done = sweep(*words)
    assert done.code == 0 and prefills == [5] * 4, "two seeds of two samples, full attention once for both budgets"
    assert "method=quest budget=128 seed=1" in done.out and "task.limit" not in done.out
    sweep(*words, "sweep.shared_prefill=false", folder="own")
    assert len(prefills) == 4
    shared, own = records(tmp_path / "results"), records(tmp_path / "own")
    assert shared.keys() == own.keys() and len(shared) == 5 * 2 * 2
    for key, record in shared.items():
        assert {name: record[name] for name in SAME} == {name: own[key][name] for name in SAME}
        assert record["shared_prefill"] and "ttft_s" not in record and "ttft_s" in own[key]


@pytest.mark.slow
def test_a_finished_sweep_computes_nothing_again_and_a_longer_one_only_what_is_new(
    sweep: Any, prefills: list[int]
) -> None:
    sweep("method=full,quest")
    prefills.clear()
    sweep("method=full,quest")
    assert prefills == []
    sweep("method=full,quest,snapkv", "task.limit=3")
    assert prefills == [1, 1, 3]


@pytest.mark.slow
def test_an_arm_alone_has_a_prefill_of_its_own(sweep: Any, prefills: list[int], tmp_path: Path) -> None:
    assert sweep("method=quest", "task.lengths=[300],[310]", "sweep.shared_decode=false").code == 0
    assert prefills == []
    assert all("ttft_s" in record for record in records(tmp_path / "results").values())


def test_an_arm_that_fails_ends_alone_and_goes_on_later(
    sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("methods.quest.Quest.select", lambda *_: 1 / 0)
        done = sweep("method=full,quest,snapkv")
    assert done.code == 1
    assert done.err.splitlines()[-2:] == [
        "kvbench: method=quest: ZeroDivisionError: division by zero",
        "kvbench: 1 of 3 arms did not finish; the same command goes on with them",
    ]
    assert "Traceback" in done.err, "what is no bad input shows where it came from"
    assert {arm for _, arm, _ in records(tmp_path / "results")} == {"full", "snapkv-256"}
    assert sweep("method=full,quest,snapkv").code == 0
    assert {arm for _, arm, _ in records(tmp_path / "results")} == {"full", "quest-256", "snapkv-256"}


def test_no_arm_starts_where_one_cannot_run(sweep: Any, tmp_path: Path) -> None:
    done = sweep("method=full,snapkv,lychee", "budget=63")
    assert done.code == 2 and done.err.startswith("kvbench: budget=63: below the minimum of lychee, 64 ")
    assert not (tmp_path / "results" / "runs").exists()


@pytest.mark.parametrize("word", ["threads=1,2", "memory_check=true,false"])
def test_arms_that_are_one_run_are_refused(sweep: Any, tmp_path: Path, word: str) -> None:
    """The second would find all samples there, and show the times of the first."""
    done = sweep("method=full", word)
    assert done.code == 2 and "both are one run, which keeps the times that it measured first" in done.err
    assert not (tmp_path / "results" / "runs").exists()


def test_one_arm_decodes_both_ways_in_one_sweep(sweep: Any, tmp_path: Path) -> None:
    assert sweep("method=full,quest", "sweep.shared_decode=true,false").code == 0
    assert len(list((tmp_path / "results").glob("runs/*/*/*/*/summary.json"))) == 4


def test_an_arm_that_names_no_threads_has_those_that_torch_had(sweep: Any) -> None:
    before = torch.get_num_threads()
    assert sweep("method=full,quest", "threads=1").code == 0
    assert torch.get_num_threads() == before


def test_each_local_job_has_a_gpu_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Executor:
        def update_parameters(self, visible_gpus: list[int], gpus_per_node: int) -> None:
            placed.append(visible_gpus)

    placed: list[list[int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    local = Local()
    assert local.most() == 2
    for running in (set(), {0}, {0, 1}, {0}, {2}):
        local.room(Executor(), running)
    assert placed == [[5], [3], [3], [5]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f,GPU-2a")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=GPU-1f,GPU-2a: .* takes numbers"):
        Local().most()


def test_an_arm_in_use_elsewhere_is_left_to_whoever_holds_it(sweep: Any, tmp_path: Path) -> None:
    config = composed(*WORDS, f"results_dir={tmp_path / 'results'}", "method=quest")
    arm = prepare(config)
    with open_folder(arm):
        done = sweep("method=full,quest,snapkv", "sweep.shared_decode=false")
    assert done.code == 1 and "method=quest: " in done.err and " is in use by process " in done.err
    assert {arm for _, arm, _ in records(tmp_path / "results")} == {"full", "snapkv-256"}


@pytest.mark.slow
def test_two_sweeps_at_once_neither_corrupt_nor_repeat(sweep: Any, tmp_path: Path) -> None:
    words = ["method=full,quest,snapkv", "seed=0,1", "threads=1"]
    command = [sys.executable, "-m", "kvbench", "-m", *over(WORDS, words), f"results_dir={tmp_path / 'results'}"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        _, err = one.communicate(timeout=200)
        assert one.returncode == 0 or "is in use by process" in err, err
        assert one.returncode in (0, 1) and "Traceback" not in err
    assert sweep(*words).code == 0
    files = list(tmp_path.rglob("samples.jsonl"))
    assert len(files) == 6
    for file in files:
        ids = [json.loads(line)["id"] for line in file.read_text().splitlines()]
        assert len(ids) == len(set(ids)) == 2


@pytest.mark.slow
def test_bad_data_of_a_task_ends_all_its_arms_and_no_other(sweep: Any, tmp_path: Path) -> None:
    """How long a prompt must be is known only once the tokenizer is there."""
    done = sweep("method=full,quest", "task.lengths=[300],[200]")
    assert done.code == 1 and done.err.count("a passkey prompt needs at least 248") == 2
    assert len(records(tmp_path / "results")) == 4


def test_jobs_are_grouped_by_all_but_method_budget_and_probe() -> None:
    def jobs(*words: str) -> list[Any]:
        return [composed("model=dummy-tiny", *word.split()) for word in words]

    assert grouped(jobs("method=full", "method=quest budget=64", "method.page_size=8", "probe.every=2")) == [
        [0, 1, 2, 3]
    ]
    mixed = jobs("method=full", "method=full seed=1", "method=quest", "method=quest seed=1", "task=niah")
    assert grouped(mixed) == [[0, 2], [1, 3], [4]]
    alone = jobs("method=full sweep.shared_prefill=false", "method=quest sweep.shared_prefill=false")
    assert grouped(alone) == [[0], [1]]


def test_arms_are_named_by_the_words_that_differ() -> None:
    assert differing([["a=1", "b=1"], ["a=1", "b=2"]]) == ["b=1", "b=2"]
    assert differing([["a=1", "b=1"]]) == ["a=1 b=1"]


def test_a_plan_splits_arms_only_where_more_jobs_are_asked_for_and_says_why() -> None:
    words = [f"method={method} seed={seed}" for method in ("full", "quest", "snapkv") for seed in (0, 1)]

    def plan(most: int, *more: str) -> list[str]:
        arms = [composed("model=dummy-tiny", *one.split(), *more) for one in words]
        groups = planned(arms, words, most)
        jobs = parts(groups)
        covered = sorted((arm, job.shard.number) for job in jobs for arm in job.arms)
        assert covered == [(arm, number) for arm in range(6) for number in range(groups[0].shards)]
        assert len({job.title for job in jobs}) == len(jobs)
        return list(described(groups))

    why = "3 arms share each prefill and decode together"
    assert plan(1) == ["6 arms in 2 jobs:", f"  seed=0: {why}: 1 job", f"  seed=1: {why}: 1 job"]
    assert plan(3)[:2] == [
        "6 arms in 3 jobs:",
        f"  seed=0: {why}, in 2 pieces, each with prefills of its own (hydra.launcher.jobs): 2 jobs",
    ]
    assert plan(100)[0] == "6 arms in 6 jobs:"
    assert plan(1, "sweep.shards=4")[:2] == [
        "6 arms in 8 jobs:",
        f"  seed=0: {why}, samples in 4 shards (sweep.shards): 4 jobs",
    ]
    assert (
        plan(1, "sweep.shared_prefill=false")[1] == "  method=full seed=0: 1 arm, as sweep.shared_prefill=false: 1 job"
    )


@pytest.mark.slow
def test_shards_make_the_folders_that_one_job_makes(sweep: Any, tmp_path: Path) -> None:
    words = ["method=full,snapkv", "task.limit=3"]
    done = sweep(*words, "sweep.shards=2")
    assert done.code == 0 and "\n2/2 samples, " in done.out and "\n1/1 samples, " in done.out
    assert sweep(*words, folder="whole").code == 0
    shards, whole = records(tmp_path / "results"), records(tmp_path / "whole")
    assert shards.keys() == whole.keys() and len(shards) == 6
    for key, record in shards.items():
        assert {name: record[name] for name in SAME} == {name: whole[key][name] for name in SAME}
