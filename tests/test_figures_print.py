"""Figures as they are printed: letters, lines and panels that a reader can tell apart, and what is said below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from report_runs import record, stored
from test_figures import offsets

from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.figures import all as figures

METHODS = ("icecache", "quest", "snapkv", "pariskv", "lychee", "racc", "pqcache", "h2o", "kvzip", "keydiff")


def near(kl: float, budget: int | None = None) -> list[dict[str, Any]]:
    """Samples of `task=fidelity` with their KL."""
    size = budget or 500
    audit: dict[str, Any] = {"attended_mean": size - 4.0, "attended_max": 500, "budget": budget}
    audit |= {"device_kv_bytes": 1000 * size, "attended_bytes_per_step": 100.0 * size}
    steps = {"kl": [kl] * 16, "nll": [2.0] * 16, "nll_full": [2.0] * 16}
    found = {"kl_mean": kl, "nll": 2.0, "nll_full": 2.0, "steps": steps}
    return [record(f"s{text}", "", 0.8, audit=audit, fidelity=found) for text in range(3)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Ten methods at two budgets, one more of a user's own, and full attention."""
    folder = tmp_path_factory.mktemp("fidelity")
    stored(folder, "full", None, near(0.0), task="fidelity")
    for place, method in enumerate((*METHODS, "mine")):
        for budget in (64, 128):
            stored(folder, method, budget, near(0.1 * (1 + place) / budget, budget), task="fidelity")
    return collect([folder])


@pytest.mark.parametrize("name", ["fidelity", "drift"])
def test_a_panel_shows_eight_lines_a_user_s_own_among_them_and_says_how_many_there_are(runs: Runs, name: str) -> None:
    figure = figures.draw(name, runs)
    (found,) = figure.legends
    named = {text.get_text().partition(" ")[0] for text in found.get_texts()} - {"Pareto"}
    assert len(named) == 8 and "mine" in named
    assert "8 of 11 methods" in found.get_title().get_text()


@pytest.mark.parametrize("size, width", [("column", 3.4), ("page", 7.0)])
def test_letters_are_of_six_points_or_more_where_a_figure_is_printed_as_wide_as_it_is(
    runs: Runs, size: str, width: float
) -> None:
    for name in ("fidelity", "read", "frontier"):
        figure = figures.draw(name, runs, size)
        words = [text for text in figure.findobj(Text) if text.get_text().strip()]
        assert figure.get_figwidth() == width and min(text.get_fontsize() for text in words) >= 6


def scored(folder: Path, task: str, full: list[float], quest: list[float]) -> None:
    for method, budget, own in (("full", None, full), ("quest", 64, quest)):
        lines = [
            record(str(place), "", score, audit={"attended_mean": 60.0, "budget": budget, "device_kv_bytes": 1000})
            for place, score in enumerate(own)
        ]
        stored(folder, method, budget, lines, task=task)


def test_a_score_axis_fits_what_is_on_it_and_a_task_that_ranks_nobody_is_named_below(tmp_path: Path) -> None:
    high = [0.9, 0.95, 1.0] * 4
    scored(tmp_path, "ruler", high, [score - 0.08 for score in high])
    scored(tmp_path, "longbench", [0.0] * 9 + [0.1], [0.1] + [0.0] * 9)
    figure = figures.draw("budget", collect([tmp_path]))
    assert ["ruler" in axis.get_title() for axis in figure.axes] == [True, True]
    assert all(axis.get_ylim()[0] > 75 for axis in figure.axes)
    assert "without longbench" in figure.legends[0].get_title().get_text()


def test_a_score_over_its_cost_has_its_interval_and_no_time_taken_beside_other_work(tmp_path: Path) -> None:
    for method, budget, ms, others in (("full", None, 9.0, 0.0), ("quest", 64, 4.0, 0.0), ("snapkv", 64, 300.0, 1.0)):
        machine = {"device": "cpu", "threads": 2, "cores": 2, "others": others}
        lines = [
            record(str(n), "", n % 2, audit={"device_kv_bytes": 1000}, tpot_ms={"mean": ms}, machine=machine)
            for n in range(9 if budget else 8)
        ]
        stored(tmp_path, method, budget, lines)
    figure = figures.draw("tradeoff", collect([tmp_path]))
    held, time = figure.axes
    assert (len(offsets(held)), len(offsets(time))) == (3, 2), "snapkv is on the axis of memory alone"
    assert time.get_xlim()[1] < 300 and "1 arms" in figure.legends[0].get_title().get_text()
    bars = [marks.get_segments() for marks in held.collections if hasattr(marks, "get_segments")]
    assert len(bars) >= 3 and all(low[1] < high[1] for own in bars for low, high in own)
