"""`backend=vllm` beside `backend=hf`: the same task, the same scores, what was attended alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from kvbench.backends.vllm.requests import RequestEngine
from kvbench.cli.compose import composed
from kvbench.cli.plan import grouped
from kvbench.runs.sweep import run_shared

ARMS = ("full", "think", "topk")


def records(results: Path, engine: str, samples: int) -> dict[str, dict[str, Any]]:
    """Samples of each arm by its method and their id."""
    words = ("task=passkey", "task.lengths=[256]", f"task.limit={samples}", "dtype=float32", f"results_dir={results}")
    arms = [composed(f"backend={engine}", f"method={method}", "budget=64", *words) for method in ARMS]
    for group in grouped(arms):
        run_shared([arms[index] for index in group])
    suffix = "" if engine == "hf" else f"-{engine}"
    names = {method: f"{method}{'' if method == 'full' else '-64'}{suffix}" for method in ARMS}
    found = {}
    for method, name in names.items():
        [file] = results.glob(f"runs/passkey/*/{name}/*/samples.jsonl")
        found |= {f"{method} {one['id']}": one for one in map(json.loads, file.read_text().splitlines())}
    return found


def test_a_sample_whose_logits_are_not_finite_fails_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, spoiled = RequestEngine.attend_new, []

    def attend_new(engine: RequestEngine, layer: int, *given: torch.Tensor) -> torch.Tensor | None:
        out = attend(engine, layer, *given)
        if out is not None and engine.shape.lengths in (spoiled or [engine.shape.lengths]):
            spoiled[:] = [engine.shape.lengths]
            return out * float("nan")
        return out

    monkeypatch.setattr(RequestEngine, "attend_new", attend_new)
    words = ("task=passkey", "task.lengths=[256,512]", "task.positions=1", "batch=2", "dtype=float32")
    run_shared([composed("backend=vllm", "method=topk", "budget=64", *words, f"results_dir={tmp_path}")])
    [file] = tmp_path.glob("runs/passkey/*/*/*/samples.jsonl")
    first, second = (json.loads(line)["error"] for line in file.read_text().splitlines())
    assert first == "FloatingPointError: the model's logits are NaN or infinite" and second is None


def test_runs_generate_attend_and_score_as_those_of_the_other_engine(tmp_path: Path) -> None:
    ours = records(tmp_path, "vllm", 1)
    kept = dict(ours)
    ours = records(tmp_path, "vllm", 2)
    assert all(ours[key] == record for key, record in kept.items()), "what is there is not run again"
    theirs = records(tmp_path, "hf", 2)
    assert ours.keys() == theirs.keys() and len(ours) == 2 * len(ARMS)
    for key, one in ours.items():
        other = theirs[key]
        assert one["output_ids"] == other["output_ids"] and one["scores"] == other["scores"], key
        assert one["audit"]["attended_mean"] == pytest.approx(other["audit"]["attended_mean"], rel=0.02), key
        for name in ("budget", "over_rule"):
            assert one["audit"][name] == other["audit"][name], f"{key} {name}"
        assert one["ttft_s"] > 0 and one["audit"]["executor"] == "vllm" and "visibility_only" not in one["audit"]
    held = {key: one["audit"]["device_kv_allocated_bytes"] for key, one in ours.items()}
    for key in ours:
        if key.startswith("think"):
            assert held[key] < 0.8 * held[key.replace("think", "full")], "what think drops is freed"
