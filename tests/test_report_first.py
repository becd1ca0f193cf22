"""What a console shows first of many runs, and their numbers as one file."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from report_runs import record, stored

from kvbench.cli.report import main
from kvbench.report.data.frame import collect
from kvbench.report.data.table import COLUMNS
from kvbench.report.tables.first import MOST, SCREEN, first

SHIPPED = Path(__file__).parents[1] / "results"


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Twelve methods on sixteen samples, and more runs on others."""
    answers = [1.0, 0.0] * 8
    stored(tmp_path, "full", samples=answers)
    for number in range(12):
        lost = [0.0] * number + answers[number:]
        stored(tmp_path, f"m{number}", samples=lost)
        stored(tmp_path, f"m{number}", 128, answers[:4] + [record("x", "", 0.0)["scores"]["accuracy"]])
    return tmp_path


def test_of_many_runs_the_ten_best_on_the_same_samples_come_first(many: Path) -> None:
    runs = collect([many])
    assert len(runs.arms) > SCREEN
    (table,) = first(runs)
    methods = [row[table.axes.index("method")] for row in table.rows]
    scores = [table.cells[row, 0].lines["score"].value for row in range(len(table.rows))]
    assert methods[0] == "full" and len(methods) == 1 + MOST
    assert scores[1:] == sorted(scores[1:], reverse=True)
    assert {cell.lines["samples"].n for cell in table.cells.values()} == {16}
    assert all(cell.settings.get("budget") in (None, "64") for cell in table.cells.values())


def test_no_column_of_the_first_look_is_mostly_dashes() -> None:
    for name in ("reference_qwen", "latency_gpu"):
        (table,) = first(collect([SHIPPED / f"{name}.tar.xz"]))
        assert len(table.rows) <= 1 + MOST
        for value in table.lines:
            there = [cell.shown(value) is not None for cell in table.cells.values()]
            assert 2 * sum(there) > len(there), value


def test_a_console_shows_few_runs_and_all_of_them_where_asked(many: Path, capsys) -> None:
    assert main([str(many)]) == 0
    brief = capsys.readouterr().out
    assert main([str(many), "--all"]) == 0
    assert len(brief.splitlines()) < 40 and "m11" not in brief
    assert "m11" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["all.parquet", "all.csv"])
def test_every_number_is_written_as_one_long_table(many: Path, name: str, capsys) -> None:
    out = many / name
    words = ["--format", "long"] if name.endswith("csv") else []
    assert main([str(many), "--out", str(out), *words]) == 0
    long = pd.read_parquet(out) if out.suffix == ".parquet" else pd.read_csv(out)
    assert {*COLUMNS, "method", "budget"} <= {*long}
    scores = long[(long["quantity"] == "score") & long["stratum"].isin(["", float("nan")])]
    assert len(scores) == len(collect([many]).arms)
    assert main([str(many), "--rows", "method", "--out", str(out), *words]) == 2
    assert "--rows" in capsys.readouterr().err
