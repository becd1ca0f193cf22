"""Arms that share a prefill: results as of runs of their own, each in its own folder, resumed sample by sample."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

import kvbench.runs.sweep
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.engine.batch import Sequence as Decoded
from kvbench.runs.sweep import run, run_shared

ARMS = (("full", "null"), ("quest", "64"), ("snapkv", "64"), ("streaming_llm", "64"))
SAME = ("id", "output", "output_ids", "scores", "audit", "prompt_tokens", "answers", "error")


@pytest.fixture
def configs(tmp_path: Path) -> Any:
    def make(*words: str, folder: str = "shared", arms: Any = ARMS) -> list[Any]:
        base = ["model=dummy-tiny", "task.lengths=[400]", "task.limit=3", f"results_dir={tmp_path / folder}", *words]
        base.append("sweep.shared_decode=false")
        return [composed(f"method={method}", f"budget={budget}", *base) for method, budget in arms]

    return make


def records(root: Path) -> dict[str, dict[str, Any]]:
    """Records by arm and sample."""
    found = {}
    for path in root.glob("runs/*/*/*/*/samples.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[f"{path.parent.parent.name}/{record['id']}"] = record
    return found


def lines(root: Path) -> list[str]:
    return [line for path in root.glob("runs/**/samples.jsonl") for line in path.read_text().splitlines()]


def test_a_shared_prefill_gives_what_runs_of_their_own_give(configs, tmp_path):
    summaries = run_shared(configs())
    for config in configs(folder="own"):
        run(config)
    shared, own = records(tmp_path / "shared"), records(tmp_path / "own")
    assert shared.keys() == own.keys() and len(shared) == 12
    for key, record in shared.items():
        assert {name: record[name] for name in SAME} == {name: own[key][name] for name in SAME}
        assert record["shared_prefill"] is True and "ttft_s" not in record and record["tpot_ms"]["mean"] > 0
        assert "shared_prefill" not in own[key] and own[key]["ttft_s"] > 0
    assert [summary["n"] for summary in summaries] == [3] * 4
    assert all(summary["latency"]["ttft_s"] is None for summary in summaries)


def test_an_arm_of_a_sweep_and_a_run_alone_are_one_run(configs, tmp_path):
    run_shared(configs("task.limit=2"))
    before = lines(tmp_path / "shared")
    summary = run(configs(arms=ARMS[1:2])[0])
    after = lines(tmp_path / "shared")
    assert len(before) == 8 and len(after) == 9 and summary["n"] == 3, "one sample of one arm is new"
    assert len(list(tmp_path.glob("shared/runs/passkey/dummy-tiny/quest-64/*/run.yaml"))) == 1
    assert len(run_shared(configs())) == 4 and len(lines(tmp_path / "shared")) == 12


def test_full_attention_is_one_run_whatever_budget_it_is_given(configs, tmp_path):
    for budget in ("64", "0.5", "null"):
        run(configs(arms=[("full", budget)])[0])
    (folder,) = tmp_path.glob("shared/runs/passkey/dummy-tiny/*/*")
    assert folder.parent.name == "full" and len(lines(tmp_path / "shared")) == 3


def test_a_stopped_run_goes_on_with_what_each_arm_lacks(configs, tmp_path, monkeypatch):
    calls, decode = list[str](), Decoded.decode

    def stopping(sequence: Decoded) -> Decoded:
        calls.append(sequence.engine.method.context.samples[0])
        if len(calls) == 6:
            raise KeyboardInterrupt
        return decode(sequence)

    monkeypatch.setattr(Decoded, "decode", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_shared(configs())
    assert len(lines(tmp_path / "shared")) == 5
    run_shared(configs())
    assert len(calls) == 6 + 7, "only what was missing"
    assert len(lines(tmp_path / "shared")) == len(records(tmp_path / "shared")) == 12
    calls.clear()
    run_shared(configs())
    assert not calls


def test_one_prefill_is_held_at_a_time(configs, monkeypatch):
    real, made = kvbench.runs.sweep.SharedPrompts, []

    def noted(arms: Any, prompts: Any, *progress: Any) -> Any:
        assert not any(earlier() for earlier in made), "its memory is needed for the next"
        prefilled = real(arms, prompts, *progress)
        made.append(weakref.ref(prefilled))
        return prefilled

    monkeypatch.setattr(kvbench.runs.sweep, "SharedPrompts", noted)
    run_shared(configs()[:2])
    assert len(made) == 3


def test_a_prefill_that_fails_fails_its_sample_in_every_arm_that_has_no_less_to_hold(configs, tmp_path, monkeypatch):
    """Where an arm alone would move tokens to the host, it has a prefill of its own."""
    real = kvbench.runs.sweep.SharedPrompts

    def failing(arms: Any, prompts: Any, *progress: Any) -> Any:
        if any(prompt.sample.id.endswith("-0-0") for prompt in prompts):
            raise MemoryError("no room")
        return real(arms, prompts, *progress)

    monkeypatch.setattr(kvbench.runs.sweep, "SharedPrompts", failing)
    summaries = run_shared(configs())
    assert [(summary["n"], summary["failed"]) for summary in summaries] == [(3, 1)] * 4
    errors = {record["error"] for record in records(tmp_path / "shared").values()}
    assert errors == {None, "MemoryError: no room"}
    arms = (("quest", 64), ("pariskv", 64))
    summaries = run_shared(configs(folder="two", arms=arms))
    assert [(summary["n"], summary["failed"]) for summary in summaries] == [(3, 1), (3, 0)]


@pytest.mark.parametrize("words", [["seed=1"], ["protocol.accounting=unified"], ["task.lengths=[401]"]])
def test_arms_that_no_prefill_can_serve_are_refused(configs, words):
    key = words[0].partition("=")[0].partition(".")[0]
    told = rf"^{key}: arms that share a prefill differ in method, budget, kv, probe alone"
    with pytest.raises(ConfigError, match=told):
        run_shared([*configs(arms=ARMS[:1]), *configs(*words, arms=ARMS[1:2])])
