"""`engine=vllm` beside `engine=hf`: the same task, the same scores, what was attended alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from kvbench.cli.compose import composed
from kvbench.runs.shared import run_shared

ARMS = ("full", "streaming_llm", "topk")


def records(results: Path, engine: str, samples: int) -> dict[str, dict[str, Any]]:
    """Samples of each arm by its method and their id."""
    words = ("task=passkey", "task.lengths=[256]", f"task.limit={samples}", "dtype=float32", f"results_dir={results}")
    run_shared([composed(f"engine={engine}", f"method={method}", "budget=64", *words) for method in ARMS])
    suffix = "" if engine == "hf" else f"-{engine}"
    names = {method: f"{method}{'' if method == 'full' else '-64'}{suffix}" for method in ARMS}
    found = {}
    for method, name in names.items():
        [file] = results.glob(f"runs/passkey/*/{name}/*/samples.jsonl")
        found |= {f"{method} {one['id']}": one for one in map(json.loads, file.read_text().splitlines())}
    return found


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
        assert one["ttft_s"] > 0 and one["audit"]["executor"] == "vllm"
