"""From which context length a method is faster than full attention."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import report_runs
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from kvbench.cli.report import main as report
from kvbench.config import ConfigError
from kvbench.report.data.crossing import crossing
from kvbench.report.data.frame import collect
from kvbench.report.figures import all as figures

TREES = ("latency", "icecache")
FULL = {1000: 10.0, 2000: 20.0, 4000: 40.0, 8000: 80.0}
TWENTY = dict.fromkeys(FULL, 20.0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({1000: 20.0, 2000: 20.0, 4000: 20.0, 8000: 20.0}, 2000),
        ({1000: 20.0, 4000: 20.0}, 2000),  # as far above as below, in logarithms
        ({1000: 9.0, 2000: 15.0, 8000: 30.0}, 1000),
        ({1000: 5.0, 2000: 30.0, 4000: 40.0, 8000: 40.0}, 4000),  # faster, slower, level, faster
        ({1000: 5.0, 8000: 80.0}, None),
        ({500: 1.0}, None),
        ({}, None),
    ],
)
def test_a_method_is_faster_from_where_it_stays_below(method: dict[int, float], expected: float | None) -> None:
    assert crossing(method, FULL) == (expected and pytest.approx(expected))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=8))
def test_beyond_the_crossing_no_measured_length_is_slower(ratios: list[float]) -> None:
    full = {1000 * 2**index: 10.0 for index in range(len(ratios))}
    method = {tokens: 10.0 * ratio for tokens, ratio in zip(full, ratios, strict=True)}
    start = crossing(method, full)
    if start is None:
        assert ratios[-1] >= 1
    else:
        assert all(method[tokens] < 10.0 for tokens in full if tokens > start * (1 + 1e-9))
        assert min(full) <= start <= max(full)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full attention, a method that is faster from 2,000 tokens on, and one that never is."""
    folder = tmp_path_factory.mktemp("breakeven")
    times = {"full": FULL, "quest": TWENTY, "icecache": dict.fromkeys(FULL, 90.0)}
    building = {"full": 0.0, "quest": 0.0, "icecache": 1000.0}
    for method, by_length in times.items():
        samples = [
            report_runs.timed(
                length,
                spent,
                prompt_tokens=length,
                ttft_s=length / 2000 + building[method] / 1000,
                prefill_ms={"index_build": building[method], "model": 1.0},
            )
            for length, spent in by_length.items()
        ]
        budget = None if method == "full" else 64
        options = {"lengths": list(FULL), "keys": "model", "prefill": True}
        report_runs.stored(folder, method, budget, samples, task="latency", options=options)
    return folder


def test_the_table_says_from_where_and_by_how_much(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(results), "--format", "csv"]) == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    found = {line["method"]: line for line in lines if line["table"] == "latency_breakeven"}
    assert set(found) == {"quest", "icecache"}
    assert float(found["quest"]["faster_from"]) == pytest.approx(2000)
    assert found["icecache"]["faster_from"] == ""
    assert float(found["quest"]["time_over_full"]) == 0.25
    assert float(found["icecache"]["time_over_full"]) == 1.125


