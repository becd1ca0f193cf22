"""Tables, bars and messages on terminals that do not have every character: others take their place."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import stored

from kvbench.cli import demo, score, status
from kvbench.cli.output import printing
from kvbench.cli.report import main as report
from kvbench.runs.progress import progress
from kvbench.runs.table import table, wide_console
from kvbench.runs.terminal import Console, fitting

# How each shows the name "modèle ≤7".
NAMES = {"ascii": "modele <=7", "latin-1": "modèle <=7", "cp1252": "modèle <=7", "koi8-r": "modele ≤7"}
NARROW = list(NAMES)
ROWS = [
    demo.DemoRow("full", None, 0.0, 0.0, (100.0, 0.0), (100.0, 51.0, 100.0), None, 2**20, 0.0, 38.1, 5.1, 4, 4),
    demo.DemoRow("quest", 256, 0.446, 0.07, (67.0, 9.0), (25.0, 4.6, 69.9), 1.5, 2**20, 2048.0, 44.8, 6.3, 4, 4),
]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a call prints on a stream of an encoding that refuses what it has not."""

    def run(encoding: str, call: Callable[..., object], *arguments: object) -> str:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        printing(lambda: int(bool(call(*arguments))))
        for stream in streams:
            stream.flush()
        monkeypatch.undo()
        return "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]

    return run


def plus_minus(encoding: str) -> str:
    try:
        "±".encode(encoding)
    except UnicodeEncodeError:
        return "+-"
    return "±"


def boxes(text: str) -> list[int]:
    """Widths of the lines of boxes."""
    return [len(line) for line in text.splitlines() if line[:1] in "|+┏┃┡│└"]


@pytest.mark.parametrize("encoding", NARROW)
def test_the_table_of_the_demo_is_in_characters_that_the_terminal_has(
    printed: Callable[..., str], encoding: str
) -> None:
    def show() -> None:
        wide_console().print(demo.table(ROWS))

    text = printed(encoding, show)
    assert f"67 {plus_minus(encoding)} 9" in text and "?" not in text
    assert len(set(boxes(text))) == 1, "every line of the box is as wide as the others"


@pytest.mark.usefixtures("nothing_shipped")
@pytest.mark.parametrize("encoding", NARROW)
@pytest.mark.parametrize(
    "words",
    [["--rows", "model", "--columns", "budget"], ["--rows", "model", "--format", "markdown"], ["--claims"]],
    ids=" ".join,
)
def test_reports_are_in_characters_that_the_terminal_has(
    tmp_path: Path, printed: Callable[..., str], encoding: str, words: list[str]
) -> None:
    for model in ("modèle ≤7", "another"):
        stored(tmp_path, model=model)
    text = printed(encoding, report, [str(tmp_path), *words])
    assert NAMES[encoding] in text or words == ["--claims"]
    assert "?" not in text


def test_a_report_in_a_file_is_in_unicode_whatever_the_terminal(tmp_path: Path, printed: Callable[..., str]) -> None:
    stored(tmp_path / "runs", model="modèle ≤7")
    printed("ascii", report, [str(tmp_path / "runs"), "--rows", "model", "--out", str(tmp_path / "out.txt")])
    assert "modèle ≤7" in (tmp_path / "out.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", NARROW)
def test_scores_states_and_run_tables_are_in_characters_that_the_terminal_has(
    tmp_path: Path, printed: Callable[..., str], encoding: str
) -> None:
    folder = stored(tmp_path, model="modèle 模型", finished=False)
    text = printed(encoding, status.main, [str(tmp_path)])
    assert "mod" in text and "?" not in text.replace("2/?", "")  # how many there shall be, nothing says
    text = printed(encoding, score.main, [str(tmp_path / "modèle ≤7")])
    assert NAMES[encoding] in text
    summary = {"score": 50.0, "stderr": 25.0, "n": 2, "failed": 0}
    text = printed(encoding, lambda: wide_console().print(table("passkey, quest", "accuracy", summary)))
    assert f"50.0 {plus_minus(encoding)} 25.0" in text and folder.exists()


@pytest.mark.parametrize("encoding", NARROW)
def test_bars_are_in_characters_that_the_terminal_has(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="kvbench.plain")
    console = Console(file=stream, force_terminal=True, width=100)
    with progress(console, total=2, done=0) as report_:
        report_.tokens(5, 10)
        report_.once("said", "text … of ± 模")
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert "samples" in text and "\\u6a21" in text and "?" not in text.replace("[?25", "")


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("1 ± 2", "ascii", "1 +- 2"),
        ("1 ± 2", "latin-1", "1 ± 2"),
        ("café Ωmega", "ascii", "cafe \\u03a9mega"),
        ("━━╸ ███▏", "cp1252", "--- ####"),
        ("a\udc80b", "utf-8", "a\\udc80b"),
        ("a ≤ b → c…", "ascii", "a <= b -> c..."),
    ],
)
def test_what_a_character_becomes(text: str, encoding: str, shown: str) -> None:
    assert fitting(text, encoding) == shown


def test_a_command_of_its_own_prints_on_an_ascii_terminal(tmp_path: Path) -> None:
    stored(tmp_path, model="modèle ≤7")
    words = [sys.executable, "-m", "kvbench", "report", str(tmp_path), "--rows", "model"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True)
    assert NAMES["ascii"].encode() in done.stdout and not done.stderr
