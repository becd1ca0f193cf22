"""Figures of stored runs, their numbers computed by hand: of the audit, probes, outputs, papers and a script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from report_runs import record, stored
from test_figures import overprinted

from kvbench.cli.report import main
from kvbench.config import ConfigError
from kvbench.report.data.frame import collect
from kvbench.report.data.papers import PaperTable
from kvbench.report.data.shared import most_shared
from kvbench.report.data.style import style_of
from kvbench.report.figures import all as figures
from kvbench.report.figures import published as diagonal
from kvbench.report.figures.labels import with_gaps

ROOT = Path(__file__).resolve().parents[1]
TOKEN = 1024  # bytes of a token's keys and values in all layers
LENGTH = 1000  # tokens at the end


def measured(attended: float, budget: int | None, kl: float, scanned: float = 0.0, index: int = 0) -> dict[str, Any]:
    """What a sample of `task=fidelity` says; a fifth of the layers is dense."""
    audit = {"attended_mean": attended, "attended_max": LENGTH, "budget": budget, "dense_share": 0.2}
    audit |= {"device_kv_bytes": TOKEN * LENGTH, "read_bytes_per_step": scanned, "index_bytes": index}
    audit |= {"attended_bytes_per_step": TOKEN * (0.8 * attended + 0.2 * 990)}
    return {"audit": audit, "fidelity": {"kl_mean": kl, "nll": 2.0, "nll_full": 2.0}}


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The points of every named line of an axis."""
    handles = zip(*axis.get_legend_handles_labels(), strict=True)
    lines = {name: getattr(handle, "lines", [handle])[0] for handle, name in handles}
    return {
        name: (list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for name, line in lines.items()
    }


def test_a_step_reads_what_is_attended_in_all_layers_and_what_is_scanned(tmp_path: Path) -> None:
    probes = {"config": {"probe": {"every": 16}}}
    stored(tmp_path, "full", None, [record("s", "", 1.0, **measured(990.0, None, 0.0))], task="fidelity")
    for budget, attended, kl in ((64, 80.0, 0.25), (128, 160.0, 1e-9)):
        line = record("s", "", 0.5, **measured(attended, budget, kl, 2048.0, 3 * 2**20))
        stored(tmp_path, "quest", budget, [line], task="fidelity", **(probes if budget == 128 else {}))
    (near,) = figures.draw("read", collect([tmp_path])).axes
    expected = [(TOKEN * (0.8 * attended + 0.2 * 990) + 2048) / 2**20 for attended in (80, 160)]
    assert lines_of(near)["Quest"] == (pytest.approx(expected), [0.25, 1e-5]), "what is nearer stands at the edge"
    assert lines_of(near)["Full"][0] == pytest.approx([TOKEN * 990 / 2**20] * 2), "a line at its cost"
    assert "Quest (below 1e-05)" in {text.get_text() for text in near.texts}
    segments = [segment for marks in near.collections if marks.get_alpha() for segment in marks.get_segments()]
    assert [end[0] - start[0] for start, end in segments] == pytest.approx([3, 3]), "the index"


def test_bytes_read_need_an_audit(tmp_path: Path) -> None:
    stored(tmp_path, "full", None)
    stored(tmp_path, "quest", 64, [record("s", "", 1.0, audit={"attended_mean": 80.0})])
    with pytest.raises(ConfigError, match=r"figure=read: .*attended_bytes_per_step"):
        figures.draw("read", collect([tmp_path]))


def test_bytes_are_compared_on_the_samples_that_both_have(tmp_path: Path) -> None:
    """Not on a longer one that full attention alone has had."""
    both = {
        name: record(name, "", 1.0, audit={"device_kv_bytes": tokens * 1024, "attended_max": tokens})
        for name, tokens in (("short", 512), ("long", 2048))
    }
    stored(tmp_path, "full", None, list(both.values()))
    stored(tmp_path, "quest", 64, [both["short"]])
    assert [run.bytes_stored for run in collect([tmp_path])] == [1024, 1024]


def test_the_front_of_bytes_held_is_one_for_all_methods_and_ways_to_hold_keys(tmp_path: Path) -> None:
    """Of the arms at 64 tokens the one in fewer bits is cheaper and as near; shares are of full attention's."""

    def arm(method: str, budget: int | None, kv: str, held: float, attended: float, kl: float, score: float) -> None:
        line = measured(attended, budget, kl)
        line["audit"] |= {"device_kv_bytes": held * LENGTH, "host_bytes": 24 * LENGTH, "moved_bytes_per_step": 2.0**19}
        line["audit"]["attended_bytes_per_step"] = attended * 2.0**20
        coded = {"config": {"kv": {"device": kv, "host": "native"}}}
        stored(tmp_path, method, budget, [record("s", "", score, **line)], task="fidelity", **coded)

    arm("full", None, "native", 1000.0, 64.0, 0.0, 1.0)
    arm("snapkv", 64, "native", 100.0, 4.0, 0.5, 0.6)
    arm("snapkv", 64, "int8", 20.0, 2.0, 0.5, 0.6)
    arm("snapkv", 128, "kivi2", 40.0, 3.0, 0.25, 0.8)
    figure = figures.draw("frontier", collect([tmp_path]))
    (snapkv,) = figure.axes
    found = lines_of(snapkv)
    assert found.keys() == {"native", "int8-native", "kivi2", "Pareto front"}
    assert found["kivi2"] == (pytest.approx([100 * 64 / 1024]), [0.25])
    assert overprinted(figure) == []


def test_a_front_of_methods_that_hold_keys_alike_has_a_line_a_method(tmp_path: Path) -> None:
    for method, budget, attended, kl in (
        ("full", None, 990.0, 0.0),
        ("snapkv", 64, 80.0, 0.5),
        ("quest", 64, 90.0, 0.25),
    ):
        stored(tmp_path, method, budget, [record("s", "", 1.0, **measured(attended, budget, kl))], task="fidelity")
    (axis,) = figures.draw("frontier", collect([tmp_path])).axes
    assert lines_of(axis).keys() == {"Full", "SnapKV", "Quest", "Pareto front"}


def test_what_was_attended_stands_over_its_budget_in_tokens_and_no_words_on_one_another(tmp_path: Path) -> None:
    methods = ["icecache", "clusterkv", "quest", "racc", "snapkv", "snapkv_racc"]
    for place, method in enumerate(methods):
        for budget in (64, 128):
            line = record("s", "", 1.0, audit={"attended_mean": budget * (1 + place / 50), "budget": budget})
            stored(tmp_path, method, budget, [line])
    line = record("s", "", 1.0, audit={"attended_mean": 154.5, "budget": 103})
    stored(tmp_path, "rkv", 0.1, [line])
    stored(tmp_path, "full", None)
    figure = figures.draw("attended", collect([tmp_path]))
    (axis,) = figure.axes
    curves = {tuple(line.get_xdata()): list(line.get_ydata()) for line in axis.lines}
    assert curves[103.0,] == [1.5], "a share of the prompt stands at its tokens"
    assert {text.get_text() for text in axis.texts} >= {style_of(method).label for method in methods}
    assert overprinted(figure) == []
    with pytest.raises(ConfigError, match="figure=attended: .*none is sparse"):
        runs = collect([tmp_path])
        figures.draw("attended", runs.only(run for run in runs if run.arm["method"] == "full"))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.08))
