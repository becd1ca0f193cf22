"""A picture compares like with like: no line joins and no chart ranks other samples, machines or protocols.

Every figure is drawn of runs in which each of these has a level of its own, so that the numbers of one chart tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from report_runs import record, stored, timed

from kvbench.config import ConfigError
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Run, Runs
from kvbench.report.figures import all as figures
from kvbench.report.figures import curves
from kvbench.report.figures.charts import Chart
from kvbench.report.figures.interactive import chart as vega_chart
from kvbench.report.figures.interactive import interactive

LEVELS = {"paper": 0.9, "unified": 0.3, "others": 0.6}  # of scores, KL, probes: two protocols, other samples
MACHINES = {1: 1.0, 4: 100.0}  # threads, with a level of times
ARMS = (("full", None), ("quest", 64), ("quest", 128), ("snapkv", 64), ("snapkv", 128), ("random", 64), ("random", 128))
PROTOCOLS = ("paper", "unified")


def on(threads: int) -> dict[str, Any]:
    return {"device": "cpu", "name": "a CPU", "threads": threads, "cores": 4, "others": 0.0}


def line(name: str, level: float, budget: int | None, place: int, **more: Any) -> dict[str, Any]:
    """A sample whose numbers lie near its level; its time is of one of the machines."""
    threads = 1 if place < 3 else 4
    near = level * (1 + place / 100)
    audit = {"attended_mean": (budget or 500) * near, "attended_max": 500, "device_kv_bytes": 1000 * (1 + place)}
    audit |= {"attended_bytes_per_step": 100.0 * (1 + place), "index_bytes": 0}
    kl = near if budget else 0.0
    steps = {"kl": [kl] * 16, "nll": [2.0] * 16, "nll_full": [2.0] * 16}
    fidelity = {"kl_mean": kl, "nll": 2.0, "nll_full": 2.0, "steps": steps}
    own: dict[str, Any] = {"tpot_ms": {"mean": MACHINES[threads] * (1 + place / 100)}, "machine": on(threads)}
    own |= {"written": {"length": round(100 * level), "looped": level > 0.8}, "fidelity": fidelity}
    own |= {
        "breakdown_ms": {part: own["tpot_ms"]["mean"] * share for part, share in (("attention", 0.25), ("model", 0.75))}
    }
    score = 0.9 * level if place > 4 else level - place / 1000  # what a gain is over has less
    return record(name, "", score, audit=audit, **own, **more)


def time(length: int, batch: int, threads: int, place: int) -> dict[str, Any]:
    audit = {"attended_mean": 40.0, "attended_max": 500, "device_kv_bytes": 1000 * batch * (1 + place)}
    made = timed(length, MACHINES[threads] * (1 + place / 10), machine=on(threads), prompt_tokens=length, audit=audit)
    cell = {"id": f"{length}-{batch}-{threads}", "group": f"{length} x {batch}"}
    return {**made, **cell, "meta": {"length": length, "batch": batch}}


def probes(level: float) -> dict[str, Any]:
    values = dict.fromkeys(("recall", "jaccard", "seen"), level)
    steps = {"step": list(range(1, 9)), **{name: [level] * 8 for name in values}}
    return {**values, "steps": steps, "layers": {"0": {"mass": [1 - level] * 2}, "1": {"mass": [1 - level] * 2}}}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Arms under two protocols, some with twice the samples, one seed with others, timed on two machines."""
    folder = tmp_path_factory.mktemp("mixed")
    for place, (method, budget) in enumerate(ARMS):
        others = [line(f"t{n}", LEVELS["others"], budget, place) for n in range(9)]
        stored(folder, method, budget, others, config={"seed": 7}, data="other")
        for accounting in PROTOCOLS:
            known, more = LEVELS[accounting], {"accounting": accounting}
            lines = [line(f"s{n}", known, budget, place) for n in range(9)]
            some = [*lines, *(others if budget == 128 else [])]
            stored(folder, method, budget, some, protocol=more)
            if method == "random":
                continue
            stored(folder, method, budget, lines, task="fidelity", protocol=more)
            for question in ("with", "after"):
                stored(folder, method, budget, some, task="niah", protocol={**more, "question": question})
            for size in (8, 16) if method == "quest" else (8,):
                probed = [line(f"s{n}", known, budget, place, probe=probes(known)) for n in range(9)]
                own = {"name": method, "minimum": {accounting: 16}, "page_size": size}
                whole = {"method": own, "probe": {"every": 2}}
                stored(folder, method, budget, probed, task="vt", config=whole, protocol=more)
        cells = [(length, batch) for length in (1024, 2048) for batch in (1, 4)]
        times = [time(*cell, threads, place) for threads in MACHINES for cell in cells]
        options = {"lengths": [1024, 2048], "batch": [1, 4], "keys": "model"}
        stored(folder, method, budget, times, task="latency", options=options)
    return collect([folder])


# What each figure is drawn of; all others of scored samples of a task.
TASKS = dict.fromkeys(("fidelity", "drift"), "fidelity") | dict.fromkeys(("length", "breakeven", "capacity"), "latency")
TASKS |= dict.fromkeys(("recall", "stability", "clusters", "lost"), "vt") | {
    "question": "niah",
    "latency": "passkey",
}
# Of these the numbers are times, or follow from them: one machine's are a hundred times another's.
TIMED = {"length": 50.0, "breakeven": 50.0, "latency": 10.0, "capacity": 100.0}
# Of these a cell stands beside a paper's, and runs of two protocols are refused (`test_report_tables.py`).
OF_PAPERS = {"published"}


