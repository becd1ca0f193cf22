"""Requests at once in equal memory, inside vLLM: scripts/bench_capacity.py at its smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_capacity.py"
MEMORY = 8  # MiB, of which a request's 544 tokens take 3.75 while they are whole, and a block that stays empty .75


def test_a_method_that_frees_runs_more_requests_in_the_same_memory(tmp_path: Path) -> None:
    words = (
        f"--engine vllm --model tiny --tokens 512 --memory {MEMORY} --answer 32 --requests 6 --clients 4 --budget 64"
    )
    command = [sys.executable, SCRIPT, *words.split(), "--dtype", "float32", "--parts", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (cell,) = json.loads(done.stdout.splitlines()[-1])["cells"]
    full, snapkv = cell["arms"]["full"], cell["arms"]["snapkv"]
    assert full["at_once_peak"] < snapkv["at_once_peak"] <= snapkv["seats"] <= 4
    for arm in (full, snapkv):
        assert arm["tokens"] == 6 * 32
        assert arm["blocks_peak"] <= arm["blocks"] and arm["preemptions"] == 0
        assert arm["memory_bytes"]["all"] <= MEMORY * 2**20
        assert arm["memory_bytes"]["all"] == arm["memory_bytes"]["blocks"] + arm["memory_bytes"]["beside"]
    assert full["memory_bytes"]["beside"] == 0 < snapkv["memory_bytes"]["beside"]
    assert snapkv["tokens_per_s_ratio"] > 0
