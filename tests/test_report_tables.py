"""Tables of runs: what stands in a cell, what may not stand together, and ours beside a paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_runs import record, stored

from kvbench.config import ConfigError
from kvbench.report.data import papers as published
from kvbench.report.data.frame import collect
from kvbench.report.data.papers import PaperTable
from kvbench.report.data.run import Run, Runs
from kvbench.report.data.select import select
from kvbench.report.tables.cells import Cell, ReportTable
from kvbench.report.tables.published import merge_published
from kvbench.report.tables.runs import by_group, overview, pivot, summary

ALTERNATING = [1.0, 0.0] * 20


def cell(table: ReportTable, row: tuple[str, ...], column: str = "") -> Cell:
    return table.cells[table.rows.index(row), table.columns.index(column)]


def refused(call, *arguments, **options) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# -- against full attention --------------------------------------------------------------------------------------------


def of(runs: Runs, method: str) -> Run:
    """The one run of a method."""
    (run,) = (run for run in runs if run.arm["method"] == method)
    return run


def test_the_difference_to_full_attention_is_paired_by_sample(tmp_path):
    scores = {"full": {"d": 1, "c": 1, "b": 0, "a": 1}, "quest": {"a": 0, "b": 0, "c": 1, "x": 1}}
    for method, own in scores.items():
        stored(tmp_path, method, samples=[record(name, "", score) for name, score in own.items()])
    runs = collect([tmp_path])
    against = of(runs, "quest").against_full()
    assert against.n == 3 and against.mean == pytest.approx(100 * (-1 + 0 + 0) / 3)


def test_alike_sample_by_sample_is_no_difference(tmp_path):
    for method in ("full", "quest"):
        stored(tmp_path, method, samples=ALTERNATING)
    runs = collect([tmp_path])
    against, alone = of(runs, "quest").against_full(), of(runs, "quest").score()
    assert against.mean == 0 and against.low == -against.high and not against.differs
    assert against.high - against.low < 0.6 * (alone.high - alone.low), "pairing takes the samples' own spread out"


def test_samples_that_full_attention_failed_are_left_out_of_the_pairs(tmp_path):
    lost = [record(f"-{number}", "", 0.0, error="out of memory" if number < 2 else None) for number in range(4)]
    stored(tmp_path, "full", samples=lost)
    stored(tmp_path, "quest", samples=[1.0, 1.0, 0.0, 0.0])
    runs = collect([tmp_path])
    against = of(runs, "quest").against_full()
    assert (against.mean, against.n) == (0, 2)


@pytest.mark.parametrize(
    "other, paired",
    [
        ({}, True),
        ({"protocol": {"accounting": "unified"}}, True),
        ({"protocol": {"dense_layers": "method"}, "dense_layers": [0]}, True),
        ({"config": {"probe": {"every": 2}}}, True),
        ({"protocol": {"prefill_chunk": None}}, False),
        ({"options": {"lengths": [2048]}}, False),
        ({"config": {"seed": 1}}, False),
        ({"data": "other"}, True),
        ({"data": "other", "samples": [record("-0", "", 1.0), record("-1", "", 0.0, prompt_tokens=2)]}, False),
        ({"data": "other", "samples": [record("-2", "", 1.0), record("-3", "", 0.0)]}, False),
        ({"model_revision": "folder-2"}, False),
        ({"model": "other"}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_only_the_same_samples_of_the_same_model_are_paired(tmp_path, other, paired):
    """Prompts that are alike one by one are the same, whatever the code that makes them has become."""
    stored(tmp_path, "full")
    stored(tmp_path, "quest", **other)
    runs = collect([tmp_path])
    assert (of(runs, "quest").against_full() is not None) == paired


@pytest.mark.parametrize("tokens, alike", [(1024, True), (2, False)])
def test_prompts_that_are_the_same_under_one_protocol_make_data_the_same_under_another(tmp_path, tokens, alike):
    stored(tmp_path, "full", data="before")
    stored(tmp_path, "quest", data="now", samples=[record("-0", "", 1.0, prompt_tokens=tokens)])
    later = {"protocol": {"question": "after"}}
    stored(tmp_path, "full", data="before", **later)
    stored(tmp_path, "full", data="now", config={"seed": 1}, **later)
    runs = collect([tmp_path])
    assert len({run.arm["data"] for run in runs}) == (1 if alike else 2)


def test_full_attention_is_not_compared_with_itself(tmp_path):
    stored(tmp_path, "full", dtype="bfloat16")
    stored(tmp_path, "full", config={"probe": {"every": 2}}, dtype="bfloat16")
    runs = collect([tmp_path])
    assert len(runs.arms) == 2
    assert all(run.against_full() is None for run in runs)


# -- marks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("better, mark", [(20, "b"), (1, ""), (0, "")])
def test_a_sparse_method_better_than_full_beyond_noise_is_marked(tmp_path, better, mark):
    stored(tmp_path, "full", samples=ALTERNATING)
    stored(tmp_path, "quest", samples=[1.0] * better * 2 + ALTERNATING[better * 2 :])
    (table,) = summary(collect([tmp_path]))
    marks = cell(table, ("tiny", "passkey", "quest", "64")).marks.get("score", "")
    assert marks.replace("w", "") == mark  # w: two arms that lie so near to each other rank nobody
    assert any(note.startswith("b: ") for note in table.notes) == bool(mark)


def test_what_weakens_a_score_is_marked(tmp_path):
    lost = [record("a", "", 1.0), record("b", "", 0.0, error="nan")]
    broken = [record("a", "", 1.0, audit={"over_rule": True}), record("b", "", 1.0)]
    stored(tmp_path, "quest", samples=lost)
    stored(tmp_path, "snapkv", samples=broken)
    stored(tmp_path, "topk", model_revision="dummy-0")
    stored(tmp_path, "icecache", finished=False)
    stored(tmp_path, "lychee", samples=[record("a", "", 1.0, cut_tokens=3000), record("b", "", 1.0, cut_tokens=0)])
    stored(tmp_path, "full")
    (table,) = summary(collect([tmp_path], unfinished=True))
    marks = {row[2]: table.cells[place, 0].marks.get("score", "") for place, row in enumerate(table.rows)}
    assert marks == {"full": "", "icecache": "u", "quest": "f", "snapkv": "o", "topk": "d", "lychee": "t"}
    assert cell(table, ("tiny", "passkey", "quest", "64")).numbers["failed"] == 1
    assert {note[:3] for note in table.notes if note[1] == ":"} == {"u: ", "f: ", "o: ", "d: ", "t: "}


@pytest.mark.parametrize(("transfer", "mark"), [("simulated", "c"), ("in place", "e")])
def test_transfers_to_no_device_are_marked_at_times_and_nowhere_else(tmp_path, transfer, mark):
    audit = {"attended_mean": 64.0, "budget": 64, "moved_bytes_per_step": 2048.0, "transfer": transfer}
    stored(tmp_path, "icecache", samples=[record(name, "", 1.0, audit=audit) for name in "ab"])
    (table,) = summary(collect([tmp_path]))
    found = cell(table, ("tiny", "passkey", "icecache", "64"))
    assert found.marks == {"tpot_ms_mean": mark, "ttft_s": mark}
    assert found.numbers["moved_bytes_per_step"] == 2


# -- any selection -----------------------------------------------------------------------------------------------------


def test_what_all_samples_of_a_run_score_has_one_width_whatever_other_runs_scored(tmp_path):
    stored(tmp_path, "full", samples=[1.0] * 8)
    stored(tmp_path, "quest", samples=[1.0] * 4 + [0.5] * 4)
    stored(tmp_path, "full", samples=[1.0] * 8, task="niah")
    runs = collect([tmp_path])
    ends = {run.arm["task"]: run.score()[1:3] for run in runs if run is not of(runs, "quest")}
    assert ends == dict.fromkeys(("passkey", "niah"), (pytest.approx(67.56, abs=0.01), 100))


def test_rows_and_columns_stand_in_their_natural_order(tmp_path):
    for method, budget in (("quest", 1024), ("quest", 64), ("full", None), ("arkvale", 64), ("quest", 0.1)):
        stored(tmp_path, method, budget)
    table = pivot(collect([tmp_path]), ["method"], ["budget"], ["tpot_ms_mean"])
    assert table.rows == [("full",), ("arkvale",), ("quest",)]
    assert table.columns == ["10 %", "64", "1024"]
    assert {place for place in table.cells if place[0] == 0} == {(0, 0), (0, 1), (0, 2)}, "full has no budget"
    both = pivot(collect([tmp_path]), ["task"], ["method", "budget"], ["tpot_ms_mean"])
    assert both.columns == ["full, -", "arkvale, 64", "quest, 10 %", "quest, 64", "quest, 1024"]


def test_several_runs_in_one_place_are_refused_by_what_tells_them_apart(tmp_path):
    stored(tmp_path, budget=64, options={"lengths": [300]})
    stored(tmp_path, budget=128, options={"lengths": [400]})
    runs = collect([tmp_path])
    said = refused(pivot, runs, ["method"], ["task"], ["score"])
    assert said == (
        "quest, passkey: several runs, which differ in budget=64 | 128; task.lengths=[300] | [400]; add it to --rows "
        "or --columns, or "
        "choose with --where budget=64"
    )
    chosen = pivot(runs, ["method"], ["task"], ["score"], ["budget=64"])
    assert cell(chosen, ("quest",), "passkey").run.endswith(str(runs.arms["path"][runs.arms["budget"] == 64].iloc[0]))


def test_the_summary_shows_what_tells_runs_apart(tmp_path):
    for lengths in ([1024], [2048]):
        stored(tmp_path, options={"lengths": lengths})
    (table,) = summary(collect([tmp_path]))
    assert table.axes == ("model", "task", "method", "budget", "task.lengths")
    assert [row[-1] for row in table.rows] == ["[1024]", "[2048]"]


def test_a_probe_run_gives_the_recall_and_a_timed_run_the_rest(tmp_path):
    probed = [record(name, "", 0.0, probe={"recall": 0.5}, tpot_ms=None, breakdown_ms=None) for name in "ab"]
    stored(tmp_path, samples=[1.0, 1.0], options={"positions": 20})
    path = stored(tmp_path, samples=probed, options={"positions": 1}, config={"probe": {"every": 2}})
    (table,) = summary(collect([tmp_path]))
    found = cell(table, ("tiny", "passkey", "quest", "64"))
    assert (found.numbers["score"], found.numbers["recall"], found.numbers["tpot_ms_mean"]) == (100, 0.5, 4)
    (alone,) = summary(collect([path]))
    assert cell(alone, ("tiny", "passkey", "quest", "64")).numbers["score"] == 0


def test_groups_are_cells_of_their_own(tmp_path):
    stored(tmp_path, "full", samples={"1024": [1.0, 1.0], "512": [1.0, 1.0]})
    stored(tmp_path, "quest", samples={"1024": [1.0, 0.0], "512": [1.0, 1.0]})
    runs = collect([tmp_path])
    table = pivot(runs, ["method"], ["group"], ["score"])
    assert table.columns == ["1024", "512"], "as the task has them"
    assert cell(table, ("quest",), "1024").numbers["score"] == 50
    assert cell(table, ("quest",), "512").numbers["against_full"] == 0
    (same,) = by_group(runs)
    assert [same.cells[place].numbers for place in sorted(same.cells)] == [
        table.cells[place].numbers for place in sorted(table.cells)
    ]


def test_a_task_of_one_group_has_no_table_by_group(tmp_path):
    stored(tmp_path)
    assert by_group(collect([tmp_path])) == []


@pytest.mark.parametrize(
    "rows, columns, values, where, said",
    [
        (["methd"], [], ["score"], [], "methd: no such key of a run; did you mean method"),
        (["method"], ["lengts"], ["score"], [], "lengts: no such key of a run; did you mean lengths"),
        (["method"], [], ["scor"], [], "--values scor: no such value; did you mean score"),
        (["method"], [], ["score"], ["method"], "--where method: expected key=value"),
        (["method"], [], ["score"], ["method=qest"], "--where method=qest: no run has it; did you mean quest"),
        (["method"], [], ["score"], ["task.lengths=[9]"], "--where task.lengths=[9]: no run has it; (valid: [1024])"),
    ],
)
def test_an_unknown_word_names_the_nearest(tmp_path, rows, columns, values, where, said):
    stored(tmp_path, options={"lengths": [1024]})
    assert said in refused(pivot, collect([tmp_path]), rows, columns, values, where)


def test_runs_are_chosen_by_any_of_several_values_and_by_a_list(tmp_path):
    for budget in (64, 128, 256):
        stored(tmp_path, budget=budget, options={"lengths": [1024, budget]})
    runs = collect([tmp_path])
    assert {run.arm["budget"] for run in select(runs, ["budget=256,64"])} == {64, 256}
    (run,) = select(runs, ["lengths=[1024,128]"])
    assert run.arm["budget"] == 128


@pytest.mark.parametrize("word", ["budget=0.1", "budget=10 %"])
def test_a_share_of_the_prompt_is_chosen_as_given_or_as_shown(tmp_path, word):
    for budget in (0.1, 0.2):
        stored(tmp_path, budget=budget)
    runs = collect([tmp_path])
    assert [run.arm["budget"] for run in select(runs, [word])] == [0.1]


def test_a_word_that_two_keys_end_with_names_both(tmp_path):
    stored(tmp_path, options={"accounting": "x"})
    said = refused(pivot, collect([tmp_path]), ["accounting"], [], ["score"])
    assert said == "accounting: protocol.accounting or task.accounting?"


def test_times_name_their_machines(tmp_path):
    stored(tmp_path, "quest")
    stored(tmp_path, "snapkv", config={"device_name": "a card"})
    table = pivot(collect([tmp_path]), ["method"], [], ["tpot_ms_mean"])
    (note,) = [note for note in table.notes if note.startswith("Times are of several machines")]
    assert note.endswith(": 1: cpu, 1 threads; 2: a card.")
    assert [cell(table, (method,)).marks["tpot_ms_mean"] for method in ("quest", "snapkv")] == ["1", "2"]
    assert not any("Times" in note for note in pivot(collect([tmp_path]), ["method"], ["task"], ["score"]).notes)


# -- the overview ------------------------------------------------------------------------------------------------------


# -- protocols ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Runs:
    stored(tmp_path, "quest")
    stored(tmp_path, "topk")
    stored(tmp_path, "snapkv", protocol={"accounting": "unified"})
    return collect([tmp_path])


def test_a_table_of_several_protocols_is_refused(mixed):
    said = refused(pivot, mixed, ["method"], ["task"], ["score"])
    assert said.startswith("protocol.accounting: paper: 2 runs, unified: 1 runs; one table mixes no protocols")
    assert "--where protocol.accounting=paper" in said and "--allow-mixed" in said


def test_allowed_it_marks_those_of_the_rarer(mixed):
    table = pivot(mixed, ["method"], ["task"], ["score"], allow_mixed=True)
    marks = {row[0]: table.cells[place, 0].marks.get("score", "") for place, row in enumerate(table.rows)}
    assert marks == {"quest": "", "snapkv": "m", "topk": ""}
    assert any(note.startswith("m: ") for note in table.notes)


def test_a_protocol_that_is_a_row_is_not_mixed(mixed):
    table = pivot(mixed, ["accounting", "method"], ["task"], ["score"])
    assert table.axes == ("protocol.accounting", "method") and ("unified", "snapkv") in table.rows


def test_the_summary_has_a_table_for_each_protocol(mixed):
    titles = [table.title for table in summary(mixed)]
    assert sorted(titles) == ["Runs with protocol.accounting=paper", "Runs with protocol.accounting=unified"]


def test_the_overview_is_one_table_of_all_protocols_without_timed_runs(mixed, tmp_path):
    hardware = {"floor_ms": 1.0, "copy_bandwidth": 1e9}
    stored(tmp_path, "quest", samples=[record("a", "", 1.0, hardware=hardware)], task="latency")
    (table,) = overview(collect([tmp_path]))
    sections = [table.section(row) for row in range(len(table.rows))]
    assert sections == ["tiny, passkey, accounting=paper"] * 2 + ["tiny, passkey, accounting=unified"]
    assert "1 timed runs have tables of their own: --where task=latency." in table.notes


def test_full_attention_is_of_every_accounting(tmp_path):
    stored(tmp_path, "full")
    stored(tmp_path, "quest", protocol={"accounting": "unified"})
    table = pivot(collect([tmp_path]), ["method"], ["task"], ["score"])
    assert cell(table, ("quest",), "passkey").numbers["against_full"] == 0


# -- beside a paper ----------------------------------------------------------------------------------------------------


def paper(*lines: dict) -> PaperTable:
    usual = {"row": "Quest 64", "column": "A", "value": 60.0, "note": "", "model": "tiny", "method": "quest"}
    usual |= {"budget": 64, "task": "passkey", "group": "", "metric": "score", "settings": ()}
    frame = pd.DataFrame([{**usual, **line} for line in lines], dtype=object)
    return PaperTable("paper_table1", "A title", "A paper, Table 1", frame)


def test_ours_stands_beside_the_published_with_its_difference(tmp_path):
    stored(tmp_path, "quest", samples={"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 0.0]})
    table = merge_published(
        collect([tmp_path]),
        paper(
            {"column": "A", "group": "a"},
            {"column": "A and B", "group": "a + b"},
            {"column": "all", "metric": "macro"},
            {"column": "other", "metric": ""},
        ),
    )
    found = {column: table.cells[0, place].numbers for place, column in enumerate(table.columns)}
    assert (found["A"]["score"], found["A"]["difference"], found["A"]["samples"]) == (50, -10, 2)
    assert (found["A and B"]["score"], found["A and B"]["samples"]) == (75, 4)
    assert found["all"]["score"] == 75, "of the groups that the row has, as the paper's average is"
    assert found["other"] == {"published": 60}


def test_another_model_stands_in_marked_and_without_difference_until_the_own_one_ran(tmp_path):
    printed = replace(paper({"model": "qwen3-8b"}), stand_in="tiny")
    stored(tmp_path / "small", "quest", samples={"": [1.0, 0.0]})
    small = merge_published(collect([tmp_path]), printed).cells[0, 0]
    assert (small.numbers["score"], small.marks["score"]) == (50, "s") and "difference" not in small.numbers
    stored(tmp_path / "large", "quest", samples={"": [1.0, 1.0]}, model="qwen3-8b")
    large = merge_published(collect([tmp_path]), printed).cells[0, 0]
    assert (large.numbers["score"], large.numbers["difference"], large.lines["score"].mark) == (100, 40, "")


def test_an_average_needs_all_of_its_columns(tmp_path):
    stored(tmp_path, "quest", samples={"a": [1.0, 0.0]})
    both = paper({"column": "A", "group": "a"}, {"column": "B", "group": "b"}, {"column": "Avg", "metric": "macro"})
    table = merge_published(collect([tmp_path]), both)
    assert ["score" in table.cells[0, place].numbers for place in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    "line, fits",
    [
        ({}, True),
        ({"budget": 128}, False),
        ({"method": "snapkv"}, False),
        ({"method": None}, False),
        ({"model": "llama3.1-8b-instruct"}, False),
        ({"task": "ruler"}, False),
        ({"group": "a"}, False),
    ],
)
def test_only_the_same_arm_stands_beside(tmp_path, line, fits):
    stored(tmp_path, "quest")
    numbers = merge_published(collect([tmp_path]), paper(line)).cells[0, 0].numbers
    assert ("score" in numbers) == fits and numbers["published"] == 60


def test_no_budget_in_a_paper_is_the_preset_of_the_method(tmp_path):
    stored(tmp_path, "full", 64)
    stored(tmp_path, "quest", 1024)
    full = paper({"row": "Full", "method": "full", "budget": None}, {"budget": None})
    table = merge_published(collect([tmp_path]), full)
    assert all("score" in cell.numbers for cell in table.cells.values())


@pytest.mark.parametrize(
    "settings, fits",
    [(("task.variant=a",), True), (("task.variant=b",), False), (("task.lengths=[1024,2048]",), True)],
)
def test_a_run_of_another_variant_does_not_stand_beside(tmp_path, settings, fits):
    stored(tmp_path, "quest", options={"variant": "a", "lengths": [1024]})
    assert ("score" in merge_published(collect([tmp_path]), paper({"settings": settings})).cells[0, 0].numbers) == fits


def test_two_runs_for_one_published_cell_are_refused(tmp_path):
    for kind in ("bfloat16", "float32"):
        stored(tmp_path, "quest", dtype=kind)
    runs = collect([tmp_path])
    said = "Quest 64, A: several runs, which differ in dtype=bfloat16 | float32; choose with --where dtype=bfloat16"
    assert said in refused(merge_published, runs, paper({}))
    assert "score" in merge_published(runs, paper({}), ["dtype=float32"]).cells[0, 0].numbers


def test_protocols_do_not_mix_beside_a_paper(tmp_path):
    stored(tmp_path, "quest")
    stored(tmp_path, "snapkv", protocol={"accounting": "unified"})
    both = paper({}, {"row": "SnapKV", "method": "snapkv"})
    assert "one table mixes no protocols" in refused(merge_published, collect([tmp_path]), both)
    assert merge_published(collect([tmp_path]), both, allow_mixed=True).cells[1, 0].marks["score"] == "m"


PASSES = {"temperature": 0.7, "samples": 2}


def test_a_paper_s_columns_may_be_of_different_runs_and_pass_at_k_stands_beside_its_like(tmp_path):
    answers = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "d": [1.0, 0.0]}
    drawn = [
        record(f"{prompt}#{place}", "", score, sample=prompt)
        for prompt, scores in answers.items()
        for place, score in enumerate(scores)
    ]
    stored(tmp_path, "quest")
    stored(tmp_path, "quest", samples=drawn, task="aime", protocol=PASSES)
    other = {"task": "aime", "settings": ("protocol.temperature=0.7", "protocol.samples=2")}
    both = paper({}, {"column": "AIME@2", "metric": "pass_at_2", **other}, {"column": "AIME", **other})
    table = merge_published(collect([tmp_path]), both)
    assert [table.cells[0, place].numbers["score"] for place in range(3)] == [50, 75, 50]
    assert [table.cells[0, place].numbers["difference"] for place in range(3)] == [-10, 15, -10]
    stored(tmp_path / "begun", "quest", samples=drawn[:-1], task="aime", finished=False, protocol=PASSES)
    begun = merge_published(collect([tmp_path / "begun"], unfinished=True), paper({"metric": "pass_at_2", **other}))
    assert list(begun.cells[0, 0].numbers) == ["published"], "a problem lacks an answer"


@pytest.mark.parametrize("id", published.ids())
def test_every_published_table_stands_alone(id):
    table = merge_published(None, published.table(id))
    frame = published.table(id).frame
    assert len(table.cells) == len(frame)
    assert sorted(cell.numbers["published"] for cell in table.cells.values() if cell.numbers) == sorted(
        frame["value"].dropna()
    )
    assert not any("score" in cell.numbers for cell in table.cells.values())
    assert any(cell.mapped for cell in table.cells.values()) == any(
        line.metric and line.method and line.model for line in frame.itertuples()
    )


def test_a_row_of_ours_fills_a_real_paper_s_table(tmp_path):
    known = published.table("icecache_table1")
    own = known.frame[(known.frame["method"] == "icecache") & (known.frame["budget"] == 256)]
    own = own[own["model"] == "llama3.1-8b-instruct"]
    groups = {group: [1.0, 0.0] for group in own["group"] if group}
    for ratio, samples in {"difflib": groups, "levenshtein": dict.fromkeys(groups, [1.0, 1.0])}.items():
        options, model = {"code_sim": ratio}, "llama3.1-8b-instruct"
        stored(tmp_path, "icecache", 256, samples, task="longbench", model=model, options=options)
    table = merge_published(collect([tmp_path]), known)  # whose code is scored by difflib
    filled = {place for place, cell in table.cells.items() if "score" in cell.numbers}
    assert len(filled) == 17 and len({row for row, _ in filled}) == 1
    assert all(table.cells[place].numbers["score"] == 50 for place in filled)
    assert any("task.code_sim=difflib" in note for note in table.notes)


def ruler_row(tmp_path, groups: list[str], **options):
    """LycheeCluster's row of its RULER table at 4k with a run of ours: its cells by column, and the note on marks."""
    known = published.table("lychee_table6")
    usual = {
        "haystack": "generated",
        "squad": "generated",
        "hotpotqa": "generated",
        "data_dir": None,
        "lengths": [4096],
    }
    samples = {f"{group}/4096": [1.0, 0.0] for group in groups}
    whole = {**usual, "samples": 49, **options}
    stored(tmp_path, "lychee", 1024, samples, task="ruler", model="llama3.1-8b-instruct", options=whole)
    table = merge_published(collect([tmp_path]), known)
    row = table.rows.index(("LycheeCluster, 4k",))
    cells = {column: table.cells[row, place] for place, column in enumerate(table.columns)}
    return cells, [note for note in table.notes if note.startswith("g: ")]


