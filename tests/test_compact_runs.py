"""Runs without what a report does not need give the same report."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvbench.cli.compose import composed
from kvbench.report.data.frame import collect
from kvbench.runs.shared import run_shared

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "compact_runs.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = ["model=dummy-tiny", "task.lengths=[300]", "task.limit=3", f"results_dir={folder}"]
    run_shared([composed(f"method={name}", *words) for name in ("full", "quest")])
    return folder


def test_compact_runs_are_small_and_report_the_same(runs: Path, tmp_path: Path) -> None:
    folders = SCRIPT["compact"](runs, tmp_path)
    assert {folder.parent.name for folder in folders} == {"full", "quest-256"}
    whole, compact = collect([runs]), collect([tmp_path])
    changing = ["path", "paths", "tpot_ms_mean"]
    pd.testing.assert_frame_equal(
        whole.arms.drop(columns=changing), compact.arms.drop(columns=changing), rtol=1e-4, check_dtype=False
    )
    for path in runs.rglob("samples.jsonl"):
        copy = tmp_path / path.relative_to(runs)
        assert "/" not in str(yaml.safe_load((copy.parent / "run.yaml").read_text())["config"]["results_dir"])
        assert copy.stat().st_size < path.stat().st_size and "output_ids" not in copy.read_text()


@pytest.mark.parametrize(("outputs", "kept"), [((), set()), (("passkey",), {"answers", "output"})])
def test_answers_and_outputs_are_kept_of_the_tasks_that_are_named(
    runs: Path, tmp_path: Path, outputs: tuple[str, ...], kept: set[str]
) -> None:
    for folder in SCRIPT["compact"](runs, tmp_path, outputs):
        for record in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
            assert record.keys() & {"answers", "output", "output_ids"} == kept and record["written"]["length"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", "there"], "nowhere"),
        (["same", "same"], "expected another to write to"),
        (["same/runs", "same"], "expected another to write to"),
        (["all", "all/kept"], "expected another to write to"),
        (["runs", "there", "--outputs=passkeys"], "--outputs=passkeys: no such task; did you mean passkey"),
    ],
)
def test_what_cannot_be_copied_is_told(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["compact_runs.py", *(word if word.startswith("-") else str(tmp_path / word) for word in words)]
    )
    with pytest.raises(SystemExit, match="2"):
        SCRIPT["main"]()
    assert told in capsys.readouterr().err
