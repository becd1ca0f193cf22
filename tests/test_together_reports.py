"""Runs that decoded together have no time of a whole token: summaries, tables, figures and claims say so."""

from __future__ import annotations

import pytest
from report_runs import csv_lines, records, stored, together
from test_figures import offsets

from kvbench.cli.report import main as report
from kvbench.config import ConfigError
from kvbench.report.claims.sampled import sampled
from kvbench.report.claims.verdict import Finding, Missing
from kvbench.report.data.frame import collect
from kvbench.report.figures import all as figures
from kvbench.report.tables.runs import pivot, summary
from kvbench.runs.quantities import recorded
from kvbench.runs.stored import ResultsError, read_run_yaml, read_samples
from kvbench.runs.summary import summarise
from kvbench.runs.table import Ended, print_ends, table
from kvbench.runs.terminal import Console

TOGETHER = {"decode": "together"}


@pytest.fixture
def mixed(tmp_path):
    """Full attention and snapkv decoded alone, quest together with others and alone."""
    stored(tmp_path, "full", None, [1.0, 1.0, 0.5, 0.5])
    stored(tmp_path, "snapkv", 64, [1.0, 0.0, 0.5, 0.5])
    stored(tmp_path, "quest", 64, [1.0, 0.0, 0.0, 0.5])
    stored(tmp_path, "quest", 64, together([1.0, 0.0, 0.0, 0.5], select=0.5), **TOGETHER)
    return tmp_path


# -- one run -----------------------------------------------------------------------------------------------------------


def test_a_summary_has_the_parts_of_a_step_that_are_a_methods_own_and_no_time_of_a_token():
    found = summarise(together([1.0, 0.0], select=0.5), "accuracy")
    assert found["decode"] == "together" and found["score"] == 50
    assert found["latency"]["breakdown_ms"] == {"attention": 1.0, "select": 0.5}
    assert found["latency"]["tpot_ms_mean"] is found["latency"]["ttft_s"] is None
    assert recorded(found)["own_ms"] == 1.5


def test_the_own_time_of_a_run_alone_leaves_out_the_model():
    assert "decode" not in (found := summarise(records([1.0]), "accuracy"))
    assert recorded(found)["own_ms"] == 1.0 < recorded(found)["tpot_ms_mean"]


def test_samples_that_ran_alone_in_a_run_together_give_no_times():
    """Theirs hold the model's part as well: no mean over both is a time of anything."""
    alone, shared = records([1.0, 1.0]), together([1.0, 1.0])
    found = summarise([alone[0] | {"machine": {"device": "cpu", "threads": 1}}, shared[1]], "accuracy")
    assert found["latency"]["tpot_ms_mean"] is None and found["latency"]["breakdown_ms"] == {"attention": 1.0}
    assert found["machine"]["left_out"] == 1


def test_other_words_for_how_a_sample_or_a_run_decoded_are_damage(tmp_path):
    folder = stored(tmp_path, samples=together([1.0]), **TOGETHER)
    lines = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text(lines.replace('"together"', '"apart"'))
    with pytest.raises(ResultsError, match="decode: expected alone or together"):
        read_samples(folder / "samples.jsonl")
    written = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(written.replace("decode: together", "decode: [together]"))
    with pytest.raises(ResultsError, match="decode: expected alone or together"):
        read_run_yaml(folder)


# -- the terminal ------------------------------------------------------------------------------------------------------


def printed(capsys, drawn):
    Console(width=140).print(drawn)
    return capsys.readouterr().out


def test_the_table_of_a_run_has_a_dash_for_its_time_and_says_why(capsys):
    told = printed(capsys, table("run", "accuracy", summarise(together([1.0]), "accuracy")))
    line = next(line for line in told.splitlines() if "time per further token" in line)
    assert "-, decoded together" in line
    assert "own time per token" in told and "1.00 ms" in told


@pytest.mark.parametrize("alone", [False, True])
def test_the_arms_of_a_sweep_show_the_times_that_they_have(capsys, alone):
    ends = [("method=quest", Ended(summarise(together([1.0]), "accuracy")))]
    ends += [("method=snapkv", Ended(summarise(records([1.0]), "accuracy")))] if alone else []
    print_ends(ends, Console(width=140))
    told = capsys.readouterr().out
    assert "own ms / token" in told and "decoded together" in told
    assert ("4.00" in told and told.count("ms / token") == 2) is alone