RULER_OF_LYCHEE = [
    "niah_single_1",
    "niah_multikey_1",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "fwe",
    "qa_1",
    "qa_2",
]


def test_generated_text_in_place_of_rulers_files_is_marked_and_has_no_difference(tmp_path):
    cells, notes = ruler_row(tmp_path, RULER_OF_LYCHEE)
    essays = {"multikey", "multivalue", "multiquery"}
    assert {name for name, cell in cells.items() if "g" in cell.lines["score"].mark} == essays | {"qa1", "qa2", "avg"}
    assert {name for name, cell in cells.items() if "difference" in cell.numbers} == {"single", "vt", "fwe"}
    assert all({"score", "published"} <= cell.numbers.keys() for cell in cells.values())
    (note,) = notes
    assert "task.haystack, task.squad, task.hotpotqa" in note and "no difference" in note


def test_with_rulers_files_nothing_is_marked(tmp_path):
    files = {"haystack": "essays.txt", "squad": "dev-v2.0.json", "hotpotqa": "hotpot_dev.json"}
    for options in (files, {"data_dir": "ready-made"}):
        folder = tmp_path / "-".join(options)
        cells, notes = ruler_row(folder, RULER_OF_LYCHEE, **options)
        assert not notes and all("difference" in cell.numbers for cell in cells.values())


