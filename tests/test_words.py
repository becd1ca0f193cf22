"""What words of a command line are refused for before anything is composed, and with which advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from words import configs

from kvbench.cli import main as cli
from kvbench.config import ConfigError


@pytest.mark.parametrize("path", ["../mymodel", "./mymodel", "/models/mine", "org/name", "a/b/c.gguf"])
@pytest.mark.parametrize("sweep", [[], ["-m", "budget=64,128"]])
def test_a_path_as_the_name_of_a_model_is_told_which_key_takes_it(path: str, sweep: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"^model={re.escape(path)}: .*model\.path={re.escape(path)}$"):
        configs(*sweep, f"model={path}")


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("results_dir=2024_11_29", "20241129"),
        ("results_dir=7", "7"),
        ("results_dir=1e3", "1000.0"),
        ("results_dir=true", "true"),
        ("model.path=2024_11", "202411"),
        ("task.data_dir=1_0", "10"),
        ("hydra.sweep.dir=2024_11", "202411"),
    ],
)
def test_a_folder_that_looks_like_a_number_is_shown_as_typed_and_quoted(word: str, read: str) -> None:
    key, _, typed = word.partition("=")
    task = ["task=ruler"] if key.startswith("task") else []
    with pytest.raises(ConfigError) as refused:
        configs(*task, word)
    said = str(refused.value)
    assert said.startswith(f"{word}: ") and read in said and f"{key}='{typed}'" in said
    if key != "hydra.sweep.dir":
        [quoted] = configs(*task, f"{key}='{typed}'")
        assert OmegaConf.select(quoted, key) == typed


def test_a_working_directory_that_is_gone_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["task.limit=1"], ["status"], ["check-method", "quest"]):
        assert cli.main(words) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("kvbench: ") and "working directory" in line
