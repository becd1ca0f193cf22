"""The GPU check: promises beside what was measured, within its time, and taken up where it was cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_check
import predict_gpu
import pytest

from kvbench.config import choices

ROOT = Path(__file__).parent.parent
SIZES = gpu_check.rehearsed_sizes()._replace(methods=("full", "quest"), rows=2)


def cell(p50: float, **more: Any) -> dict[str, Any]:
    parts = {"query": 20.0, "model": p50 - 20.0}
    found = {"mean": p50, "p50": p50, "p95": p50, "floor_ms": 10.0, "python_ms": 1.0, "steps_repeated": 5}
    return {**found, "parts_ms": parts, "index_bytes": 0, **more}


class Lines:
    """Stands for a worker that prints these lines; None: nothing comes in time."""

    def __init__(self, *lines: str | None) -> None:
        self.lines: Iterator[str | None] = iter([*lines, ""])

    def line(self, seconds: float) -> str | None:
        return next(self.lines)

    def stop(self) -> None:
        pass


def test_goals_are_of_presets_that_there_are() -> None:
    assert gpu_check.GOALS.keys() <= set(choices("method"))
    cells = list(gpu_check.real_sizes().cells())
    assert len(cells) == len(set(cells)) == 3 * len(gpu_check.GOALS)
    assert cells[:2] == ["full/36000/1", "full/131072/1"]
    assert cells.index("quest/36000/16") < cells.index("h2o/36000/1"), "those that settle most come first"


@pytest.mark.parametrize(
    ("name", "p50", "verdict"),
    [
        ("full/36000/1", 12.5, "pass"),
        ("full/36000/1", 12.6, "MISS"),
        ("quest/36000/1", 20.0, "pass"),
        ("quest/36000/16", 13.0, "MISS"),
        ("icecache/36000/1", 35.0, "pass"),  # its search of 20 ms is on the CPU
        ("icecache/36000/1", 35.1, "MISS"),
    ],
)
def test_a_step_is_held_against_its_goal(name: str, p50: float, verdict: str) -> None:
    assert verdict in gpu_check.row(name, cell(p50))


def test_what_was_not_measured_is_said() -> None:
    assert "not measured" in gpu_check.row("full/36000/1", None)
    assert "no memory" in gpu_check.row("full/36000/1", {"error": "no memory"})


def test_a_cell_that_takes_too_long_is_left_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ended = "begin full/450/1", f"end full/450/1 {json.dumps(cell(12.0))}"
    turns = iter([Lines("begin full/300/1", None), Lines(*ended)])

    def worker(names: list[str], *_: object) -> Lines:
        asked.append(names[0])
        return next(turns, Lines())

    monkeypatch.setattr(gpu_check, "Worker", worker)
    report = gpu_check.Check(tmp_path, SIZES, rehearse=True)
    report.promises(time.monotonic() + 1000)
    assert asked[:2] == ["full/300/1", "full/450/1"]
    assert report.cells["full/300/1"]["error"].startswith("took over")
    assert report.cells["full/450/1"]["p50"] == 12.0
    assert report.cells["quest/300/1"] == {"error": "its process ended"}


def test_what_a_limit_cut_is_measured_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(names: list[str], *_: object) -> Lines:
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: 99.0)  # over by then
        return Lines(f"end {names[0]} {json.dumps(cell(12.0))}", f"begin {names[1]}", None)

    monkeypatch.setattr(gpu_check, "Worker", worker)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: 0.0)
    gpu_check.Check(tmp_path, SIZES, rehearse=True).promises(90.0)
    again = gpu_check.Check(tmp_path, SIZES, rehearse=True)
    assert list(again.cells) == ["full/300/1"], "the second was begun, and is not told as a failure"
    assert next(name for name in SIZES.cells() if name not in again.cells) == "full/450/1"


@pytest.mark.slow
def test_it_is_rehearsed_on_the_stand_in_for_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path), "--rehearse"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(report["cells"]) == list(gpu_check.rehearsed_sizes().cells())
    for name, found in report["cells"].items():
        assert "error" not in found, (name, found)
        assert sum(found["parts_ms"].values()) == pytest.approx(found["mean"], rel=0.05)
        assert (found["steps_repeated"] or 0) >= (5 if name.startswith(("full", "quest")) else 0)
    assert all(one["tests"] and not one["failed"] for one in report["tests"].values())
    assert report["kernels"]["full"]["ms"]["torch"] > 0
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == first.stdout and "begin" not in again.stderr, "nothing is measured twice"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"PYTHON": "/bin/false"}, "PYTHON=/bin/false: it has not all of torch"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "torch sees no CUDA device here"),
    ],
)
def test_bad_settings_are_told_before_anything_runs(settings: dict[str, str], told: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, **settings}
    command = [str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "out")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2 and told in ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_predicted_step_is_bytes_and_launches() -> None:
    """And what runs between graphs keeps Python's pace; the table has each preset of the goals."""
    launches = {"model": 40, "append": 2, "select": 5, "executor": 3, "waits": 9, "once": 16}
    captured, pieces = (predict_gpu.predicted("quest", 36000, launches, host) for host in (False, True))
    assert captured.floor == pytest.approx(3.64, abs=0.01)  # measured on an H200
    assert captured.device == pytest.approx(captured.floor + captured.scan + (32 * 50 + 16) * 2.1e-3)
    assert captured.whole == captured.device
    assert pieces.whole == pytest.approx(pieces.floor + pieces.scan + 16 * 2.1e-3 + 32 * (40 * 2.1e-3 + 10 * 20e-3))
    assert len(list(predict_gpu.table())) == 2 + len(gpu_check.GOALS)
