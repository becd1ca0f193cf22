"""Figures of real runs on a random model: what they draw equals what the runs hold, and what they refuse."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from report_runs import record, stored
from report_runs import timed as timed_at
from rich.console import Console

from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Run, Runs
from kvbench.report.data.style import STYLES, style_of
from kvbench.report.figures import all as figures
from kvbench.report.figures import points as steps
from kvbench.report.figures.charts import front
from kvbench.report.figures.passkey import passkey_cells
from kvbench.runs.sweep import run, run_shared

PASSKEY = ("task=passkey", "task.lengths=[300,600]", "task.positions=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arms with timings that share their prefills, one that does not, two under another protocol, and some probed."""
    results = tmp_path_factory.mktemp("results")

    def config(method: str, *words: str):
        base = ("model=dummy-tiny", "device=cpu", "sweep.shared_decode=false", f"results_dir={results}")
        return composed(*base, f"method={method}", *words)

    arms = [config("full", *PASSKEY)]
    arms += [config(method, f"budget={size}", *PASSKEY) for method in ("quest", "snapkv") for size in (64, 128)]
    arms += [config("icecache", "budget=64", *PASSKEY)]
    run_shared(arms, Console(quiet=True))
    run(config("streaming_llm", "budget=64", *PASSKEY))
    unified = (*PASSKEY, "protocol.accounting=unified")
    run_shared([config("quest", f"budget={size}", *unified) for size in (64, 128)], Console(quiet=True))
    probed = (*PASSKEY, "task.positions=1", "probe.every=2")
    pages = [config("quest", "budget=64", f"method.page_size={size}", *probed) for size in (8, 16)]
    run_shared([*pages, config("snapkv", "budget=64", *probed), config("full", *probed)], Console(quiet=True))
    return results


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    found = collect([folder])
    assert len(found.arms) == 13 and not found.skipped
    return found


def arm(runs: Runs, method: str, budget: int | None, probed: bool = False, accounting: str = "paper") -> pd.Series:
    arms = runs.arms
    same = arms["budget"].isna() if budget is None else arms["budget"] == budget
    same &= (arms["method"] == method) & (arms["accounting"] == accounting) & ((arms["probe_every"] > 0) == probed)
    (found,) = [line for _, line in arms[same].iterrows()]
    return found


def only(runs: Runs, keep: Sequence[bool] | pd.Series) -> Runs:
    return runs.only(runs[index] for index in runs.arms.index[keep])


def legend(figure: Figure) -> dict[str, str]:
    """The colour of every entry."""
    (found,) = figure.legends
    handles = [getattr(handle, "lines", None) or [handle] for handle in found.legend_handles]
    colours = [line[0].get_color() if hasattr(line[0], "get_color") else line[0].get_edgecolor()[0] for line in handles]
    return {text.get_text(): to_hex(colour) for text, colour in zip(found.get_texts(), colours, strict=True)}


def curve(figure: Figure, label: str, place: int = 0) -> tuple[list[float], list[float]]:
    """The points of a line by its label."""
    axis = figure.axes[place]
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    line = handles[label]
    line = line.lines[0] if hasattr(line, "lines") else line
    return [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]


def offsets(axis: Axes) -> list[tuple[float, float]]:
    """Where the marks of an axis stand that are drawn one by one."""
    single = [line for line in axis.lines if len(line.get_xdata()) == 1 and line.get_marker() not in ("", "None")]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in single]


def overprinted(figure: Figure) -> list[tuple[str, str]]:
    """The words of a picture that lie on one another."""
    figure.draw_without_rendering()
    outside = set()  # ticks that are not drawn
    for axis in (scale for axes in figure.axes for scale in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            outside |= set() if low <= tick.get_loc() <= high else {tick.label1, tick.label2}
    words = [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip() and one not in outside]
    shown = [(one.get_text(), one.get_window_extent().padded(-1)) for one in words]
    pairs = itertools.combinations([(text, box) for text, box in shown if box.width > 0], 2)
    return [(one, other) for (one, here), (other, there) in pairs if here.overlaps(there)]


# drawn in their own tests
OF_OTHER_RUNS = {"fidelity", "drift", "breakeven", "question", "gain", "published", "capacity"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (at % 16 > 0))
        for at, name in enumerate(name for name in figures.FIGURES if name not in OF_OTHER_RUNS)
    ],
)
def test_every_figure_becomes_a_picture_and_a_page(runs, tmp_path, name):
    figure = figures.draw(name, runs)
    figures.write(figure, tmp_path / "figure.png")
    figures.write(figure, tmp_path / "figure.pdf")
    figures.write(figure, tmp_path / "figure.svg")
    pixels = image.imread(tmp_path / "figure.png")
    assert pixels.shape[1] >= 1400 and pixels.std() > 0.05, "blank"
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in (tmp_path / "figure.svg").read_bytes()[:1000]
    assert overprinted(figure) == []


