"""What a table says of the settings of its runs: those that are the same in all rows stand below it, in each format."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_runs import csv_lines, stored, timed

from kvbench.cli.report import main

ALIKE = ("protocol.question=after", "task.lengths=[4096]", "seed=0", "dtype=float32", "protocol.accounting=paper")


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


@pytest.mark.parametrize("format", ["console", "markdown", "latex", "html"])
@pytest.mark.parametrize("rows", [[], ["--rows", "method"]])
def test_settings_of_all_rows_stand_below_a_table(
    folder: Path, capsys: pytest.CaptureFixture[str], format: str, rows: list[str]
) -> None:
    page = told(capsys, str(folder), *rows, "--format", format)
    assert all(setting in page for setting in ALIKE)
    assert ("budget=64" in page) == bool(rows)  # else a label says it


def test_csv_has_a_column_for_each_setting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [setting.partition("=") for setting in ALIKE]
    for words in ([], ["--rows", "method", "--values", "attended_mean"]):
        for line in csv_lines(capsys, folder, *words):
            if line["method"] == "full":
                assert not line["protocol.accounting"]  # on which it does not depend
            else:
                assert all(line[name] == value for name, _, value in settings)


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


def test_tables_of_times_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, "quest", 64, [timed(1024, 4.0)], task="latency", dtype="bfloat16")
    assert "dtype=bfloat16" in told(capsys, str(tmp_path))