def test_a_sweep_that_decoded_alone_has_its_table_as_ever(capsys):
    print_ends([("method=snapkv", Ended(summarise(records([1.0]), "accuracy")))], Console(width=140))
    assert "own" not in capsys.readouterr().out


# -- tables of a report ------------------------------------------------------------------------------------------------


def test_two_runs_of_an_arm_that_differ_in_how_they_decoded_both_stand(mixed):
    runs = collect([mixed])
    assert not runs.skipped and len(runs.arms) == 4
    (made,) = summary(runs)
    rows = [dict(zip(made.axes, labels, strict=True)) for labels in made.rows]
    assert {row["decode"] for row in rows if row["method"] == "quest"} == {"alone", "together"}
    picked = pivot(runs, ["method"], [], ["score"])
    assert picked.axes == ("method", "decode") and len(picked.rows) == 4
    assert "shared_prefill" not in made.axes, "which follows from how they decoded"


def test_what_decoded_together_is_marked_beside_what_did_not(tmp_path, capsys):
    """Once a run, at the first of its numbers; and nowhere where all decoded alike."""
    stored(tmp_path, "full", None, [1.0, 1.0])
    stored(tmp_path, "quest", 64, together([1.0, 0.0]), **TOGETHER)
    words = ["--rows", "method", "--values", "device_kv_bytes,tpot_ms_mean"]
    assert {line["method"]: line["marks"] for line in csv_lines(capsys, tmp_path, *words)} == {"full": "", "quest": "p"}
    for name in ("console", "markdown", "latex", "html"):
        assert report([str(tmp_path), "--format", name, *words]) == 0
        assert "p: decoded together" in " ".join(capsys.readouterr().out.split())
    assert [line["marks"] for line in csv_lines(capsys, tmp_path, *words, "--where", "decode=together")] == [""]


def test_a_table_of_runs_together_alone_says_once_why_it_has_no_times(tmp_path, capsys):
    stored(tmp_path, "full", None, together([1.0, 1.0]), **TOGETHER)
    stored(tmp_path, "quest", 64, together([1.0, 0.0], select=0.5), **TOGETHER)
    (made,) = summary(collect([tmp_path]))
    assert [cell.numbers["own_ms"] for cell in made.cells.values()] == [1.0, 1.5]
    assert not any("tpot_ms_mean" in cell.numbers for cell in made.cells.values())
    assert sum("no times" in note for note in made.notes) == 1
    assert not any("p" in letters for cell in made.cells.values() for letters in cell.marks.values())
    for name, heading in {"markdown": "own ms / token", "csv": "own_ms", "html": "own ms / token"}.items():
        assert report([str(tmp_path), "--format", name]) == 0
        assert heading in capsys.readouterr().out


def test_a_paired_difference_of_runs_that_decoded_otherwise_is_marked(mixed):
    runs = {(run.arm["method"], run.shares_decode): run for run in collect([mixed])}
    assert "q" in runs["quest", True].marks() and runs["quest", True].against_full().mean == -37.5
    assert "q" not in runs["quest", False].marks() + runs["snapkv", False].marks()


def test_full_attention_that_decoded_alike_comes_first(mixed):
    """Each against its own: the other has other scores, so that a mix would show."""
    stored(mixed, "full", None, together([1.0, 0.0, 0.0, 0.5]), **TOGETHER)
    runs = {(run.arm["method"], run.shares_decode): run for run in collect([mixed])}
    assert runs["quest", True].against_full().mean == 0 and "q" not in runs["quest", True].marks()
    assert runs["quest", True].full() is runs["full", True] and runs["snapkv", False].full() is runs["full", False]
    assert runs["quest", False].against_full().mean == -37.5


def test_seeds_are_joined_among_runs_that_decoded_alike(tmp_path):
    for seed in (0, 1):
        stored(tmp_path, samples=together([1.0, 0.0], select=float(seed)), config={"seed": seed}, **TOGETHER)
    stored(tmp_path, samples=[1.0, 0.0])
    (made,) = summary(collect([tmp_path]))
    by_decode = {made.rows[row][made.axes.index("decode")]: cell.numbers for (row, _), cell in made.cells.items()}
    assert by_decode["together"]["seeds"] == 2 and by_decode["together"]["own_ms"] == 1.5
    assert "seeds" not in by_decode["alone"]