@pytest.mark.parametrize("name", ["budget", "length", "recall"])
def test_a_method_has_one_colour_in_all_figures(runs, name):
    for label, colour in legend(figures.draw(name, runs)).items():
        method = label.partition(",")[0].rstrip(" 0123456789")
        assert method == "Pareto front" or colour == style_of(method).colour.lower(), label


def test_scores_stand_at_their_budget_and_at_what_was_attended(runs):
    figure = figures.draw("budget", runs)
    assert [axis.get_title().replace("\N{NO-BREAK SPACE}", " ") for axis in figure.axes[::2]] == [
        "passkey, dummy-tiny, accounting=paper, n = 6",
        "passkey, dummy-tiny, accounting=unified, n = 6",
    ]
    arms = [arm(runs, "quest", size) for size in (64, 128)]
    assert curve(figure, "Quest") == ([64, 128], [one["score"] for one in arms])
    attended = curve(figure, "Quest", 1)[0]
    assert attended == [one["attended_mean"] for one in arms] and attended[0] < attended[1]
    assert set(curve(figure, "Full")[1]) == {arm(runs, "full", None)["score"]}
    unified = [arm(runs, "quest", size, accounting="unified")["attended_mean"] for size in (64, 128)]
    assert curve(figure, "Quest", 3)[0] == unified


def test_the_tradeoff_marks_every_arm_at_its_cost(runs):
    figure = figures.draw("tradeoff", only(runs, runs.arms["accounting"] == "paper"))
    memory, time = ({tuple(np.round(point, 6)) for point in offsets(axis)} for axis in figure.axes)
    timed = runs.arms[(runs.arms["probe_every"] == 0) & (runs.arms["accounting"] == "paper")]
    assert (
        memory == {tuple(np.round((one.device_kv_bytes / 2**20, one.score), 6)) for one in timed.itertuples()}
        and len(timed) == 7
    )
    assert time == {tuple(np.round((one.tpot_ms_mean, one.score), 6)) for one in timed.itertuples()}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30), st.booleans())
def test_the_front_is_what_no_other_is_as_cheap_and_as_good_as(points, more_is_better):
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        good = one[1] >= other[1] if more_is_better else one[1] <= other[1]
        return one != other and one[0] <= other[0] and good

    expected = sorted({point for point in points if not any(beats(other, point) for other in points)})
    assert front(points, more_is_better) == expected


def test_the_front_stands_in_the_tradeoff_and_larger_marks_are_larger_budgets(runs):
    figure = figures.draw("tradeoff", only(runs, runs.arms["accounting"] == "paper"))
    known = runs.arms[(runs.arms["probe_every"] == 0) & (runs.arms["accounting"] == "paper")]
    costs, scores = known["tpot_ms_mean"].to_list(), known["score"].to_list()
    x, y = curve(figure, "Pareto front", 1)
    assert list(zip(x, y, strict=True))[:-1] == front(list(zip(costs, scores, strict=True)), True)
    colour = style_of("snapkv").colour
    single = [line for line in figure.axes[0].lines if line.get_color() == colour and len(line.get_xdata()) == 1]
    by_place = {float(line.get_xdata()[0]): line.get_markersize() for line in single}
    assert by_place[min(by_place)] < by_place[max(by_place)], "more memory is a larger budget"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tradeoff", "latency", "length"])
def test_forty_arms_fit_a_page_and_their_words_do_not_overprint(tmp_path, name):
    methods = [method for method in STYLES if method != "full"][:11]
    for task, length in (("passkey", 1024), ("niah", 2048)):
        lines = [record(f"{length}-{size}", "", 1.0, meta={"length": size}, prompt_tokens=size) for size in (512, 1024)]
        stored(tmp_path, "full", None, lines, task=task)
        for method, budget in itertools.product(methods, (64, 128, 256)):
            stored(tmp_path, method, budget, lines, task=task)
    figure = figures.draw(name, collect([tmp_path]))
    assert overprinted(figure) == [] and figure.get_figheight() <= 10


def test_the_passkey_map_has_a_cell_for_each_depth_and_length(runs):
    sample = {"meta": {"depth": 50.0, "length": 300}, "scores": {"accuracy": 1.0}}
    other = {"meta": {"depth": 0.0, "length": 600}, "scores": {"accuracy": 1.0}}
    cells = passkey_cells([sample, {**sample, "scores": {"accuracy": 0.0}}, other, {**other, "error": "NaN"}])
    assert cells.index.to_list() == [0, 50] and cells.columns.to_list() == [300, 600]
    assert cells.loc[50, 300] == 50 and cells.loc[0, 600] == 50, "a failed sample found nothing"
    figure = figures.draw("passkey", only(runs, runs.arms["accounting"] == "paper"))
    maps = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in maps][:2] == ["Full", "IceCache 64"] and len(maps) == 7
    assert all(axis.images[0].get_array().shape == (3, 2) for axis in maps)