def drawn(runs: Runs, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Chart], Figure, str]:
    """The charts of a figure, itself, and the words below it."""
    seen: list[Chart] = []
    draw = curves.draw_charts

    def watched(charts: list[Chart | None], *words: Any) -> Any:
        seen.extend(chart for chart in charts if chart)
        return draw(charts, *words)

    monkeypatch.setattr(curves, "draw_charts", watched)
    figure = figures.draw(name, runs)
    below = [legend.get_title().get_text() for legend in figure.legends] + [figure.get_supxlabel()]
    return seen, figure, " ".join(below).replace("\n", " ")


def numbers_of(charts: list[Chart], figure: Figure) -> list[list[float]]:
    """What each chart compares: the marks of its curves, the bars of an axis, the cells of a map."""
    if charts:
        return [[mark.y for curve in chart.curves for mark in curve.marks if mark.y] for chart in charts]
    if maps := [list(axis.images[0].get_array().ravel()) for axis in figure.axes if axis.images]:
        return maps
    if bars := [[bar.get_width() for bar in axis.patches] for axis in figure.axes if axis.patches]:
        return bars
    return [[float(dot.lines[0].get_xdata()[0]) for dot in axis.containers] for axis in figure.axes if axis.containers]


def level(value: float, name: str) -> float:
    """The level that a number is nearest to."""
    if name in TIMED:
        return value >= TIMED[name]
    share = value / 100 if value > 1.2 else value
    known = {0.1 * one: one for one in LEVELS.values()} if name == "gain" else {one: one for one in LEVELS.values()}
    return known[min(known, key=lambda one: abs(one - share))]


@pytest.mark.parametrize("name", sorted(figures.FIGURES.keys() - OF_PAPERS))
def test_a_chart_is_of_the_same_samples_protocol_and_machine(
    mixed: Runs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_of(run: Run) -> bool:
        return run.label("task") == TASKS.get(name, "passkey")

    charts, figure, words = drawn(mixed.only(filter(is_of, mixed)), name, monkeypatch)
    compared = [some for some in numbers_of(charts, figure) if some]
    assert compared, "something is drawn"
    for some in compared:
        assert len({level(value, name) for value in some}) == 1, some
    assert {level(value, name) for some in compared for value in some} != {0.6}, "each of them is there"
    for chart in charts:
        if "time" in chart.x.label:
            assert len({mark.x > 50 for curve in chart.curves for mark in curve.marks}) == 1
    if TASKS.get(name, "passkey") in ("passkey", "niah"):  # in all others runs have the same samples
        assert "samples alone that all runs here have" in words, "with a count of what was left out"


def test_what_is_too_little_to_compare_is_not_drawn_and_counted(tmp_path: Path) -> None:
    """One budget alone, and texts too few for a mean."""
    for task, samples in (("passkey", 9), ("niah", 2), ("ruler", 9)):
        for budget in (64, 128) if task != "ruler" else (64,):
            lines = [record(f"{n}", "", 1.0, written={"length": 10, "looped": 0}) for n in range(samples)]
            stored(tmp_path, "quest", budget, lines, task=task)
    figure = figures.draw("written", collect([tmp_path]))
    assert {axis.get_title().partition(",")[0] for axis in figure.axes} == {"passkey"}
    assert "not drawn: 2 panels" in figure.legends[0].get_title().get_text()


def test_ours_beside_a_paper_is_of_one_protocol(tmp_path: Path) -> None:
    for accounting in PROTOCOLS:
        for method, budget in (("full", None), ("snapkv", 256)):
            own = {"protocol": {"accounting": accounting}, "options": {"code_sim": "difflib"}}
            stored(tmp_path, method, budget, {"qasper": [1.0]}, task="longbench", model="llama3.1-8b-instruct", **own)
    with pytest.raises(ConfigError, match="several runs, which differ in|mixes no protocols"):
        figures.draw("published", collect([tmp_path]))


def test_a_mark_of_the_interactive_page_says_its_arm_interval_samples_and_run(mixed: Runs) -> None:
    scored = mixed.only(run for run in mixed if run.label("task") == "passkey")
    charts = vega_chart(scored)["vconcat"]
    ids = {name for run in scored for name in run.folder_names}
    for one in charts:
        marks = one["data"]["values"]
        assert len({mark["n"] for mark in marks}) == 1, "the same samples"
        assert len({level(mark["value"], "") for mark in marks}) == 1
        assert all(mark["run"] in ids and mark["low"] <= mark["value"] <= mark["high"] for mark in marks)
    arms = {mark["arm"] for one in charts for mark in one["data"]["values"]}
    assert {"Quest 64", "SnapKV 128"} <= arms


def test_the_interactive_page_fetches_nothing(mixed: Runs) -> None:
    pytest.importorskip("vl_convert")
    page = interactive(mixed.only(run for run in mixed if run.label("task") == "fidelity"))
    assert "<script src" not in page and len(page) < 1_500_000
