"""Sweeps of more arms than files may be open: the limit is raised where it can be, else arms run group by group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvbench.runs.sweep
from kvbench.cli.compose import composed
from kvbench.runs.sweep import run_arms

PROGRAM = """
import json, resource, sys
from contextlib import ExitStack
from kvbench.runs.folder import ResultsError, RunFolder
from kvbench.runs.folder import folders_at_once
results, soft, hard, wanted = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    count = folders_at_once(wanted)
except ResultsError as error:
    sys.exit(str(error))
with ExitStack() as held:
    folders = [held.enter_context(RunFolder.open(results, "t", "m", f"a{n}", {"n": n}, {})) for n in range(count)]
    for turn in range(2):
        for folder in folders:
            folder.add({"id": str(turn)})
print(json.dumps(count))
"""


def held_under(tmp_path: Path, soft: int, hard: int, wanted: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), *map(str, (soft, hard, wanted))]
    return subprocess.run(words, capture_output=True, text=True)


def test_hundreds_of_folders_are_held_where_the_limit_may_be_raised(tmp_path: Path) -> None:
    done = held_under(tmp_path, 64, 1024, 200)
    assert json.loads(done.stdout) == 200, done.stderr
    files = list(tmp_path.glob("runs/t/m/*/*/samples.jsonl"))
    assert len(files) == 200 and all(len(file.read_text().splitlines()) == 2 for file in files)


def test_as_many_folders_are_held_as_the_limit_has_room_for(tmp_path: Path) -> None:
    done = held_under(tmp_path, 256, 256, 520)
    assert 100 < json.loads(done.stdout) < 256, done.stderr


def test_a_limit_without_room_for_a_folder_is_told_in_one_line(tmp_path: Path) -> None:
    done = held_under(tmp_path, 20, 20, 1)
    assert done.returncode == 1 and "ulimit -n" in done.stderr and len(done.stderr.splitlines()) == 1


def test_arms_in_groups_give_what_arms_together_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [("full", "null"), ("quest", "64"), ("snapkv", "64"), ("streaming_llm", "64"), ("quest", "96")]
    found: list[dict[str, Any]] = []
    for size, folder in ((5, "together"), (2, "groups")):
        monkeypatch.setattr(kvbench.runs.sweep, "folders_at_once", lambda wanted, shard, size=size: size)
        base = ["model=dummy-tiny", "task.lengths=[300]", "task.limit=2", f"results_dir={tmp_path / folder}"]
        outcomes = run_arms([composed(f"method={method}", f"budget={budget}", *base) for method, budget in arms])
        assert [(one.error, one.summary and one.summary["n"]) for one in outcomes] == [(None, 2)] * 5
        lines = [
            json.loads(line)
            for one in outcomes
            for line in (one.folder.path / "samples.jsonl").read_text().splitlines()
        ]
        found.append({key: [line[key] for line in lines] for key in ("id", "output_ids", "scores", "audit")})
    assert found[0] == found[1]