def test_names_keep_their_order_and_a_gap_and_move_no_more_than_they_must(wanted: list[float], gap: float) -> None:
    wanted = sorted(wanted)
    found = with_gaps(wanted, gap)
    assert all(above - below >= gap - 1e-9 for below, above in zip(found, found[1:], strict=False))
    assert found[0] >= -1e-9 and found[-1] <= 1 + 1e-9
    if all(above - below >= gap for below, above in zip(wanted, wanted[1:], strict=False)):
        assert found == pytest.approx(wanted)


def test_lost_mass_is_what_the_probes_did_not_see_selected(tmp_path: Path) -> None:
    def probed(low: float, high: float) -> dict[str, Any]:
        return {"mass": 0.5, "layers": {"10": {"mass": [low, 1.0]}, "2": {"mass": [high, 0.25]}}}

    lines = [record("one", "", 1.0, probe=probed(0.5, 0.9)), record("two", "", 1.0, probe=probed(0.7, 0.7))]
    stored(tmp_path, "quest", 64, lines, config={"probe": {"every": 1}})
    figure = figures.draw("lost", collect([tmp_path]))
    axis, _scale = figure.axes
    assert axis.images[0].get_array().tolist() == [pytest.approx([20, 75]), pytest.approx([40, 0])], "layer 2 above 10"
    assert [text.get_text() for text in axis.get_yticklabels()] == ["2", "10"]
    assert axis.get_title() == "Quest 64: 33.8 %"


