"""What a table shows when parts of a score are asked for alone, and the order of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import record, records, stored

from kvbench.config import ConfigError
from kvbench.report.data.frame import collect, gathered
from kvbench.report.data.table import Table
from kvbench.report.figures import all as figures
from kvbench.report.tables.runs import pivot

SAMPLES = {"full": [1.0] * 10, "random": [1.0, 0.0] * 5, "snapkv": [1.0, 1.0, 1.0, 0.0, 1.0] * 2, "h2o": [0.0] * 10}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for method, scores in SAMPLES.items():
        stored(tmp_path, method, None if method == "full" else 64, scores)
    return tmp_path


def numbers(folder: Path, *values: str) -> dict[str, dict[str, float]]:
    table = pivot(collect([folder]), ["method"], [], values)
    return {labels[0]: dict(table.cells[row, 0].numbers) for row, labels in enumerate(table.rows)}


def test_a_gain_is_paired_with_random_tokens_of_the_same_budget(runs: Path) -> None:
    stored(runs, "random", 128, [1.0] * 10)
    table = pivot(collect([runs]), ["method", "budget"], [], ["gain"], ["budget=64"])
    found = {labels[0]: table.cells[row, 0].numbers for row, labels in enumerate(table.rows)}
    assert found["snapkv"]["gain"] == pytest.approx(30) and found["h2o"]["gain"] == pytest.approx(-50)
    assert found["snapkv"]["gain_low"] < 30 < found["snapkv"]["gain_high"]
    assert "gain" not in found["random"]


@pytest.mark.parametrize("more", [{"protocol": {"accounting": "unified"}}, {"dense_layers": [0, 1]}])
def test_a_control_whose_budget_is_counted_otherwise_is_none(runs: Path, more: dict[str, Any]) -> None:
    """Whichever is read first."""
    stored(runs, "random", 64, [0.0] * 10, **more)
    stored(runs, "quest", 64, [1.0] * 10, **more)
    found = collect([runs])
    for order in (found, gathered([*found][::-1], [])):
        gains = {run.arm["method"]: gain.value for run in order if (gain := Table(order).number(run.index, "gain"))}
        assert gains["quest"] == 100 and gains["snapkv"] == pytest.approx(30)


def test_a_control_is_the_whole_one_and_of_the_same_kind_of_keys_and_values(runs: Path) -> None:
    """Not the probe run over two samples; and in the picture as in the table."""
    stored(runs, "random", 64, [0.0, 0.0], config={"probe": {"every": 4}})
    eight = {"kv": {"device": "int8", "host": "int8"}}
    stored(runs, "random", 64, [0.0] * 10, config=eight)
    stored(runs, "quest", 64, [1.0] * 10, config=eight)
    table = Table(collect([runs]))
    found = {(run.arm["method"], run.label("kv")): table.number(arm, "gain") for arm, run in table.arms.items()}
    assert found["snapkv", "native"] is not None and found["snapkv", "native"][:4:3] == (pytest.approx(30), 10)
    (axis,) = figures.draw("gain", collect([runs])).axes
    drawn = dict(zip([text.get_text() for text in axis.get_yticklabels()], places_of(axis), strict=True))
    assert sorted(drawn.values()) == pytest.approx([-50, 30, 100])


def places_of(axis: Any) -> list[float]:
    return [float(bars.lines[0].get_xdata()[0]) for bars in axis.containers]


def test_full_attention_and_runs_without_a_control_have_no_gain(runs: Path, tmp_path_factory) -> None:
    assert "gain" not in numbers(runs, "gain")["full"]
    alone = tmp_path_factory.mktemp("alone")
    stored(alone, "snapkv", 64, SAMPLES["snapkv"])
    assert "gain" not in numbers(alone, "gain")["snapkv"]


def test_of_several_controls_that_counts_which_protects_most(runs: Path) -> None:
    whole = records([1.0] * 10)
    stored(runs, "random", 64, whole, config={"method": {"name": "random", "minimum": {"paper": 16}, "protect": 0.1}})
    table = pivot(collect([runs]), ["method", "method.protect"], [], ["gain"])
    found = {labels: table.cells[row, 0].numbers for row, labels in enumerate(table.rows)}
    assert found["snapkv", "-"]["gain"] == pytest.approx(-20)


@pytest.mark.parametrize(("value", "first"), [("score", "full"), ("device_kv_bytes", "h2o")])
def test_rows_are_sorted_the_best_first(tmp_path: Path, value: str, first: str) -> None:
    for place, (method, scores) in enumerate(SAMPLES.items()):
        audit = record("", "", 1.0)["audit"] | {"device_kv_bytes": 2**20 * (9 - place)}
        stored(tmp_path, method, None if method == "full" else 64, records(scores, audit=audit))
    runs = collect([tmp_path])
    table = pivot(runs, ["method"], [], [value], best_first=True)
    found = [table.cells[row, 0].numbers[value] for row in range(len(table.rows))]
    assert table.rows[0] == (first,) and found == sorted(found, reverse=value == "score")
    assert {labels[0]: table.cells[row, 0].run for row, labels in enumerate(table.rows)} == {
        run.arm["method"]: run.folders for run in runs
    }


def test_rows_without_the_value_stand_last(runs: Path) -> None:
    table = pivot(collect([runs]), ["method"], [], ["gain"], best_first=True)
    assert [labels[0] for labels in table.rows] == ["snapkv", "h2o", "full", "random"]


def test_an_index_counts_with_the_bytes_on_the_device(tmp_path: Path) -> None:
    audit = record("", "", 1.0)["audit"]
    stored(tmp_path, "icecache", 64, records([1.0, 1.0], audit=audit | {"index_bytes": 2**21}))
    stored(tmp_path, "snapkv", 64, records([1.0, 1.0], audit=audit))
    found = numbers(tmp_path, "device_index_bytes")
    assert (found["icecache"]["device_index_bytes"], found["snapkv"]["device_index_bytes"]) == (3, 1)


def test_without_times_the_trade_off_shows_memory_with_the_index(tmp_path: Path) -> None:
    for method, scores in SAMPLES.items():
        audit = record("", "", 1.0)["audit"] | {"index_bytes": 2**20 * (method == "snapkv")}
        budget = None if method == "full" else 64
        stored(
            tmp_path,
            method,
            budget,
            records(scores, audit=audit, machine={"device": "cpu", "threads": 2, "cores": 2, "others": 1.0}),
        )
    held, indexed = figures.draw("tradeoff", collect([tmp_path])).axes[:2]
    assert "index" in indexed.get_xlabel() and "index" not in held.get_xlabel()


def test_a_value_that_is_not_there_is_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match="gains: no such value"):
        pivot(collect([runs]), ["method"], [], ["gains"])


def test_every_number_of_a_group_is_of_its_samples(tmp_path: Path) -> None:
    """Of a step, of what was attended and of nearness, as of the score."""
    own = {}
    for group, kl, held in (("256", 1.0, 2), ("1024", 3.0, 8)):
        audit = record("", "", 1.0)["audit"] | {
            "attended_mean": 16.0 * held,
            "attended_max": 128,
            "device_kv_bytes": held * 2**20,
        }
        near = {"kl_mean": kl, "nll": kl, "nll_full": 0.5}
        own[group] = [record(f"{group}-{at}", group, 1.0, audit=audit, fidelity=near) for at in range(2)]
    stored(tmp_path, samples=[*own["256"], *own["1024"]])
    values = ["kl_mean", "device_kv_bytes", "attended_share", "score"]
    table = pivot(collect([tmp_path]), ["method"], ["group"], values)
    for group, kl, held in (("256", 1.0, 2), ("1024", 3.0, 8)):
        numbers = table.cells[0, table.columns.index(group)].numbers
        found = [numbers[name] for name in ("kl_mean", "device_kv_bytes", "attended_share", "kl_mean_samples")]
        assert found == [kl, held, held * 16 / 64, 2]
    whole = pivot(collect([tmp_path]), ["method"], [], ["device_kv_bytes"])
    assert whole.cells[0, 0].numbers["device_kv_bytes"] == 8