def test_a_run_from_before_an_option_had_no_file_for_it(tmp_path):
    options = {"task": "ruler", "model": "llama3.1-8b-instruct"}
    stored(tmp_path, "full", None, {"cwe/4096": [1.0]}, **options, options={"words": "words.txt"})
    stored(tmp_path, "quest", 64, {"cwe/4096": [1.0]}, **options)  # of which a data frame says NaN
    both = [{"method": method, "budget": budget, "row": method} for method, budget in (("full", None), ("quest", 64))]
    lines = [{**line, **options, "group": "cwe/4096"} for line in both]
    table = merge_published(collect([tmp_path]), paper(*lines))
    assert ["g" in table.cells[row, 0].lines["score"].mark for row in range(2)] == [False, True]


def test_only_the_file_that_is_missing_marks_its_cells(tmp_path):
    cells, _ = ruler_row(tmp_path, RULER_OF_LYCHEE, haystack="essays.txt", hotpotqa="hotpot_dev.json")
    assert {name for name, cell in cells.items() if "difference" not in cell.numbers} == {"qa1", "avg"}


def test_a_run_from_before_an_option_was_there_does_not_stand_beside(tmp_path):
    stored(tmp_path, "quest")
    table = merge_published(collect([tmp_path]), paper({"settings": ("task.variant=a",)}))
    assert "score" not in table.cells[0, 0].numbers


def test_a_note_of_the_paper_s_cell_is_told():
    table = merge_published(None, paper({"note": "the mean of its columns is 40.5"}))
    assert "Quest 64, A: the mean of its columns is 40.5." in table.notes


def test_agreement_with_full_attention_is_compared_with_no_score_of_its_own(tmp_path):
    """Which is 100 by construction: everything else would be starred."""
    near = {"fidelity": {"kl_mean": 0.1, "nll": 1.0, "nll_full": 1.0}}
    for method, score in (("full", 1.0), ("quest", 0.5)):
        lines = [record(str(number), "", score * (1 - number / 100), **near) for number in range(8)]
        stored(tmp_path, method, samples=lines, task="fidelity")
    runs = collect([tmp_path])
    assert of(runs, "quest").against_full() is None
    assert of(runs, "quest").against([of(runs, "full")]).differs
    assert of(runs, "quest").against([of(runs, "full")], kl=True).mean == 0
    assert any("by construction" in note for note in summary(runs, values=["score", "kl_mean"])[0].notes)