def test_tables_say_what_an_index_costs_before_the_first_token(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second of building on top of half a second for each 1,000 tokens."""
    assert report([str(results), "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    found = {line["method"]: line for line in lines if line["table"] == "latency_breakeven"}
    assert float(found["quest"]["ttft_over_full"]) == 1
    assert float(found["icecache"]["ttft_over_full"]) == 5 / 4
    shares = {line["tokens"]: line["index_share"] for line in lines if (line["table"], line["method"]) == TREES}
    assert {tokens: float(share) for tokens, share in shares.items()} == pytest.approx(
        {"1000": 2 / 3, "2000": 1 / 2, "4000": 1 / 3, "8000": 1 / 5}, abs=0.005
    )


def test_the_picture_marks_where_lines_cross(results: Path, tmp_path: Path) -> None:
    figure = figures.draw("breakeven", collect([results]))
    (axis,) = figure.axes
    named = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in named] == ["Full", "IceCache 64", "Quest 64: faster from 2000"]
    assert {"Full", "Quest 64: faster from 2000"} <= {text.get_text() for text in axis.texts}
    figures.write(figure, tmp_path / "breakeven.png")
    assert image.imread(tmp_path / "breakeven.png").std() > 0.05, "blank"


def test_a_method_that_was_faster_at_every_length_is_faster_at_or_below_the_shortest(tmp_path: Path) -> None:
    """And a length that was timed beside other work is on no axis."""
    timed_at(tmp_path, "full", None, FULL, {})
    busy = {"machine": {"device": "cpu", "threads": 2, "cores": 2, "others": 1.0}}
    lines = [report_runs.timed(length, 5.0) for length in FULL]
    lines[-1] |= busy | {"tpot_ms": {"mean": 300.0, "p50": 300.0, "p95": 300.0}}
    options = {"lengths": list(FULL), "keys": "model", "prefill": True}
    report_runs.stored(tmp_path, "quest", 64, lines, task="latency", options=options)
    (axis,) = figures.draw("breakeven", collect([tmp_path])).axes
    assert "Quest 64" in {line.get_label() for line in axis.get_lines()}, "at every length: a name alone"
    assert max(max(line.get_ydata()) for line in axis.get_lines()) < 300


def test_a_method_is_held_against_full_attention_with_its_own_executor(tmp_path: Path) -> None:
    """By one executor both are ten times as slow; the lines of unlike ones cross nowhere."""
    for executor, factor in (("cpu", 1.0), ("torch", 10.0)):
        slower = {"attention": executor}
        timed_at(tmp_path, "full", None, {tokens: factor * ms for tokens, ms in FULL.items()}, slower)
        timed_at(tmp_path, "quest", 64, {tokens: factor * ms for tokens, ms in TWENTY.items()}, slower)
    (axis,) = figures.draw("breakeven", collect([tmp_path])).axes
    named = [line.get_label() for line in axis.get_lines() if "Quest" in line.get_label()]
    assert len(named) == 2 and all("faster from 2000" in label for label in named)


def test_lengths_that_were_timed_by_runs_of_their_own_are_one_line(tmp_path: Path) -> None:
    for tokens in FULL:
        timed_at(tmp_path, "full", None, {tokens: FULL[tokens]}, {})
        timed_at(tmp_path, "quest", 64, {tokens: TWENTY[tokens]}, {})
    (axis,) = figures.draw("breakeven", collect([tmp_path])).axes
    assert {"Full", "Quest 64: faster from 2000"} <= {line.get_label() for line in axis.get_lines()}


def test_without_full_attention_there_is_nothing_to_draw(results: Path) -> None:
    runs = collect([results])
    with pytest.raises(ConfigError, match=r"^figure=breakeven: .*method=full"):
        figures.draw("breakeven", runs.only(run for run in runs if run.arm["method"] != "full"))


def timed_at(folder: Path, method: str, budget: int | None, times: dict[int, float], config: dict[str, Any]) -> None:
    lines = [report_runs.timed(length, spent) for length, spent in times.items()]
    options = {"lengths": list(times), "keys": "model", "prefill": True}
    report_runs.stored(folder, method, budget, lines, task="latency", options=options, config=config)


def table_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    assert report([str(folder), "--format", "csv"]) == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    return [line for line in lines if line["table"].startswith("latency_breakeven")]


CODED = {"kv": {"device": "int8", "host": "int8"}}


def test_the_yardstick_holds_keys_and_values_as_the_model_computes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full attention over coded ones is another arm, though its name sorts first."""
    timed_at(tmp_path, "full", None, FULL, {})
    timed_at(tmp_path, "full", None, dict.fromkeys(FULL, 5.0), CODED)
    timed_at(tmp_path, "quest", 64, TWENTY, {})
    timed_at(tmp_path, "snapkv", 64, dict.fromkeys(FULL, 8.0), CODED)
    (axis,) = figures.draw("breakeven", collect([tmp_path])).axes
    labels = [text.get_text() for text in axis.figure.legends[0].get_texts()] if axis.figure.legends else []
    labels += [line.get_label() for line in axis.get_lines()]
    assert any(label.startswith("Quest") and "faster from 2000" in label for label in labels), labels
    found = {line["method"]: float(line["time_over_full"]) for line in table_of(tmp_path, capsys)}
    longest = FULL[max(FULL)]
    assert found == {"full": 5 / longest, "quest": 20 / longest, "snapkv": 8 / longest}


def test_full_attention_stands_beside_every_variant_of_a_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no page size; and of its own two runs that one counts which is attended by the same kernels."""
    timed_at(tmp_path, "full", None, FULL, {})
    timed_at(tmp_path, "full", None, dict.fromkeys(FULL, 800.0), {"attention": "torch"})
    for size, attention in ((8, "auto"), (16, "auto"), (16, "torch")):
        method = {"name": "quest", "minimum": {"paper": 16}, "preset": 256, "page_size": size}
        timed_at(tmp_path, "quest", 64, TWENTY, {"method": method, "attention": attention})
    found = {(line["page_size"], line["attention"]): line["time_over_full"] for line in table_of(tmp_path, capsys)}
    assert found == {("8", "auto"): "0.25", ("16", "auto"): "0.25", ("16", "torch"): "0.025"}