def test_lengths_of_outputs_stand_at_their_budget(tmp_path: Path) -> None:
    sizes = (10, 20, 30)
    stored(tmp_path, "full", None, [record(f"s{size}", "", 1.0, output_ids=[*range(size)]) for size in sizes])
    looped = [record(f"s{size}", "", 1.0, written={"length": 40, "looped": size == 20}) for size in sizes]
    looped[0] = record("s10", "", 1.0, output_ids=[7] * 70)
    for budget in (64, 128):
        stored(tmp_path, "quest", budget, looped)
    runs = collect([tmp_path])
    length, loops = figures.draw("written", runs).axes
    assert lines_of(length)["Quest"] == ([64, 128], [50, 50]) and set(lines_of(length)["Full"][1]) == {20}
    assert lines_of(loops)["Quest"] == ([64, 128], pytest.approx([200 / 3] * 2))
    with pytest.raises(ConfigError, match="figure=written: .*two budgets"):
        figures.draw("written", runs.only(run for run in runs if run.label("budget") in ("-", "64")))


def test_ours_stands_over_the_published_and_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"row": "Quest", "column": "A", "value": 60.0, "note": "", "model": "tiny", "method": "quest", "budget": 64}
    line |= {"task": "ruler", "group": "a", "metric": "score", "settings": ()}
    other = {**line, "column": "S1", "value": 70.0, "group": "niah_single_2/1024"}
    unfit = {**line, "row": "SnapKV", "method": "snapkv"}
    paper = PaperTable("p_table1", "A title", "A paper", pd.DataFrame([line, other, unfit], dtype=object))
    monkeypatch.setattr(diagonal, "ids", lambda: ["p_table1"])
    monkeypatch.setattr(diagonal, "table", {"p_table1": paper}.get)
    stored(tmp_path, "quest", 64, {"a": [1.0, 0.0], "niah_single_2/1024": [1.0, 1.0]}, task="ruler")
    figure = figures.draw("published", collect([tmp_path]))
    marks = {tuple(bar.lines[0].get_xydata()[0]): bar.lines[0] for bar in figure.axes[0].containers}
    assert marks.keys() == {(60, 50), (70, 100)}
    assert to_hex(marks[60, 50].get_markerfacecolor()) == style_of("quest").colour.lower()
    assert marks[70, 100].get_markerfacecolor() == "none", "on texts that kvbench generates"
    assert [text.get_text() for text in figure.axes[0].texts] == ["g"]
    assert figure.legends[0].get_title().get_text().startswith("g: on texts that kvbench generates")
    stored(tmp_path / "other", "snapkv", 128)
    with pytest.raises(ConfigError, match="figure=published: none of these 1 runs"):
        figures.draw("published", collect([tmp_path / "other"]))