def test_a_published_cell_has_one_run_beside_it(tmp_path, capsys):
    groups = {"2048": [1.0, 0.0]}
    paper = ["--paper", "icecache_fig6"]
    stored(tmp_path, "full", None, groups, options={"lengths": [2048]})
    stored(tmp_path, "full", None, together(groups), options={"lengths": [2048]}, **TOGETHER)
    assert report([str(tmp_path), *paper, "--format", "csv"]) in (0, 2)
    assert "several runs" not in capsys.readouterr().err


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_latency_figure_says_which_arms_have_no_time_of_a_token(mixed):
    figure = figures.draw("latency", collect([mixed]))
    words = [text.get_text().strip() for axis in figure.axes for text in axis.texts]
    assert words.count("decoded together") == 2, "no second token, and none further"
    parts = [bar for bar in figure.axes[-1].patches if bar.get_width() == 0.5]
    assert len(parts) == 1, "the search of quest"


def test_a_latency_figure_of_runs_together_alone_is_of_the_parts(tmp_path):
    stored(tmp_path, "quest", 64, together([1.0], select=0.5), **TOGETHER)
    figure = figures.draw("latency", collect([tmp_path]))
    assert len(figure.axes) == 1 and "time per token" not in figure.get_suptitle()


def test_the_length_figure_says_what_it_lacks(tmp_path):
    stored(tmp_path, "quest", 64, together([1.0]), **TOGETHER)
    with pytest.raises(ConfigError, match="1 decoded together: sweep.shared_decode=false"):
        figures.draw("length", collect([tmp_path]))


def test_the_tradeoff_is_over_the_own_time_where_an_arm_has_no_other(mixed):
    """Of all arms alike: no axis has two kinds of times."""
    axis = figures.draw("tradeoff", collect([mixed])).axes[1]
    assert axis.get_xlabel() == "own time per token (ms)"
    assert sorted({x for x, _ in offsets(axis)}) == [1.0, 1.5]


@pytest.mark.parametrize("name", ["budget", "attended", "tradeoff"])
def test_figures_have_both_kinds_in_a_panel_and_name_what_decoded_together(mixed, name):
    figure = figures.draw(name, collect([mixed]))
    below = [text.get_text() for text in figure.texts] + [legend.get_title().get_text() for legend in figure.legends]
    below += [figure.get_supxlabel()]
    assert any("decoded together, the others alone: quest" in words for words in below)
    assert len({axis.get_title() for axis in figure.axes if axis.get_title()}) == 1


# -- claims ------------------------------------------------------------------------------------------------------------

BED = {"bed": "times 32k", "lengths": [1024], "of": "method=quest budget=64"}


def claimed(folder, **asked):
    return sampled(collect([folder]), {**BED, **asked})


@pytest.fixture
def for_claims(tmp_path, monkeypatch):
    """A folder, and a bed whose runs are those of `stored`."""
    from kvbench.report.claims import sampled as module
    from kvbench.report.claims.claim import Bed

    monkeypatch.setattr(module, "beds", lambda: {"times 32k": Bed(("model=tiny", "task=passkey"), "run")})
    return tmp_path


@pytest.mark.parametrize("value", ["tpot_ms.mean", "breakdown_ms.attention"])
def test_a_claim_about_times_takes_none_from_runs_that_decoded_together(for_claims, value):
    stored(for_claims, "quest", 64, together([1.0, 0.0]), **TOGETHER)
    found = claimed(for_claims, value=value, interval="range")
    assert isinstance(found, Missing) and "sweep.shared_decode=false" in found.why
    stored(for_claims, "quest", 64, records([1.0], tpot_ms={"mean": 9.0}, breakdown_ms={"attention": 9.0}))
    found = claimed(for_claims, value=value, interval="range")
    assert isinstance(found, Finding) and (found.value, found.n) == (9.0, 1)


def test_a_claim_about_arms_that_decoded_otherwise_says_so(for_claims):
    stored(for_claims, "quest", 64, together([1.0, 0.0]), **TOGETHER)
    stored(for_claims, "full", None, [1.0, 1.0])
    found = claimed(for_claims, value="score", less="method=full")
    assert isinstance(found, Finding) and found.value == -50 and "decoded together" in found.note
    stored(for_claims, "full", None, together([1.0, 0.0, 1.0]), **TOGETHER)
    found = claimed(for_claims, value="score", less="method=full")
    assert isinstance(found, Finding) and found.value == 0 and not found.note, "more samples of the like"
