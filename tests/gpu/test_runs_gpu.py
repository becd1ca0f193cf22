"""Whole runs on a real GPU: the dtype that it means, and arms that decode together there as on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbench.backends.hf.loading import load
from kvbench.config import shipped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[2]
# What is evicted, paged, searched on the host and on the device, expanded to all heads, and coded in three ways.
ARMS = ["method=full,snapkv,streaming_llm,h2o,quest,icecache,pariskv,squeeze", "kv=native,int8,turboquant_mse4"]


def test_auto_means_bfloat16() -> None:
    node = shipped("model", "dummy-tiny")
    assert node is not None
    loaded = load(node)
    assert loaded.model.device.type == "cuda"
    assert loaded.model.dtype == torch.bfloat16


def scores(device: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Of each arm the share of tokens that full attention would have generated, of each text, in float32."""
    words = ["task=fidelity", "task.lengths=[512]", "task.samples=2", "task.steps=16", "budget=64", "dtype=float32"]
    command = [sys.executable, "-m", "kvbench", "-m", *words, *ARMS, f"device={device}", f"results_dir={folder}"]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    subprocess.run(command, cwd=ROOT, env=os.environ | path, check=True, capture_output=True)
    return {
        file.parent.parent.name: [json.loads(line)["scores"] for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("runs/**/samples.jsonl"))
    }


def test_arms_decode_together_as_on_the_cpu(tmp_path: Path) -> None:
    here, there = scores("cpu", tmp_path / "cpu"), scores("cuda", tmp_path / "cuda")
    assert here == there and len(here) == 24
