"""Run folders as frames: what real runs hold, and what is left out and said."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_runs import record, records, stored
from rich.console import Console

from kvbench.cli.compose import composed
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.tables import runs as tables
from kvbench.runs.sweep import run, run_shared


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a random model: two that share a prefill, one with probes over several groups."""
    results = tmp_path_factory.mktemp("results")
    words = ["model=dummy-tiny", "device=cpu", f"results_dir={results}"]
    passkey = [*words, "task=passkey", "task.lengths=[300,400]", "task.positions=2"]
    arms = [
        composed(*passkey, "sweep.shared_decode=false", f"method={name}", "budget=64") for name in ("full", "quest")
    ]
    run_shared(arms, Console(quiet=True))
    needles = ["task=niah", "task.lengths=[1024]", "task.subsets=[niah_single_1,niah_multivalue]", "task.samples=1"]
    run(composed(*words, *needles, "method=icecache", "budget=64", "probe.every=40"))
    return results


def test_a_real_run_s_line_holds_what_its_summary_says(real):
    runs = collect([real])
    assert not runs.skipped and len(runs.arms) == 3
    for arm in runs.arms.itertuples():
        summary = json.loads((arm.path / "summary.json").read_text())
        assert (arm.score_samples, arm.n, arm.failed) == (summary["score"], summary["n"], summary["failed"])
        assert arm.attended_mean == summary["audit"]["attended_mean"]
        assert arm.device_kv_bytes == summary["audit"]["device_kv_bytes"]
        if arm.probe_every:
            assert arm.recall == summary["probe"]["recall"] and arm.transfer == "in place"
        else:
            assert arm.tpot_ms_mean == summary["latency"]["tpot_ms_mean"]
            breakdown = {f"breakdown_ms.{part}": value for part, value in summary["latency"]["breakdown_ms"].items()}
            assert breakdown.items() <= runs[arm.Index].arm.items() and len(breakdown) > 3
        run = runs[arm.Index]
        found = {group: run.score((group,)).mean for group in summary["groups"]}
        assert found == pytest.approx({group: values["score"] for group, values in summary["groups"].items()})
        assert (arm.model, arm.weights, arm.finished) == ("dummy-tiny", "random", True)
    assert set(runs.arms["method"]) == {"full", "quest", "icecache"}
    assert {"method.page_size", "task.lengths", "protocol.accounting", "probe.every"} <= set(runs.settings.columns)


def test_samples_are_read_when_asked_for(real):
    runs = collect([real])
    for arm in runs.arms.itertuples():
        samples = runs[arm.Index].samples()
        assert [sample["id"] for sample in samples] == runs.scores[arm.Index].ids
        assert all(sample["output_ids"] for sample in samples)


def test_a_score_is_the_plain_mean_over_groups(tmp_path):
    stored(tmp_path, samples={"short": [1.0, 1.0, 1.0], "long": [0.0]})
    (arm,) = collect([tmp_path]).arms.itertuples()
    assert (arm.score, arm.score_samples) == (50.0, 75.0)


def test_a_budget_is_what_counts(tmp_path):
    stored(tmp_path, "full", 64)
    stored(tmp_path, "quest", None, config={"seed": 1})
    stored(tmp_path, "snapkv", 0.1)
    arms = collect([tmp_path]).arms.set_index("method")["budget"]
    assert arms["full"] is None and arms["quest"] == 256 and arms["snapkv"] == 0.1
    assert type(arms["quest"]) is int


def left_out(tmp_path: Path) -> dict[str, str]:
    """Why each run is left out, by its arm's folder; one sound run must have come through."""
    runs = collect([tmp_path])
    assert "snapkv" in set(runs.arms["method"]), "the sound run"
    return {path.parent.name: why for path, why in runs.skipped}


def test_an_unfinished_run_is_left_out_and_can_be_asked_for(tmp_path):
    stored(tmp_path, "snapkv")
    stored(tmp_path, "quest", finished=False)
    assert left_out(tmp_path) == {"quest-64": "unfinished, 2 samples so far; --unfinished shows it"}
    arms = collect([tmp_path], unfinished=True).arms.set_index("method")
    assert not arms.at["quest", "finished"] and arms.at["quest", "n"] == 2


def test_a_run_without_a_sample_is_left_out(tmp_path):
    stored(tmp_path, "snapkv")
    stored(tmp_path, "quest", samples=())
    assert left_out(tmp_path) == {"quest-64": "no sample yet"}


