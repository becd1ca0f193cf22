"""Runs without what a report does not need give the same report."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvbench.cli.compose import composed
from kvbench.report.data.frame import collect
from kvbench.runs.sweep import run_shared

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "compact_runs.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = ["model=dummy-tiny", "task.lengths=[300]", "task.limit=3", f"results_dir={folder}"]
    run_shared([composed(f"method={name}", *words) for name in ("full", "quest")])
    return folder


def called(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["compact_runs.py", *map(str, words)])
    SCRIPT["main"]()


def test_compact_runs_are_small_and_report_the_same(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "kept.tar.xz"
    target.write_bytes(b"an older one")
    called(monkeypatch, runs, target)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.tar.xz"]
    assert target.stat().st_size < sum(path.stat().st_size for path in runs.rglob("*.*")) / 5
    whole, compact = collect([runs]), collect([target])
    changing = ["path", "paths", "tpot_ms_mean"]
    pd.testing.assert_frame_equal(
        whole.arms.drop(columns=changing), compact.arms.drop(columns=changing), rtol=1e-4, check_dtype=False
    )


def test_a_packed_archive_packs_to_itself(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, target in ((runs, "first"), (tmp_path / "first.tar.xz", "second")):
        called(monkeypatch, source, tmp_path / f"{target}.tar.xz")
    assert (tmp_path / "first.tar.xz").read_bytes() == (tmp_path / "second.tar.xz").read_bytes()


def test_an_archive_among_the_runs_is_none_of_them(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(runs, tmp_path / "copy"))
    for _ in range(2):
        called(monkeypatch, copy, copy / "a.tar.xz")
        called(monkeypatch, runs, tmp_path / "apart.tar.xz")
        assert (copy / "a.tar.xz").read_bytes() == (tmp_path / "apart.tar.xz").read_bytes()


def test_no_path_and_no_process_of_this_machine_is_packed(runs: Path) -> None:
    files = SCRIPT["compact"](runs)
    assert {Path(name).name for name in files} == {"run.yaml", "samples.jsonl", "summary.json", "status.json"}
    for name, data in files.items():
        if name.endswith("run.yaml"):
            assert "/" not in yaml.safe_load(data)["config"]["results_dir"]
        if name.endswith("status.json"):
            assert json.loads(data).keys() == json.loads((runs / name).read_text()).keys() - {"pid", "host"}


@pytest.mark.parametrize(("outputs", "kept"), [((), set()), (("passkey",), {"answers", "output"})])
def test_answers_and_outputs_are_kept_of_the_tasks_that_are_named(
    runs: Path, outputs: tuple[str, ...], kept: set[str]
) -> None:
    files = SCRIPT["compact"](runs, outputs)
    lines = [line for name, data in files.items() if name.endswith("samples.jsonl") for line in data.splitlines()]
    assert len(lines) == 6
    for record in map(json.loads, lines):
        assert record.keys() & {"answers", "output", "output_ids"} == kept and record["written"]["length"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "there.tar.xz"], "nowhere"),
        ([".", "there.tar.xz"], "no run"),
        ([".", "there"], "there: expected an archive"),
        ([".", "no/there.tar.xz"], "no/there.tar.xz"),
        ([".", "there.tar.xz", "--outputs=passkeys"], "--outputs=passkeys: no such task; did you mean passkey"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        called(monkeypatch, *words)
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
