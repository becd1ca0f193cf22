"""The small model on real benchmark data, end to end; skipped where the data folder is absent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.cli.compose import composed
from kvbench.runs.sweep import run
from kvbench.tasks import longbench

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "longbench_mini").is_dir(), reason="needs the sample data folder")
def test_every_longbench_subset_runs_and_is_scored(tmp_path, monkeypatch):
    short = {name: replace(subset, new_tokens=16) for name, subset in longbench.SUBSETS.items()}
    monkeypatch.setattr(longbench, "SUBSETS", short)
    data = [f"task.data_dir={DATA / 'longbench_mini'}", "task.limit=16", "task.max_length=500"]
    summary = run(composed("task=longbench", *data, "method=snapkv", "budget=128", f"results_dir={tmp_path}"))
    assert (summary["n"], summary["failed"], len(summary["groups"])) == (16, 0, 16)
    assert 0 <= summary["macro"]["score"] <= 100
    (path,) = tmp_path.glob("runs/**/samples.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(record["cut_tokens"] > 0 and record["prompt_tokens"] < 520 for record in records)
    assert all(0 <= record["scores"]["score"] <= 1 and record["answers"] for record in records)


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="needs the sample data folder")
def test_gsm8k_runs_with_a_budget_that_is_a_share_of_the_prompt(tmp_path):
    words = [f"task.data_dir={DATA / 'gsm8k'}", "task.limit=1", "method=quest", "budget=0.1"]
    summary = run(composed("task=gsm8k", *words, f"results_dir={tmp_path}"))
    assert (summary["n"], summary["failed"]) == (1, 0)
    (path,) = tmp_path.glob("runs/**/samples.jsonl")
    record = json.loads(path.read_text())
    assert record["audit"]["budget"] == -(-record["prompt_tokens"] // 10)