def test_the_parts_of_a_step_add_up_to_its_time(runs):
    figure = figures.draw("latency", only(runs, runs.arms["accounting"] == "paper"))
    first, times, parts = figure.axes
    bars = {text.get_text(): place for place, text in enumerate(first.get_yticklabels())}
    assert list(bars) == ["Full", "IceCache 64", "Quest 64", "Quest 128", "SnapKV 64", "SnapKV 128", "StreamingLLM 64"]
    for name, size, label in (("full", None, "Full"), ("icecache", 64, "IceCache 64")):
        one, place = arm(runs, name, size), bars[label]
        widths = [part.patches[place].get_width() for part in parts.containers]
        assert times.patches[place].get_width() == one["tpot_ms_mean"]
        assert sum(widths) == pytest.approx(one["tpot_ms_mean"], rel=0.02)
    assert {"query", "select", "attention"} <= set(legend_texts(figure)), "IceCache's own parts too"
    # What shares its prefill has no time to its second token: one bar, six words.
    assert [text.get_text() for text in first.texts].count(" not measured") == 6 and len(first.patches) == 1
    shared = only(runs, (runs.arms["accounting"] == "paper") & runs.arms["shared_prefill"])
    assert len(figures.draw("latency", shared).axes) == 2, "where nothing has such a time, there is no column for it"


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_time_per_token_is_the_median_of_the_samples_of_a_length(runs):
    figure = figures.draw("length", runs)
    samples = runs[arm(runs, "snapkv", 128).name].samples()
    tokens, times = curve(figure, "SnapKV 128")
    assert tokens == [300, 600]
    for length, time in zip(tokens, times, strict=True):
        own = [sample["tpot_ms"]["mean"] for sample in samples if sample["meta"]["length"] == length]
        assert time == np.median(own)


def test_curves_over_steps_are_means_over_samples(runs):
    figure = figures.draw("recall", runs)
    samples = runs[arm(runs, "snapkv", 64, probed=True).name].samples()
    steps = [sample["probe"]["steps"] for sample in samples]
    assert len(steps) == 2 and steps[0]["step"] == [1, 3, 5, 7, 9]
    expected = [float(np.mean(pair)) for pair in zip(steps[0]["recall"], steps[1]["recall"], strict=True)]
    assert curve(figure, "SnapKV 64") == ([1, 3, 5, 7, 9], pytest.approx(expected))
    assert "Full" not in legend_texts(figure), "full attention misses nothing"
    jaccard = curve(figures.draw("stability", runs), "SnapKV 64")[0]
    assert jaccard == [3, 5, 7, 9], "the first step has none before it"


def test_runs_by_an_older_kvbench_without_values_of_each_step_are_not_an_empty_picture(runs, monkeypatch):
    monkeypatch.setattr(Run, "samples", lambda self: [{"probe": {"recall": 0.5, "layers": {}}}])
    with pytest.raises(ConfigError, match="none is sparse"):
        figures.draw("recall", runs)


def test_a_curve_ends_where_fewer_than_half_of_the_samples_go_on():
    def sample(steps: int) -> dict:
        return {"steps": {"step": list(range(1, steps + 1)), "recall": [0.5] * steps}}

    assert steps.step_means([sample(2), sample(4), sample(9)]).index.to_list() == [1, 2, 3, 4]
    assert steps.step_means([None]).empty


@given(st.lists(st.floats(0, 1), min_size=1, max_size=400))
def test_thinning_keeps_short_curves_and_the_mean_of_long_ones(values):
    whole = pd.Series(values, index=np.arange(1.0, len(values) + 1))
    thin = steps.thinned(whole)
    assert len(thin) == min(len(values), steps.STEPS)
    assert thin.index.is_monotonic_increasing and whole.min() - 1e-9 <= thin.min() and thin.max() <= whole.max() + 1e-9
    if len(values) <= steps.STEPS:
        assert thin.to_list() == values
    if len(values) % steps.STEPS == 0:
        assert thin.mean() == pytest.approx(whole.mean())


def test_recall_stands_at_its_page_size(runs):
    figure = figures.draw("clusters", runs)
    sizes, recalls = curve(figure, "Quest 64")
    assert sizes == [8, 16]
    quest = runs.arms[(runs.arms["method"] == "quest") & (runs.arms["probe_every"] > 0)]
    pages = runs.settings.loc[quest.index, "method.page_size"].astype(int)
    assert recalls == [quest.loc[pages == size, "recall"].item() for size in (8, 16)]
    assert legend_texts(figure) == ["Quest 64"], "SnapKV has no pages"


