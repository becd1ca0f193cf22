"""Commands that messages print are run here as they stand, and do what the message says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import archived, record, stored

from kvbench.cli import board, score
from kvbench.cli import main as cli
from kvbench.cli.report import main as report
from kvbench.cli.submit import main as submit
from kvbench.config import ASSETS, shipped
from kvbench.report.data.frame import collect

ROOT = Path(__file__).parents[1]
PASSKEY: dict[str, Any] = {"config": {"metric": "accuracy", "task": shipped("task", "passkey")}}


def run(command: str) -> int:
    """Run a line as a shell would, kvbench's own commands in this process."""
    words = shlex.split(command, comments=True)
    if words[:3] == ["python", "-m", "kvbench"]:
        return cli.main(words[3:])
    if words[0] == "kvbench":
        return cli.main(words[1:])
    return subprocess.run(command, shell=True, check=False).returncode


def named_in(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    assert found, text
    return found[1]


def test_the_line_that_is_damaged_is_deleted_by_its_command(tmp_path: Path) -> None:
    folder = stored(tmp_path / "it's", samples=[record("a", "", 1.0), record("b", "", 1.0)], finished=False)
    file = folder / "samples.jsonl"
    file.write_text('{"id": "x", "scores": 3}\n' + file.read_text())
    assert run(named_in(collect([tmp_path], unfinished=True).skipped[0].why, r"\((sed .*)\), and its")) == 0
    assert len(collect([tmp_path], unfinished=True).arms) == 1


def test_a_lost_summary_is_made_anew_by_its_command(tmp_path: Path) -> None:
    line = record("a", "", 1.0)
    folder = stored(tmp_path, samples=[line], **PASSKEY)
    (folder / "summary.json").unlink()
    assert run(named_in(collect([tmp_path]).skipped[0].why, r"; (kvbench score .*) writes")) == 0
    assert len(collect([tmp_path]).arms) == 1


def test_an_archive_is_unpacked_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stored(tmp_path / "results", samples=[record("a", "", 1.0)], **PASSKEY)
    archive = archived(tmp_path / "results", tmp_path / "its own.tar.xz")
    shutil.rmtree(tmp_path / "results")
    assert score.main([str(archive), "--write"]) == 2
    monkeypatch.chdir(tmp_path)
    assert run(named_in(capsys.readouterr().err, r"unpack it: (tar .*)")) == 0
    assert score.main([str(tmp_path / "runs"), "--write"]) == 0


def test_runs_that_are_shipped_are_shown_by_the_command_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stored(tmp_path / "made", "quest")
    (tmp_path / "results").mkdir()
    archive = archived(tmp_path / "made", tmp_path / "results" / "ours.tar.xz")
    monkeypatch.setattr("kvbench.cli.report.SHIPPED", [archive])
    monkeypatch.chdir(tmp_path)
    assert report([]) == 2
    assert run(named_in(capsys.readouterr().err, r"(kvbench report .*)")) == 0
    assert "quest" in capsys.readouterr().out


def test_a_submission_is_held_against_the_board_by_the_command_that_packing_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stored(tmp_path / "board", "full", None, samples=[record("a", "", 1.0)], **PASSKEY)
    monkeypatch.setattr(board, "SHIPPED", [archived(tmp_path / "board", tmp_path / "board.tar.xz")])
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "mine", "quest", samples=[record("a", "", 1.0)], **PASSKEY)
    assert submit(["mine", "--out", "my run.tar.xz"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kvbench board")]
    assert len(commands) == 2 and "--out site/" in commands[1]
    assert run(commands[0]) in (0, 1) and "my run: " in capsys.readouterr().out


@pytest.mark.slow
def test_samples_that_are_missing_are_made_by_the_command_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model in a folder of one's own."""
    shutil.copytree(ASSETS / "tiny", tmp_path / "my model")
    monkeypatch.chdir(tmp_path)
    words = ["model.path='my model'", "method=snapkv", "budget=64", "task.limit=2", "task.lengths=[300]"]
    assert cli.main([*words, "results_dir=out"]) == 0
    (file,) = Path("out").rglob("samples.jsonl")
    whole = file.read_text()
    file.write_text(whole.splitlines(keepends=True)[1])
    assert run(named_in(collect([Path("out")]).skipped[0].why, r"; (python -m kvbench .*) runs them again")) == 0
    assert list(Path("out").rglob("samples.jsonl")) == [file], "the same run"
    again = [json.loads(line)["output"] for line in file.read_text().splitlines()]
    assert sorted(again) == sorted(json.loads(line)["output"] for line in whole.splitlines())


# -- the page on methods of one's own ----------------------------------------------------------------------------------

# What asks a package registry, or runs the whole conformance suite, which tests of its own do.
ELSEWHERE = ("make setup", "kvbench fetch", "model=smollm2-135m-instruct", "kvbench check-method", "--out site/")


@pytest.mark.slow
def test_the_commands_of_the_page_on_own_methods_lead_to_a_row(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorials/own_method.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"```\n(.*?)```", page, re.S)
    lines = [line for block in blocks for line in block.splitlines() if not any(word in line for word in ELSEWHERE)]
    assert [shlex.split(line)[1] for line in lines] == ["new-method", "--config-dir", "--config-dir", "submit", "board"]
    for line in lines:
        words = [sys.executable, "-m", *shlex.split(line, comments=True)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout[-500:], done.stderr[-500:])
    assert "mine: 1 rows by Your Name" in done.stdout