@pytest.mark.parametrize(
    "written, why",
    [
        ("format: 9\n", "of format 9; this kvbench reads format 1"),
        ("name: someone else's\n", "run.yaml is not kvbench's"),
        ("[1, 2\n", "run.yaml cannot be read"),
        ("config: '\x00'\n", "run.yaml cannot be read"),
        ("", "run.yaml is not kvbench's"),
        ("format: 1\nidentity: {config: {}}\nconfig: {}\n", "not as kvbench writes it (KeyError: 'run_id')"),
        ("format: 1\nidentity: 3\nconfig: {}\n", "not as kvbench writes it (identity"),
    ],
)
def test_a_torn_or_foreign_file_is_left_out_and_the_rest_stands(tmp_path, written, why):
    stored(tmp_path, "snapkv")
    (stored(tmp_path, "quest") / "run.yaml").write_text(written)
    (found,) = left_out(tmp_path).values()
    assert found.startswith(why)


def test_a_damaged_line_leaves_the_run_out_and_a_torn_last_one_its_sample(tmp_path):
    stored(tmp_path, "snapkv", samples=[1.0, 1.0])
    damaged, torn = stored(tmp_path, "quest"), stored(tmp_path, "topk")
    lines = (damaged / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (damaged / "samples.jsonl").write_bytes(b"\x00\x00\n" + lines[1])
    with open(torn / "samples.jsonl", "ab") as file:
        file.write(lines[0][:40])
    found = left_out(tmp_path)
    assert list(found) == ["quest-64"] and "line 1 is damaged" in found["quest-64"]
    assert collect([tmp_path]).arms.set_index("method").at["topk", "n"] == 2


def test_a_file_that_cannot_be_opened_leaves_its_run_out(tmp_path):
    stored(tmp_path, "snapkv")
    path = stored(tmp_path, "quest") / "samples.jsonl"
    path.unlink()
    path.mkdir()
    assert "not a regular file" in left_out(tmp_path)["quest-64"]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, True, "1"])
def test_a_score_that_is_no_number_names_its_sample(tmp_path, score):
    stored(tmp_path, "snapkv")
    stored(tmp_path, "quest", samples=[record("a", "", 1.0), record("b", "", score)])
    assert "sample b: scores.accuracy=" in left_out(tmp_path)["quest-64"]


def test_a_failed_sample_counts_zero_and_needs_no_score(tmp_path):
    stored(tmp_path, samples=[record("a", "", 1.0), record("b", "", None, error="out of memory")])
    runs = collect([tmp_path])
    (arm,) = runs.arms.itertuples()
    assert (arm.score, arm.n, arm.failed) == (50.0, 2, 1)
    assert runs.scores[0].failed.tolist() == [False, True]


def test_of_two_runs_of_an_arm_the_newest_stands(tmp_path):
    older, newer = stored(tmp_path, source="a"), stored(tmp_path, source="b", samples=[1.0, 1.0])
    for path, time in ((older, "2026-01-01"), (newer, "2026-01-02")):
        (path / "status.json").write_text(json.dumps({"updated": time}))
    runs = collect([tmp_path])
    assert list(runs.arms["path"]) == [newer]
    assert [(path, why) for path, why in runs.skipped] == [(older, f"an older run of the same arm as {newer}")]


def test_of_two_data_sets_of_one_name_that_is_said(tmp_path):
    for at, answer in enumerate(("Paris", "Rome")):
        path = stored(tmp_path, samples=[record("a", "", 1.0, answers=[answer])], data=answer)
        (path / "status.json").write_text(json.dumps({"updated": f"2026-01-0{at + 1}"}))
    ((_, why),) = collect([tmp_path]).skipped
    assert why.endswith("on other data of that name")


def test_full_attention_under_two_budgets_is_one_arm(tmp_path):
    stored(tmp_path, "full", 64)
    stored(tmp_path, "full", 128)
    runs = collect([tmp_path])
    assert len(runs.arms) == 1 and len(runs.skipped) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"protocol": {"accounting": "unified"}},
        {"options": {"lengths": [2048]}},
        {"config": {"seed": 1}},
        {"config": {"probe": {"every": 2}}},
        {"dtype": "bfloat16"},
        {"samples": records([1.0], shared_prefill=True), "source": "another"},
        {"model_revision": "folder-2"},
    ],
)
def test_what_makes_another_arm(tmp_path, other):
    stored(tmp_path)
    stored(tmp_path, **other)
    assert len(collect([tmp_path]).arms) == 2


