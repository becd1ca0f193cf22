"""Claims about other projects' predictions: scored as their own scripts do, and what is wrong with a file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.score import main
from kvbench.tasks.longbench import SUBSETS
from kvbench.tasks.ruler.task import ALL_SUBSETS

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
MULTI_NEWS = DATA / "longbench" / "multi_news.jsonl"
MULTIKEY = DATA / "ruler" / "4096" / "niah_multikey_3.jsonl"


def written(folder: Path, **files: list[dict[str, Any] | str]) -> Path:
    """A folder with these files, "__" standing for "-"; a line is an object or a text as it is."""
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / f"{name.replace('__', '-')}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return folder


def answered(pred: str, *answers: str, **more: Any) -> dict[str, Any]:
    """A line as LongBench's scripts write it."""
    return {"pred": pred, "answers": list(answers), "all_classes": None, **more}


def found(pred: str, *outputs: str, **more: Any) -> dict[str, Any]:
    """A line as RULER's scripts write it."""
    whole = {"index": 0, "pred": pred, "input": "x", "outputs": list(outputs), "others": {}, "truncation": -1}
    return {**whole, "length": -1, **more}


def scored(capsys: pytest.CaptureFixture[str], kind: str, *folders: Path) -> Any:
    """What --json prints; of one folder, its entry."""
    capsys.readouterr()
    assert main(["--predictions", kind, *map(str, folders), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return entries[0] if len(folders) == 1 else entries


def table(capsys: pytest.CaptureFixture[str], kind: str, folder: Path) -> str:
    capsys.readouterr()
    assert main(["--predictions", kind, str(folder)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], kind: str, *words: object) -> str:
    """The one line on stderr of a command that ends with 2."""
    capsys.readouterr()
    assert main(["--predictions", kind, *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvbench score: ") and error.count("\n") == 1
    return error


# -- LongBench ---------------------------------------------------------------------------------------------------------


def test_a_subset_is_scored_by_its_metric_and_the_mean_is_over_subsets(tmp_path, capsys):
    qa = [answered("Paris", "London", "Paris"), answered("", "Rome"), answered("in the old Rome", "Rome")]
    written(tmp_path, hotpotqa=qa, passage_count=[answered("3, or 4", "3")])
    entry = scored(capsys, "longbench", tmp_path)
    # Words in common: all, none, and one of three ("the" is none).
    assert entry["subsets"]["hotpotqa"]["scores"] == {"qa_f1": pytest.approx(50), "score": pytest.approx(50)}
    assert (entry["subsets"]["hotpotqa"]["n"], entry["subsets"]["hotpotqa"]["empty"]) == (3, 1)
    assert entry["subsets"]["passage_count"]["score"] == 50
    written(tmp_path, passage_count=[answered("3", "3")])
    assert scored(capsys, "longbench", tmp_path)["means"] == {"score": pytest.approx(75)}


def test_code_is_shown_by_both_ratios_and_so_is_the_mean(tmp_path, capsys):
    code = answered("if (result == null) {", "if (null == result) {")
    written(tmp_path, repobench__p=[code], hotpotqa=[answered("x", "x")])
    entry = scored(capsys, "longbench", tmp_path)
    # fuzzywuzzy without and with Levenshtein.
    assert entry["subsets"]["repobench-p"]["scores"] == {
        "code_sim_difflib": 62,
        "code_sim_levenshtein": 71,
        "score": 62,
    }
    assert entry["means"] == {"score": 81, "code_sim_levenshtein": 85.5}
    shown = table(capsys, "longbench", tmp_path)
    assert all(text in shown for text in ("code_sim_difflib", "code_sim_levenshtein", "62.00", "71.00", "85.50"))


def test_a_prediction_of_classes_is_its_first_line_against_the_last_row_s_classes(tmp_path, capsys):
    rows = [answered("\n\nDate\nCity", "Date", all_classes=["City"]), answered("City", "City", all_classes=["Date"])]
    entry = scored(capsys, "longbench", written(tmp_path, trec=rows))
    assert entry["subsets"]["trec"]["score"] == 50  # no class is named City


def test_lengths_have_scores_of_their_own_where_every_line_has_one(tmp_path, capsys):
    rights = [(3999, "a"), (4000, "a"), (7999, "b"), (8000, "b"), (30_000, "b")]
    rows = [answered(pred, "b", length=length) for length, pred in rights]
    entry = scored(capsys, "longbench", written(tmp_path, qasper=rows, hotpotqa=[answered("b", "b")]))
    assert entry["subsets"]["qasper"]["by_length"] == {"0-4k": 0, "4-8k": 50, "8k+": 100}
    assert entry["subsets"]["hotpotqa"]["by_length"] == {}
    assert "8k+" in table(capsys, "longbench", tmp_path)


def test_what_is_no_official_subset_is_named_and_not_scored_and_what_lacks_too(tmp_path, capsys):
    written(tmp_path, hotpotqa=[answered("x", "x")], dureader=["no matter what"])
    entry = scored(capsys, "longbench", tmp_path)
    assert entry["not_scored"] == ["dureader"] and entry["means"] == {"score": 100}
    assert entry["missing"] == [name for name in SUBSETS if name != "hotpotqa"]
    shown = table(capsys, "longbench", tmp_path)
    assert "dureader, not scored" in shown and "not scored: dureader.jsonl; none of LongBench's 16" in shown
    assert "mean of 1 subsets" in shown and "without narrativeqa, qasper" in shown


@pytest.mark.skipif(not MULTI_NEWS.is_file(), reason=f"no {MULTI_NEWS}")
def test_a_whole_real_subset_scores_as_the_official_script(tmp_path, capsys):
    rows = [json.loads(line) for line in MULTI_NEWS.read_text("utf-8").split("\n")[:-1]]
    lines: list[dict[str, Any] | str] = []
    for index, row in enumerate(rows):
        answer, other = row["answers"][0], rows[(index + 1) % len(rows)]["answers"][0]
        cut = answer[: len(answer) * 2 // 3] if index % 2 else answer
        lines.append(answered(f"\n\n{cut} {other}\n{row['context'][:200]}", answer, length=row["length"]))
    entry = scored(capsys, "longbench", written(tmp_path, multi_news=lines))
    assert round(entry["subsets"]["multi_news"]["score"], 2) == 60.62  # by the official eval.py
    assert sum(name in entry["subsets"]["multi_news"]["by_length"] for name in ("0-4k", "4-8k", "8k+")) == 3


# -- RULER -------------------------------------------------------------------------------------------------------------


def test_rulers_tasks_want_all_answers_and_its_questions_one(tmp_path, capsys):
    written(
        tmp_path,
        vt=[found("ABC and\x01def", "ABC", "DEF", "GHI", "JKL"), found("", "ABC")],
        qa_1=[found("it is in paris.", "Paris", "London"), found("Rome", "Paris")],
    )
    entry = scored(capsys, "ruler", tmp_path)
    assert entry["subsets"]["vt"]["scores"] == {"score": 25, "string_match_all": 25}
    assert entry["subsets"]["qa_1"]["scores"] == {"score": 50, "string_match_part": 50}
    assert (entry["subsets"]["vt"]["empty"], entry["means"]) == (1, {"score": 37.5})
    assert entry["subsets"]["vt"]["by_length"] == {}, "RULER's length is of another kind"
    assert list(entry["subsets"]) == ["vt", "qa_1"] and len(entry["missing"]) == len(ALL_SUBSETS) - 2


def test_the_parts_of_a_task_are_one_and_not_counted_beside_the_whole(tmp_path, capsys):
    written(tmp_path, fwe__0=[found("abc", "abc")], fwe__1=[found("", "abc"), found("", "abc"), found("abc", "abc")])
    entry = scored(capsys, "ruler", tmp_path)
    assert (entry["subsets"]["fwe"]["n"], entry["means"]["score"]) == (4, 50)
    written(tmp_path, fwe=[found("abc", "abc")])
    assert "holds both fwe.jsonl and fwe-0.jsonl" in refused(capsys, "ruler", tmp_path)


@pytest.mark.skipif(not MULTIKEY.is_file(), reason=f"no {MULTIKEY}")
def test_a_real_file_of_rulers_scores_by_its_outputs(tmp_path, capsys):
    rows = [json.loads(line) for line in MULTIKEY.read_text("utf-8").split("\n")[:-1]]
    lines = [{**row, "pred": f" {row['outputs'][0].upper()}." if i % 4 else "none"} for i, row in enumerate(rows)]
    entry = scored(capsys, "ruler", written(tmp_path, niah_multikey_3=list(lines)))
    assert (entry["subsets"]["niah_multikey_3"]["n"], entry["means"]["score"]) == (500, 75)


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_a_folder_without_predictions_says_what_would_be_some(tmp_path, capsys):
    assert "narrativeqa.jsonl" in refused(capsys, "longbench", tmp_path)
    assert "no such folder" in refused(capsys, "ruler", tmp_path / "gone")
    file = written(tmp_path, qa_3=[found("a", "a")]) / "qa_3.jsonl"
    assert "a file; name its folder" in refused(capsys, "ruler", file)
    assert "qa_3.jsonl" in refused(capsys, "ruler", tmp_path)


@pytest.mark.parametrize(
    "kind, name, line, message",
    [
        ("longbench", "qasper", {"answers": ["a"]}, "field pred: missing"),
        ("longbench", "qasper", {"pred": "a"}, "field answers: missing"),
        ("longbench", "qasper", {"pred": None, "answers": ["a"]}, "field pred: expected str, not NoneType"),
        ("longbench", "qasper", answered("a"), "field answers: expected one text or more"),
        ("longbench", "trec", {"pred": "a", "answers": ["a"]}, "field all_classes: missing"),
        ("longbench", "trec", answered("a", "a"), "field all_classes: expected list, not NoneType"),
        ("longbench", "passage_retrieval_en", answered("a", "12"), 'field answers: expected "Paragraph" and a number'),
        ("longbench", "lcc", '{"pred": "a", "answ', "not JSON"),
        ("longbench", "lcc", "[]", "expected an object with the fields pred, answers"),
        ("ruler", "vt", {"pred": "a"}, "field outputs: missing"),
        ("ruler", "vt", found("a"), "field outputs: expected one text or more"),
        ("ruler", "vt", {"pred": "a", "outputs": [1]}, "field outputs: expected one text or more"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, capsys, kind, name, line, message):
    good = {"pred": "a", "answers": ["Paragraph 1"], "outputs": ["a"], "all_classes": ["a"]}
    written(tmp_path, **{name: [good, line]})
    assert f"{tmp_path / name}.jsonl, line 2: {message}" in refused(capsys, kind, tmp_path)


def test_an_empty_file_is_named(tmp_path, capsys):
    assert f"{tmp_path / 'vt.jsonl'}: empty" in refused(capsys, "ruler", written(tmp_path, vt=[]))


def test_one_bad_folder_does_not_keep_the_others_from_being_scored(tmp_path, capsys):
    good, bad = written(tmp_path / "good", vt=[found("a", "a")]), written(tmp_path / "bad", vt=["{"])
    assert main(["--predictions", "ruler", str(bad), str(good)]) == 2
    said = capsys.readouterr()
    assert "100.00" in said.out and "bad/vt.jsonl, line 1: not JSON" in said.err
    assert [entry["predictions"] for entry in scored(capsys, "ruler", good, good)] == [str(good)] * 2


def test_nothing_is_written_and_write_is_refused(tmp_path, capsys):
    folder = written(tmp_path, vt=[found("a", "a")])
    assert "--write: not with --predictions" in refused(capsys, "ruler", folder, "--write")
    table(capsys, "ruler", folder)
    assert [path.name for path in folder.iterdir()] == ["vt.jsonl"]
