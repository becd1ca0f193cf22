"""What a table says of settings in which its runs differ; what all share is in the snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import stored

from kvbench.cli.report import main


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) == 0
    plain = capsys.readouterr().out.replace("\\", "").replace("{[}", "[").replace("{]}", "]").replace("{}", "")
    return " ".join(plain.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for method, budget in (("full", None), ("quest", 64), ("snapkv", 64)):
        stored(tmp_path, method, budget, protocol={"question": "after"}, options={"lengths": [4096]})
    return tmp_path


def test_what_differs_is_said_by_task_or_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(folder, "topk", 64, protocol={"question": "after"}, options={"lengths": [4096]}, dtype="bfloat16")
    stored(folder, "full", None, task="niah", protocol={"question": "after"}, options={"lengths": [512]})
    page = told(capsys, str(folder))
    assert "tiny, passkey: task.lengths=[4096]" in page and "tiny, niah: task.lengths=[512]" in page
    assert "Not the same in all rows: dtype=bfloat16 | float32." in page


def test_full_attention_is_asked_for_nothing_that_it_does_not_depend_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("quest", "snapkv"):
        stored(tmp_path, method, 64, protocol={"accounting": "unified"})
    stored(tmp_path, "full", None)
    page = told(capsys, str(tmp_path), "--rows", "method", "--allow-mixed")
    assert "protocol.accounting=unified" in page and "Not the same" not in page