def test_a_search_is_drawn_from_what_its_script_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{"recall": 0.9, "query_us": 40.0, "floor_us": 30.0}, {"recall": 0.5, "query_us": 20.0, "floor_us": 10.0}]
    group = {"group": 1, "flat_us": 90.0, "stream_us": 80.0, "points": {"dci point": points, "faiss_ivf": points[:1]}}
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"runs": [{"keys": "made", "n": 100, "groups": [group]}]}))
    (axis,) = figures.draw_file("search", [path]).axes
    assert lines_of(axis)["IceCache"] == ([20, 40], [0.5, 0.9]) and lines_of(axis)["faiss, IVF"] == ([40], [0.9])
    assert [10, 30] in [list(line.get_xdata()) for line in axis.lines]
    words = {text.get_text() for text in axis.get_figure().legends[0].get_texts()}
    assert not any("floor" in name for name in words), "what lies in a cache is read faster than that"
    assert lines_of(axis)["one pass over all keys"][0] == [80, 80]
    assert main([str(path), "--figure", "search", "--out", str(tmp_path / "search.png")]) == 0
    path.write_text("{}")
    for words in ([str(path)], [str(tmp_path)], []):
        assert main([*words, "--figure", "search", "--out", str(tmp_path / "search.png")]) == 2
        assert "scripts/bench_index.py" in capsys.readouterr().err


def test_capacity_is_drawn_with_the_requests_at_once_from_what_its_script_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def arm(rate: float, rows: float, **more: float) -> dict[str, float]:
        return {"decode_tokens_per_s": rate, "decode_at_once": rows, **more}

    here = {"engine": "vllm", "model": "small", "tokens": 4096, "answer": 64, "lengths": "equal", "requests": 16}
    arms = {
        96: {"full": arm(20.0, 1, tokens_per_s=5.0), "snapkv": arm(60.0, 6.4, tokens_per_s=7.0)},
        192: {"full": arm(80.0, 3), "snapkv": arm(70.0, 14)},
    }
    cells = [{**here, "memory_mib": mib, "arms": both} for mib, both in arms.items()]
    crossed = {**here, "method": "snapkv", "by": "decode_tokens_per_s", "memory_mib": 170.0, "at_once": 2.5}
    path = tmp_path / "capacity.json"
    other = {**cells[0], "engine": "hf", "lengths": "conversation"}
    path.write_text(json.dumps({"cells": [*cells, other], "crossings": [crossed]}))
    figure = figures.draw_file("capacity", [path])
    (served,) = figure.axes
    assert "not drawn: 1 workloads" in figure.get_supxlabel()
    assert served.get_title().split() == ["small:", "16", "x", "4,096", "+", "64", "tokens,", "vLLM"]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in served.lines]
    for line in (([96, 192], [20, 80]), ([96, 192], [60, 70]), ([96], [7]), ([170, 170], [0, 1])):
        assert line in drawn
    words = {text.get_text() for text in served.texts}
    assert words >= {"1", "6.4", "3", "14", "Full", "SnapKV"}
    assert main([str(path), "--figure", "capacity", "--out", str(tmp_path / "capacity.png")]) == 0
    for broken in ("{}", json.dumps({"cells": [{**here, "memory_mib": 96, "arms": {"full": 3}}], "crossings": []})):
        path.write_text(broken)
        assert main([str(path), "--figure", "capacity", "--out", str(tmp_path / "capacity.png")]) == 2
        assert "scripts/bench_capacity.py" in capsys.readouterr().err


def test_a_score_stands_where_its_question_was_read(tmp_path: Path) -> None:
    """Full attention, which has no budget, is in the panel of each."""
    for question, scores in (("with", (1.0, 1.0)), ("after", (1.0, 0.0))):
        for budget in (64, 128):
            stored(tmp_path, "snapkv", budget, scores, protocol={"question": question})
        stored(tmp_path, "full", None, (1.0, 1.0), protocol={"question": question})
    runs = collect([tmp_path])
    axes = figures.draw("question", runs).axes
    assert [axis.get_title().split()[-1] for axis in axes] == ["64", "128"]
    for axis in axes:
        drawn = lines_of(axis)
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["with the context", "after compression"]
        assert drawn["SnapKV"][1] == [100, 50] and drawn["Full"][1] == [100, 100]
        assert [round(place) for place in drawn["SnapKV"][0]] == [0, 1]
        assert not axis.get_figure().legends, "names stand at the lines"
    with pytest.raises(ConfigError, match=r"figure=question: .*protocol.question"):
        figures.draw("question", runs.only(run for run in runs if run.label("protocol.question") == "after"))