def test_a_torn_run_is_left_out_with_the_command_that_mends_it(tmp_path):
    """Each lost a file or a part of one after it had finished."""
    stored(tmp_path, "snapkv")
    for method in ("quest", "icecache", "topk", "lychee"):
        folder = stored(tmp_path, method)
        samples = folder / "samples.jsonl"
        if method == "quest":
            samples.write_text(samples.read_text().partition("\n")[0] + "\n")
        elif method == "icecache":
            (folder / "run.yaml").unlink()
        elif method == "topk":
            (folder / "summary.json").unlink()
        else:
            samples.write_text("{\n" + samples.read_text())
    told = left_out(tmp_path)
    lost = told["quest-64"]
    assert lost.startswith("1 of its 2 samples are missing; ") and lost.endswith(" runs them again")
    assert told["icecache-64"].startswith("run.yaml is missing")
    assert told["topk-64"].startswith("summary.json is missing; kvbench score ")
    assert "line 1 is damaged; delete that line (sed -i 1d " in told["lychee-64"]


def test_a_method_whose_budget_counts_in_one_accounting_alone_has_one(tmp_path):
    stored(tmp_path, "racc", 64, config={"method": {"name": "racc", "minimum": {"paper": None, "unified": 40}}})
    assert list(collect([tmp_path]).arms["budget"]) == [64]


def test_frames_of_nothing_usable_are_empty(tmp_path):
    stored(tmp_path, finished=False)
    runs = collect([tmp_path])
    assert len(runs.arms) == len(runs.settings) == 0 and len(runs.skipped) == 1


def test_a_run_whose_shards_are_under_way_has_their_samples(tmp_path):
    path = stored(tmp_path, finished=False)
    lines = (path / "samples.jsonl").read_text().splitlines(keepends=True)
    for place, line in enumerate(lines):
        shard = path / "shards" / f"{place}-of-2"
        shard.mkdir(parents=True)
        (shard / "samples.jsonl").write_text(line)
    (path / "samples.jsonl").unlink()
    (run,) = collect([tmp_path], unfinished=True)
    assert len(run.samples()) == len(run.scores.ids) == 2 and not run.arm["finished"]


def test_chosen_runs_keep_their_numbers_and_scores(tmp_path):
    stored(tmp_path, "quest")
    stored(tmp_path, "snapkv", samples={"a": [1.0, 0.0], "b": [1.0, 1.0]})
    runs = collect([tmp_path])
    (run,) = (run for run in runs if run.arm["method"] == "snapkv")
    only = runs.only([run])
    assert list(only.arms.index) == list(only.settings.index) == list(only.scores) == [run.index]


def shown(results: Path) -> Runs:
    """All of the runs there, made into every kind of table; one of the two is sound."""
    runs = collect([results])
    assert len(runs.arms) + len(runs.skipped) == 2 and "snapkv" in set(runs.arms["method"])
    tables.summary(runs)
    tables.by_group(runs)
    return runs


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_torn_the_rest_is_read(tmp_path_factory, data):
    results = tmp_path_factory.mktemp("results")
    stored(results, "snapkv")
    path = stored(results, "quest", samples={"a": [1.0, 0.0], "b": [1.0]})
    file = path / data.draw(st.sampled_from(["run.yaml", "samples.jsonl", "status.json", "summary.json"]))
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 40)))
    file.write_bytes(whole[:start] + data.draw(st.binary(max_size=4)) + whole[end:])
    runs = shown(results)
    if file.name in ("status.json", "summary.json"):
        assert not runs.skipped, "neither is needed to read the samples"


odd = st.sampled_from([None, True, -1, 0, 3.5, "x", "", [], [1, [2]], {}, {"a": 1}, 10**30])


def places(node: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a nested one lies."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield (*here, key)
        yield from places(value, (*here, key))


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=odd)
def test_whatever_stands_in_another_s_place_the_rest_is_read(tmp_path_factory, data, value):
    results = tmp_path_factory.mktemp("results")
    stored(results, "snapkv")
    path = stored(results, "quest", samples={"a": [1.0, 0.0], "b": [1.0]})
    first, *others = (path / "samples.jsonl").read_text().splitlines()
    whole = {"run": yaml.safe_load((path / "run.yaml").read_text()), "sample": json.loads(first)}
    *above, last = data.draw(st.sampled_from([place for place in places(whole) if len(place) > 1]))
    functools.reduce(operator.getitem, above, whole)[last] = value
    (path / "run.yaml").write_text(yaml.safe_dump(whole["run"], sort_keys=False))
    (path / "samples.jsonl").write_text("\n".join([json.dumps(whole["sample"]), *others]) + "\n")
    shown(results)
