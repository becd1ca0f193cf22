"""A picture compares like with like: no line joins and no chart ranks other samples, machines or protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import record, stored, timed

from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.figures import all as figures
from kvbench.report.figures import curves
from kvbench.report.figures.charts import Chart
from kvbench.report.figures.interactive import chart as vega_chart
from kvbench.report.figures.interactive import interactive

PROTOCOLS = {"paper": 0.9, "unified": 0.3}  # with a level of scores and KL of its own
MACHINES = {1: 1.0, 4: 100.0}  # threads, with a level of times
ARMS = (("full", None), ("quest", 64), ("quest", 128), ("snapkv", 64), ("snapkv", 128))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Arms under two protocols, some with twice the samples, one seed with others, timed on two machines."""
    folder = tmp_path_factory.mktemp("mixed")
    for place, (method, budget) in enumerate(ARMS):
        for accounting, level in PROTOCOLS.items():
            lines = [line(f"s{n}", level, budget, place) for n in range(9)]
            more = [line(f"t{n}", 0.6, budget, place) for n in range(9)] if budget == 128 else []
            stored(folder, method, budget, [*lines, *more], protocol={"accounting": accounting})
            stored(folder, method, budget, lines, task="fidelity", protocol={"accounting": accounting})
        other = [line(f"u{n}", 0.6, budget, place) for n in range(9)]
        stored(folder, method, budget, other, config={"seed": 7, "model_name": "tiny"}, data="other")
        times = [
            timed(length, MACHINES[threads] * (1 + place), machine=on(threads), prompt_tokens=length)
            | {"id": f"{length}-{threads}"}
            for threads in MACHINES
            for length in (1024, 2048)
        ]
        stored(folder, method, budget, times, task="latency", options={"lengths": [1024, 2048], "keys": "model"})
    return collect([folder])


def on(threads: int) -> dict[str, Any]:
    return {"device": "cpu", "name": "a CPU", "threads": threads, "cores": 4, "others": 0.0}


def line(name: str, level: float, budget: int | None, place: int) -> dict[str, Any]:
    """A sample whose numbers lie near its level; its time is of one of the machines."""
    threads = 1 if place < 3 else 4
    audit = {"attended_mean": 40.0 + place, "attended_max": 500, "device_kv_bytes": 1000 * (1 + place)}
    audit |= {"attended_bytes_per_step": 100.0 * (1 + place), "index_bytes": 0}
    near = {"kl_mean": level * (1 + place / 100) if budget else 0.0, "nll": 2.0, "nll_full": 2.0}
    near["steps"] = {"kl": [near["kl_mean"]] * 16, "nll": [2.0] * 16, "nll_full": [2.0] * 16}
    spent = {"mean": MACHINES[threads] * (1 + place / 100)}
    more = {"tpot_ms": spent, "machine": on(threads), "written": {"length": round(100 * level), "looped": 0}}
    score = level - place / 1000
    return record(name, "", score, audit=audit, fidelity=near, **more)


@pytest.mark.parametrize("name", ["budget", "read", "frontier", "tradeoff", "fidelity", "drift"])
def test_a_chart_is_of_the_same_samples_protocol_and_machine(
    mixed: Runs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for charts, words in drawn(mixed, name, monkeypatch):
        for chart in charts:
            assert len({level(mark.y, chart) for curve in chart.curves for mark in curve.marks if mark.y}) == 1
            if "time" in chart.x.label:
                assert len({mark.x > 50 for curve in chart.curves for mark in curve.marks}) == 1
        if name not in ("fidelity", "drift"):  # whose runs have the same samples
            assert "samples alone that all runs here have" in words, "with a count of what was left out"


def level(y: float, chart: Chart) -> float:
    """The level of scores or KL that a number is nearest to."""
    value = y / 100 if chart.y.kind == "score" else y
    return min((0.3, 0.6, 0.9), key=lambda known: abs(known - value))


@pytest.mark.parametrize("name", ["length", "breakeven"])
def test_a_line_of_times_is_of_one_machine(mixed: Runs, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    latency = mixed.only(run for run in mixed if run.is_timed)
    ((charts, _),) = drawn(latency, name, monkeypatch)
    assert len(charts) == len(MACHINES)
    for chart in charts:
        assert len({mark.y >= 100 for curve in chart.curves for mark in curve.marks}) == 1


def drawn(runs: Runs, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Chart], str]]:
    """The charts of a figure, and the words below it."""
    seen: list[list[Chart]] = []
    draw = curves.draw_charts

    def watched(charts: list[Chart | None], *words: Any) -> Any:
        seen.append([chart for chart in charts if chart])
        return draw(charts, *words)

    monkeypatch.setattr(curves, "draw_charts", watched)
    figure = figures.draw(name, runs)
    below = [legend.get_title().get_text() for legend in figure.legends] + [figure.get_supxlabel()]
    return [(charts, " ".join(below).replace("\n", " ")) for charts in seen]


def test_what_is_too_little_to_compare_is_not_drawn_and_counted(tmp_path: Path) -> None:
    """One budget alone, and texts too few for a mean."""
    for task, samples in (("passkey", 9), ("niah", 2), ("ruler", 9)):
        for budget in (64, 128) if task != "ruler" else (64,):
            lines = [record(f"{n}", "", 1.0, written={"length": 10, "looped": 0}) for n in range(samples)]
            stored(tmp_path, "quest", budget, lines, task=task)
    figure = figures.draw("written", collect([tmp_path]))
    assert {axis.get_title().partition(",")[0] for axis in figure.axes} == {"passkey"}
    assert "not drawn: 2 panels" in figure.legends[0].get_title().get_text()


def test_a_mark_of_the_interactive_page_says_its_arm_interval_samples_and_run(mixed: Runs) -> None:
    scored = mixed.only(run for run in mixed if not run.is_timed and run.label("task") == "passkey")
    charts = vega_chart(scored)["vconcat"]
    ids = {name for run in scored for name in run.folder_names}
    for one in charts:
        marks = one["data"]["values"]
        assert len({mark["n"] for mark in marks}) == 1, "the same samples"
        assert all(mark["run"] in ids and mark["low"] <= mark["value"] <= mark["high"] for mark in marks)
    arms = {mark["arm"] for one in charts for mark in one["data"]["values"]}
    assert {"Quest 64", "SnapKV 128"} <= arms


def test_the_interactive_page_fetches_nothing(mixed: Runs) -> None:
    pytest.importorskip("vl_convert")
    page = interactive(mixed.only(run for run in mixed if run.label("task") == "fidelity"))
    assert "<script src" not in page and len(page) < 1_500_000