def test_what_a_method_gains_is_its_mean_difference_to_random_tokens_with_protected_ends(tmp_path: Path) -> None:
    scores = {"snapkv": 2 * (1.0, 0.0, 1.0, 0.5), "knorm": 2 * (0.0, 0.0, 0.5, 0.0)}
    for method, own in scores.items():
        stored(tmp_path, method, 64, own)
    for protect, own in ((0.0, 8 * (0.0,)), (0.1, 2 * (0.5, 0.0, 0.5, 0.0))):
        stored(tmp_path, "random", 64, own, config={"method": {"name": "random", "protect": protect}})
    stored(tmp_path, "full", None, 8 * (1.0,))
    stored(tmp_path, "quest", 128, 8 * (1.0,))  # there is nothing to compare it with
    runs = collect([tmp_path])
    (axis,) = figures.draw("gain", runs).axes
    shown = [tick.get_text() for tick in axis.get_yticklabels()]
    means = [bar.lines[0].get_xdata()[0] for bar in axis.containers]
    assert shown == ["Random, protect=0.0", "Key norm", "SnapKV"]
    assert means == [-25.0, -12.5, 37.5] and "0.1" in axis.get_xlabel()
    with pytest.raises(ConfigError, match="figure=gain: .*method=random"):
        figures.draw("gain", runs.only(run for run in runs if run.label("method") != "random"))


Samples = st.lists(st.frozensets(st.tuples(st.just("0"), st.sampled_from("abcdefghijkl"))), min_size=1, max_size=5)


@given(Samples)
def test_samples_to_compare_on_are_of_most_runs(parts: list[frozenset[tuple[str, str]]]) -> None:
    chosen = most_shared(parts)
    sharing = sum(chosen <= part for part in parts)
    assert sharing >= 1, "of one run at least"
    assert sharing == len(parts) or len(frozenset.intersection(*parts)) < 8, "of all, where these share enough"
    assert all(sum(part <= other for other in parts) <= sharing for part in parts if len(part) > len(chosen))


def test_a_line_joins_points_of_the_same_samples(tmp_path: Path) -> None:
    """A run of more samples counts with those that the others have; one that lacks some is left out, and said."""
    scores = [1.0] * 6 + [0.0] * 4
    easy = [record(f"s{index}", "", score) for index, score in enumerate(scores)]
    hard = [record(f"t{index}", "", 0.0) for index in range(10)]
    stored(tmp_path, "full", None, [*easy, *hard])
    stored(tmp_path, "quest", 64, easy)
    stored(tmp_path, "quest", 128, [*easy, *hard])
    stored(tmp_path, "snapkv", 64, easy[:2])
    figure = figures.draw("budget", collect([tmp_path]))
    line = lines_of(figure.axes[0])
    assert line["Quest"] == ([64, 128], [60, 60]) and set(line["Full"][1]) == {60} and "SnapKV" not in line
    assert figure.axes[0].get_title().endswith("n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}10")
    assert {"10", "20", "1"} <= set(re.findall(r"\d+", figure.legends[0].get_title().get_text()))


def test_a_line_over_questions_joins_the_same_samples(tmp_path: Path) -> None:
    """Arms of one question alone are not drawn, and no method is counted that could not be."""
    scores = {"with": [1.0, 0.0] * 4 + [1.0] * 8, "after": [1.0, 0.0] * 4}
    for question, of in scores.items():
        for method, budget in (("full", None), ("snapkv", 64)):
            stored(tmp_path, method, budget, of, protocol={"question": question})
    stored(tmp_path, "quest", 64, scores["with"])
    (axis,) = figures.draw("question", collect([tmp_path])).axes
    assert lines_of(axis).keys() == {"Full", "SnapKV"} and lines_of(axis)["SnapKV"][1] == [50, 50]
