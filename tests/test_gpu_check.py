"""What the GPU check says of what it finds; its parts run on a CPU here."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.compose import composed
from kvbench.runs.sweep import run

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))

SUITE = """<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">
<testcase classname="tests.gpu.a" name="one"/>
<testcase classname="tests.gpu.a" name="two"><failure message="no"/></testcase>
<testcase classname="tests.gpu.a" name="three"><skipped/></testcase></testsuite></testsuites>"""


def cell(method: str, length: int, **measured: Any) -> dict[str, Any]:
    parts = {"breakdown_ms.attention": 6.0, "breakdown_ms.select": 2.0, "breakdown_ms.model": 12.0}
    sizes = {"memory_bytes": 18 << 30, "weight_bytes": 16 << 30, "whole_kv_bytes": 32 << 30, "layers": 32}
    own = {"method": method, "length": length, "batch": 1, "tpot_ms_mean": 20.0, "tpot_ms_p50": 20.0, "host_bytes": 0}
    return {**own, **parts, **sizes, **measured}


def verdicts(*cells: dict[str, Any]) -> dict[str, str]:
    return {claim.text: claim.verdict for claim in SCRIPT["claims"](list(cells))}


def test_what_was_not_measured_is_said() -> None:
    assert set(verdicts().values()) == {"not measured"}


def test_claims_are_held_against_what_was_measured() -> None:
    full = cell("full", 131072, **{"breakdown_ms.attention": 16.0})
    quest, snapkv = cell("quest", 131072), cell("snapkv", 131072, **{"breakdown_ms.select": 2.1})
    icecache = cell("icecache", 36000, tpot_ms_p50=60.1)
    found = verdicts(full, quest, snapkv, icecache)
    assert found["128k: attention and selection of quest over full attention"] == "holds"
    assert found["128k: attention and selection of snapkv over full attention"] == "FAILS"
    assert found["36k: icecache, ms per token"] == "FAILS"


def test_the_parts_of_a_step_must_add_up() -> None:
    text = "the parts of a step over its time, least of all arms"
    assert verdicts(cell("full", 36000))[text] == "holds"
    assert verdicts(cell("full", 36000), cell("quest", 36000, tpot_ms_mean=20.7))[text] == "FAILS"


def test_memory_counts_for_what_lives_on_the_host() -> None:
    held = cell("icecache", 131072, host_bytes=1, memory_bytes=19 << 30)  # weights, a layer's GiB, and 2 more
    over = cell("pariskv", 131072, host_bytes=1, memory_bytes=20 << 30)
    text = "128k: memory of {} beyond weights and a layer's KV, GiB"
    found = verdicts(held, over, cell("quest", 131072))
    assert found[text.format("icecache")] == "holds" and found[text.format("pariskv")] == "FAILS"
    assert text.format("quest") not in found


def test_far_contexts_need_less_than_their_kv() -> None:
    whole = "512k decodes with KV on the host: what full attention would hold, GB"
    over = "512k: device memory, weights included, over that"
    far = cell("pariskv", 524288, host_bytes=1, whole_kv_bytes=64 << 30)
    assert verdicts(far).items() >= {whole: "holds", over: "holds"}.items()
    assert verdicts({**far, "memory_bytes": 65 << 30})[over] == "FAILS"
    assert verdicts({**far, "whole_kv_bytes": 59 * 10**9})[whole] == "FAILS"


@pytest.mark.slow
def test_a_report_is_made_of_whatever_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests.xml").write_text(SUITE)
    (tmp_path / "kernels.log").write_text("Traceback: no kernels\n")
    words = ["model=dummy-tiny", "task=latency", "task.lengths=[300]", "task.steps=2", "task.warmup=1", "method=quest"]
    run(composed(*words, "budget=64", f"results_dir={tmp_path}"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path)])
    SCRIPT["main"]()
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["tests"]["failed"] == ["tests.gpu.a::two"] and report["kernels"] is None
    assert [(one["method"], one["length"]) for one in report["cells"]] == [("quest", 300)]
    assert report["cells"][0]["layers"] == 4
    assert report["claims"][0]["measured"] > 0.5  # of so few steps of so small a model: no word on the claim
    text = (tmp_path / "gpu_check.md").read_text()
    assert "3 ran, 1 failed, 1 skipped" in text and "| quest" in text and "not measured" in text


@pytest.mark.slow
def test_kernels_are_measured_and_shown(tmp_path: Path) -> None:
    sizes = ["--context", "256", "--budget", "32", "--chunk", "16", "--heads", "4", "2", "--head-dim", "16"]
    command = [sys.executable, "scripts/bench_attention.py", "--device", "cpu", "--dtype", "float32", *sizes]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / "kernels.log").write_text(ran.stdout)
    found = SCRIPT["kernels"](tmp_path / "kernels.log")
    assert found["full"]["ms"]["torch"] > 0 and found["offload"]["bulk"]["moved_gib_s"] > 0
    table = SCRIPT["kernel_table"](found)
    assert f"| what is selected | {found['selected']['ms']['torch']} | - |" in table and "20% new" in "\n".join(table)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"SECONDS_MAX": "soon"}, "SECONDS_MAX=soon: expected a number of seconds"),
        ({"EXPERIMENT": "nothing"}, "EXPERIMENT=nothing: no such experiment"),
        ({"PYTHON": "/bin/false"}, "PYTHON=/bin/false: it has not all of torch"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "torch sees no CUDA device here; EXPERIMENT=latency_cpu"),
    ],
)
def test_bad_settings_are_told_before_anything_runs(settings: dict[str, str], told: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, **settings}
    command = [str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "out")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2 and told in ran.stderr
    assert not (tmp_path / "out").exists()
