"""Results folders of strangers are data: no traceback, no hang, nothing written outside, nothing run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import matplotlib.font_manager  # asks the system for its fonts, in a program of its own  # noqa: F401
import pytest

from kvbench import score, status
from kvbench.report.__main__ import main as report
from kvbench.runs import judge

SEEDS = int(os.environ.get("KVBENCH_FUZZ_SEEDS", "60"))
SECONDS = 60  # for a command on a handful of small runs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile.base(tmp_path_factory.mktemp("base") / "results")


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a program is started, or where something takes too long."""

    def refuse(*args: Any, **_: Any) -> Any:
        raise AssertionError(f"a program was to be started: {args}")

    def late(*_: Any) -> None:
        raise AssertionError("no end in sight")

    for name in ("system", "popen", "execv", "posix_spawn", "fork"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def commands(runs: Path, out: Path) -> list[tuple[Any, list[str]]]:
    """What reads a folder of results, but for a site: that takes most of the time."""
    one = next((path.parent for path in sorted(runs.glob("runs/longgenbench/**/run.yaml"))), runs)
    return [
        (status.main, [str(runs), "--all"]),
        (status.main, [str(runs), "--json"]),
        (score.main, [str(runs)]),
        (score.main, [str(runs), "--json"]),
        (score.main, [str(runs), "--write"]),
        (judge.main, [str(one), "--questions", str(out / "questions.jsonl")]),
        *((report, [str(runs), "--unfinished", "--format", kind]) for kind in ("console", "markdown", "latex", "csv")),
        (report, [str(runs), "--rows", "method", "--columns", "group"]),
        (report, [str(runs), "--claims"]),
        (report, [str(runs), "--figure", "tradeoff", "--out", str(out / "tradeoff.svg")]),
    ]


def attacked(base: Path, folder: Path, seed: int) -> Path:
    runs = hostile.copy(base, folder / "results")
    hostile.mutate(runs, seed)
    return runs


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, SEEDS))])
def test_no_results_folder_breaks_a_command(
    seed: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out, others = attacked(base, tmp_path, seed), tmp_path / "out", tmp_path / "others"
    out.mkdir()
    others.mkdir()
    (others / "thesis.tex").write_text("years of work")
    before = hostile.listing(base), hostile.listing(others)
    with watched(monkeypatch):
        for main, words in commands(runs, out):
            assert main(words) in (0, 2), words
            shown = capsys.readouterr()
            assert "\x1b[31m" not in shown.out + shown.err
            assert "Traceback" not in shown.err
    assert (hostile.listing(base), hostile.listing(others)) == before
    assert {path.name for path in tmp_path.iterdir()} == {"results", "out", "others"}
    assert {path.name for path in out.iterdir()} <= {"questions.jsonl", "tradeoff.svg"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS // 3))
def test_no_results_folder_breaks_a_site(
    seed: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = attacked(base, tmp_path, seed), tmp_path / "site"
    with watched(monkeypatch):
        for words in (["--out", str(out)], ["--out", str(out), "--unfinished"], ["--out", str(tmp_path / "one.html")]):
            assert report([str(runs), *words]) in (0, 2)
    assert {path.name for path in tmp_path.iterdir()} <= {"results", "site", "one.html"}
    for page in out.rglob("*.html"):
        text = page.read_text()
        assert text.count("<script") == text.count("</script>") <= 2
        assert "<script>alert" not in text and "<b onload" not in text
