"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.config import choices

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_method_that_the_readme_adds_runs_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    code = next(block for block in blocks("python") if "class Newest" in block)
    config = next(block for block in blocks("yaml") if "newest.Newest" in block)
    (tmp_path / "newest.py").write_text(code)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "newest.yaml").write_text(config.replace("methods.newest", "newest"))
    command = "-m kvbench --config-dir conf method=newest budget=32 task.lengths=[300] task.limit=1"
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "32.0 = 1.00 C" in done.stdout


def test_the_task_that_the_readme_adds_runs_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    code = next(block for block in blocks("python") if "class Colours" in block)
    config = next(block for block in blocks("yaml") if "colours.Colours" in block)
    (tmp_path / "colours.py").write_text(code)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "colours.yaml").write_text(config)
    (tmp_path / "colours.jsonl").write_text('{"text": "Snow is white.", "colour": "white"}\n{"text": "no colour"}\n')
    command = "-m kvbench --config-dir conf task=colours method=full budget=null"
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(2 samples, 1 failed)" in done.stdout and "colours, line 2: field colour: missing" in done.stdout


@pytest.mark.parametrize("group", ["method", "task"])
def test_every_choice_stands_in_the_readme_s_table(group: str) -> None:
    table = README.split(f"| `{group}=` |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(choices(group))


def test_the_readme_names_no_file_that_is_not_there() -> None:
    named = set(re.findall(r"`((?:kvbench|methods|scripts|tests|conf)/[\w/.]+)`", README))
    assert named, "the pattern finds nothing"
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