def test_two_options_that_vary_have_a_panel_each(tmp_path):
    for method, option in (("lychee", "cluster_size"), ("quest", "page_size")):
        for size in (4, 8):
            own = {"name": method, "minimum": {"paper": 16}, option: size}
            probed = [record(f"{one}", "", 1.0, probe={"recall": 0.5}) for one in range(2)]
            stored(tmp_path, method, 64, probed, config={"method": own, "probe": {"every": 2}})
    labels = [axis.get_xlabel() for axis in figures.draw("clusters", collect([tmp_path])).axes]
    assert labels == ["chunks per cluster", "tokens per page"]


def test_a_length_that_was_timed_beside_other_work_alone_has_no_point(tmp_path):
    busy = {"machine": {"device": "cpu", "threads": 2, "cores": 2, "others": 1.0}}
    lines = [timed_at(1024, 5.0), timed_at(2048, 6.0), timed_at(4096, 200.0, **busy)]
    stored(tmp_path, "quest", 64, lines, task="latency", options={"lengths": [1024, 2048, 4096]})
    assert curve(figures.draw("length", collect([tmp_path])), "Quest 64")[1] == [5.0, 6.0]


def test_options_that_differ_are_named_in_the_legend(runs):
    assert {"Quest 64, page_size=8", "Quest 64, page_size=16"} <= set(legend_texts(figures.draw("recall", runs)))


def test_what_a_reader_must_know_stands_below(runs):
    told = figures.draw("budget", runs).legends[0].get_title().get_text()
    assert "random weights" in told and "device counted, in no time" in told
    assert "simulated" not in told and "failed" not in told
    failed = replace(runs, arms=runs.arms.assign(failed=1, weights="pretrained"))
    told = figures.draw("budget", failed).legends[0].get_title().get_text()
    assert "random" not in told and "9 failed samples" in told


@pytest.mark.parametrize(
    "name, keep, said",
    [
        ("recal", "all", r"^figure=recal: no such figure; did you mean recall\?"),
        ("recall", "timed", r"^figure=recall: no run with probes \(probe.every=1 makes some\) among 9 runs"),
        ("recall", "full", r"^figure=recall: of the runs with probes none is sparse"),
        ("clusters", "snapkv", r"^figure=clusters: no two runs with probes differ in method.cluster_size or"),
        ("latency", "probed", r"^figure=latency: no run with timings among 4 runs"),
        ("passkey", "none", r"^figure=passkey: no run of task=passkey among 0 runs"),
    ],
)
def test_what_cannot_be_drawn_is_said(runs, name, keep, said):
    probed = runs.arms["probe_every"] > 0
    kept = {
        "all": probed | True,
        "timed": ~probed,
        "probed": probed,
        "full": probed & (runs.arms["method"] == "full"),
        "snapkv": probed & (runs.arms["method"] == "snapkv"),
        "none": probed & False,
    }
    with pytest.raises(ConfigError, match=said):
        figures.draw(name, only(runs, kept[keep]))


def test_more_than_a_picture_can_show_is_refused_before_samples_are_read(runs, monkeypatch):
    timed = runs.arms[(runs.arms["probe_every"] == 0) & (runs.arms["accounting"] == "paper")]
    many = pd.concat([timed] * 12, ignore_index=True)
    settings = pd.concat([runs.settings.loc[timed.index]] * 12, ignore_index=True)
    settings["method.seed"] = range(len(many))
    scores = dict(enumerate([runs.scores[run] for run in timed.index] * 12))
    monkeypatch.setattr(Run, "samples", lambda self: pytest.fail("samples read"))
    crowd = replace(runs, arms=many, settings=settings, scores=scores)
    threads = replace(crowd, settings=settings.assign(threads=range(84)))
    with pytest.raises(ConfigError, match=r"^figure=read: 84 .* 8 at most"):
        figures.draw("read", threads)
    few = replace(crowd, arms=many[:28], settings=settings[:28])
    with pytest.raises(ConfigError, match=r"^figure=passkey: 28 arms, .* 24 at most"):
        figures.draw("passkey", few)


def test_another_ending_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match=r"^out=.*figure.jpg: expected .*.png or .pdf or .svg"):
        figures.write(figures.draw("budget", runs), tmp_path / "figure.jpg")


@pytest.mark.slow
def test_figures_leave_no_state_in_matplotlib():
    code = "import sys, kvbench.report.figures.all; print({'matplotlib.pyplot', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_same_runs_make_the_same_picture(runs):
    pictures = [io.BytesIO(), io.BytesIO()]
    for picture in pictures:
        figures.draw("tradeoff", runs).savefig(picture, format="png")
    assert pictures[0].getvalue() == pictures[1].getvalue()
