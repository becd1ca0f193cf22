"""ParisKV's benchmark and its drift experiment measure what they say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def drift_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the drift experiment's script."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / "drift_pariskv.py"))


@pytest.mark.slow
def test_benchmark_prints_one_json_object_with_ratios_and_bytes() -> None:
    words = ["--kinds", "clustered", "--lengths", "3000", "--sweep-length", "600", "--queries", "4", "--dim", "128"]
    command = [sys.executable, SCRIPTS / "bench_pariskv.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["bytes"] == {
        "ids": 16, "codes": 64, "weights": 32, "all": 112, "without_ids": 96, "over_kv": 112 / 512
    }  # fmt: skip
    (run,) = result["runs"]
    us = run["us"]
    assert run["ratio"] == pytest.approx((us["tables"] + us["vote"] + us["rerank"]) / us["scan"])
    assert 0.8 < run["final"] <= run["coarse"] <= 1
    points = {(at["tiers"], at["rho"], at["beta"]): at for at in result["sweep"][0]["points"]}
    assert all(at["final"] <= at["coarse"] for at in points.values())
    assert points[6, 0.2, 1.0]["coarse"] == 1 > points[6, 0.2, 0.2]["coarse"]
    assert points[6, 0.2, 1.0]["final"] == points[1, 0.05, 1.0]["final"], "with beta = 1 only the codes decide"


@pytest.mark.slow
def test_learned_centroids_lose_where_codes_do_not(drift_script: dict[str, Any]) -> None:
    """In the end no topic of the prompt is left among the new keys."""
    stream = drift_script["_drifting"](np.random.default_rng(0), 3000, 5000, 64)
    found = drift_script["report"]([stream], drift_script["Sizes"](4, 64, 500, 50, 100))
    assert found["steps"] == list(range(100, 5001, 100))
    assert found["zone"][0] == 3000 - 68 and found["zone"][-1] == 3000 - 68 + 5000
    assert all(len(own) == len(found["steps"]) for own in found["recall"].values())
    late, drift = found["late_over_early"], found["drift"]
    assert drift > 1.3
    assert late["pariskv"] > 0.9 and late["exact"] > 0.98
    assert late["pq_dx8"] < late["pq_dx8_anew"]
    assert np.mean(found["recall"]["pariskv"]) > np.mean(found["recall"]["pq_2x6"])


def test_a_stream_s_queries_are_those_of_its_generated_tokens(drift_script: dict[str, Any]) -> None:
    """Asked for one key, the exact arm finds it in the place where it stands."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3000, 32)).astype(np.float32)
    wanted = rng.integers(10, 2800, 40)
    stream = drift_script["Stream"](2960, keys, 9 * keys[wanted])
    sizes = drift_script["Sizes"](4, 64, 16, 1, 1)
    exact = [recall["exact"] for _, _, recall in drift_script["recalls"](stream, sizes)]
    assert exact == [1.0] * 40
