"""Claims about LongBench: official prompts, settings and scores, a fair order, and bad lines that cost no others."""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvbench.config import check_types, check_valid, shipped
from kvbench.tasks import Sample
from kvbench.tasks.longbench import ARCHIVE, HUB, SUBSETS, LongBench
from kvbench.tasks.sources import HubFile, LocalFile

# Real data lies beside the checkout where there is any.
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CONFIG = DATA / "longbench" / "config"
MINI = DATA / "longbench_mini"

with_config = pytest.mark.skipif(not CONFIG.is_dir(), reason=f"no {CONFIG}")
with_mini = pytest.mark.skipif(not MINI.is_dir(), reason=f"no {MINI}")
with_multi_news = pytest.mark.skipif(not (DATA / "longbench" / "multi_news.jsonl").is_file(), reason=f"no {DATA}")

CLASSES = ["Date", "City", "Other entity"]


def row(number: int, **fields: Any) -> dict[str, Any]:
    """One line in the official schema."""
    return {
        "input": f"What is {number}?",
        "context": f"A text about {number}.\n",
        "answers": [f"Paragraph {number}"],
        "length": 9,
        "dataset": "x",
        "language": "en",
        "all_classes": CLASSES,
        "_id": f"id{number}",
    } | fields


def jsonl(rows: list[dict[str, Any] | str]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)


def written(folder: Path, **files: list[dict[str, Any] | str]) -> Path:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text(jsonl(rows), encoding="utf-8")
    return folder


def zipped(folder: Path, **files: list[dict[str, Any] | str]) -> Path:
    with zipfile.ZipFile(folder / ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../climbs.jsonl", "out")
        archive.writestr("data/hotpotqa_e.jsonl", "another benchmark")
        for name, rows in files.items():
            archive.writestr(f"data/{name}.jsonl", jsonl(rows))
    return folder


def samples(subsets: list[str], folder: Path, seed: int = 0, **options: Any) -> list[Sample]:
    return list(LongBench(subsets, str(folder), **options).samples(None, seed))


def one(subset: str, folder: Path, **fields: Any) -> Sample:
    """The sample of a file with one row."""
    (sample,) = samples([subset], written(folder, **{subset: [row(1, **fields)]}))
    return sample


def score(subset: str, output: str, *answers: str, **options: Any) -> float:
    """As stored outputs are scored: from id, answers, group and meta, without the data."""
    sample = Sample("x", "", answers, 0, group=subset, meta={"classes": CLASSES})
    return LongBench([subset], **options).score(sample, output)["score"]


# -- what is asked -----------------------------------------------------------------------------------------------------


@with_config
def test_prompts_and_new_tokens_are_the_official_ones_byte_for_byte():
    prompts = json.loads((CONFIG / "dataset2prompt.json").read_text(encoding="utf-8"))
    new_tokens = json.loads((CONFIG / "dataset2maxlen.json").read_text(encoding="utf-8"))
    assert len(SUBSETS) == 16
    for name, subset in SUBSETS.items():
        assert subset.prompt.encode() == prompts[name].encode()
        assert subset.new_tokens == new_tokens[name]


def test_prompts_keep_their_quirks():
    assert SUBSETS["narrativeqa"].prompt.count("asconcisely") == 2
    assert SUBSETS["passage_count"].prompt.endswith("The final answer is: ")
    assert SUBSETS["passage_retrieval_en"].prompt.endswith("The answer is: ")
    assert SUBSETS["multi_news"].prompt.startswith(
        "You are given several news passages. Write a one-page summary of all"
    )
    assert SUBSETS["lcc"].prompt == "Please complete the code given below. \n{context}Next line of code:\n"


def test_five_subsets_skip_the_chat_template():
    assert {name for name, subset in SUBSETS.items() if not subset.chat} == {
        *("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    }


@pytest.mark.parametrize("name", SUBSETS)
def test_a_sample_is_the_official_prompt_and_its_question_ends_it(name, tmp_path):
    """Texts of the data are filled in as they are, braces and trailing spaces too."""
    fields = {"context": "Some {input} \\n text {0} ", "input": "Why {context}? Summary: "}
    sample = one(name, tmp_path, **fields)
    assert sample.prompt == SUBSETS[name].prompt.format(**fields)
    assert sample.prompt.endswith(sample.question) and sample.question
    assert sample.prompt.removesuffix(sample.question).endswith(fields["context"])
    assert ("{input}" in SUBSETS[name].prompt) == (fields["input"] in sample.question)


@pytest.mark.parametrize("name", SUBSETS)
def test_a_sample_says_how_it_is_run(name, tmp_path):
    sample = one(name, tmp_path)
    assert (sample.truncate, sample.max_length, sample.stop, sample.answer_prefix) == (True, None, (), "")
    assert sample.chat == SUBSETS[name].chat
    assert sample.end_token == ("\n" if name == "samsum" else "")
    assert sample.max_new_tokens == SUBSETS[name].new_tokens
    assert (sample.group, sample.meta["dataset"], sample.meta["length"]) == (name, name, 9)
    assert samples([name], tmp_path, max_length=31_500)[0].max_length == 31_500


# -- which samples, in which order -------------------------------------------------------------------------------------


def test_every_prefix_takes_the_subsets_in_turn(tmp_path):
    folder = written(tmp_path, hotpotqa=[row(i) for i in range(5)], lcc=[row(i) for i in range(9)], trec=[row(0)])
    found = samples(["hotpotqa", "lcc", "trec"], folder)
    assert [sample.group for sample in found[:6]] == ["hotpotqa", "lcc", "trec", "hotpotqa", "lcc", "hotpotqa"]
    assert Counter(sample.group for sample in found) == {"hotpotqa": 5, "lcc": 9, "trec": 1}
    assert len(found) == len(LongBench(["hotpotqa", "lcc", "trec"], str(folder))) == 15


def test_the_seed_orders_a_subset_whatever_the_others_are(tmp_path):
    folder = written(tmp_path, hotpotqa=[row(i) for i in range(50)], lcc=[row(i) for i in range(70)])
    alone = [sample.id for sample in samples(["lcc"], folder)]
    assert alone == [sample.id for sample in samples(["hotpotqa", "lcc"], folder) if sample.group == "lcc"]
    assert alone != [sample.id for sample in samples(["lcc"], folder, seed=1)]
    assert alone != sorted(alone, key=lambda name: int(name.removeprefix("lcc-id")))


def test_ids_are_unique_and_stable(tmp_path):
    rows = [row(1), row(1), row(1, _id="id1-2"), row(4, _id=""), {**row(5), "_id": "4"}, "{"]
    folder = written(tmp_path, qmsum=rows)
    names = {sample.id for sample in samples(["qmsum"], folder)}
    assert names == {"qmsum-id1", "qmsum-id1-2", "qmsum-id1-2-2", "qmsum-4", "qmsum-4-2", "qmsum-6"}
    assert names == {sample.id for sample in samples(["qmsum"], folder, seed=3)}


# -- where they come from ----------------------------------------------------------------------------------------------


def test_the_hubs_archive_and_a_folder_give_the_same_samples(tmp_path, monkeypatch):
    rows = [row(i, context="Ünïcödé 漢字 \u2028 \x85 end") for i in range(4)]
    (tmp_path / "zip").mkdir()
    archive = zipped(tmp_path / "zip", hotpotqa=rows)
    plain = samples(["hotpotqa"], written(tmp_path, hotpotqa=rows))
    assert len(plain) == 4 and not any(sample.error for sample in plain)
    assert samples(["hotpotqa"], archive) == plain
    monkeypatch.setattr("kvbench.tasks.longbench.HUB", LocalFile(archive / ARCHIVE, "task.data_dir"))
    assert list(LongBench(["hotpotqa"]).samples(None, 0)) == plain
    assert not (tmp_path / "climbs.jsonl").exists() and list((tmp_path / "zip").iterdir()) == [archive / ARCHIVE]


def test_sources_are_the_archive_once_or_the_files_of_the_subsets(tmp_path):
    assert LongBench().sources == (HUB,) == (HubFile("zai-org/LongBench", "data.zip", megabytes=114),)
    zipped(tmp_path, hotpotqa=[row(1)], lcc=[row(1)])
    assert [source.label for source in LongBench(["hotpotqa", "lcc"], str(tmp_path)).sources] == [ARCHIVE]
    written(tmp_path, lcc=[row(1)])  # a subset's own file goes before the archive
    assert [source.label for source in LongBench(["hotpotqa", "lcc"], str(tmp_path)).sources] == [ARCHIVE, "lcc.jsonl"]
    for source in LongBench(["hotpotqa", "lcc"], str(tmp_path)).sources:
        source.check()


def test_constructing_reads_and_fetches_nothing(tmp_path):
    task = LongBench(data_dir=str(tmp_path / "nowhere"))
    for source in task.sources:
        with pytest.raises(ValueError, match=r"^task\.data_dir: .*jsonl: no such folder$"):
            source.check()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, r"task\.data_dir: \S+data\.zip: has no data/qasper\.jsonl$"),
        (b"no archive", r"task\.data_dir: \S+data\.zip: cannot be read \(File is not a zip file\)$"),
    ],
)
def test_a_broken_archive_is_one_clear_error(tmp_path, content, message):
    zipped(tmp_path, hotpotqa=[row(1)])
    if content is not None:
        (tmp_path / ARCHIVE).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        samples(["qasper"], tmp_path)


def test_a_damaged_member_is_one_clear_error(tmp_path):
    zipped(tmp_path, hotpotqa=[row(i) for i in range(200)])
    content = bytearray((tmp_path / ARCHIVE).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 50] = bytes(50)
    (tmp_path / ARCHIVE).write_bytes(content)
    with pytest.raises(ValueError, match=r"^task\.data_dir: \S+data\.zip: cannot be read"):
        samples(["hotpotqa"], tmp_path)


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"qasper\.jsonl: empty$"):
        samples(["qasper"], written(tmp_path, qasper=[]))


# -- bad lines ---------------------------------------------------------------------------------------------------------


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in row(2).items() if key != field}


@pytest.mark.parametrize(
    "subset, line, message",
    [
        ("qasper", '{"input": ', r"qasper\.jsonl, line 2: not JSON"),
        ("qasper", "[1]", r"qasper\.jsonl, line 2: expected an object"),
        *(("qasper", without(field), rf"line 2: field {field}: missing") for field in ("input", "context", "answers")),
        ("qasper", row(2, context=None), r"line 2: field context: expected str"),
        ("qasper", row(2, answers="yes"), r"line 2: field answers: expected list"),
        ("qasper", row(2, answers=[]), r"qasper\.jsonl, line 2: field answers: expected one text or more"),
        ("qasper", row(2, answers=[3]), r"line 2: field answers: expected one text or more"),
        ("trec", row(2, all_classes=None), r"line 2: field all_classes: expected list"),
        ("trec", row(2, all_classes=[1]), r"line 2: field all_classes: expected texts"),
        ("passage_retrieval_en", row(2, answers=["12"]), r'line 2: field answers: expected "Paragraph" and a number'),
    ],
)
def test_a_bad_line_is_a_sample_with_an_error_and_costs_no_other(tmp_path, subset, line, message):
    found = samples([subset], written(tmp_path, **{subset: [row(1), line, row(3)]}))
    bad = [sample for sample in found if sample.error]
    assert len(found) == 3 and len(bad) == 1
    assert re.search(message, bad[0].error) and bad[0].group == subset
    assert bad[0].id == (f"{subset}-id2" if isinstance(line, dict) and "_id" in line else f"{subset}-2")


def test_an_empty_context_is_asked_as_officially(tmp_path):
    sample = one("gov_report", tmp_path, context="")
    assert not sample.error
    assert sample.prompt == SUBSETS["gov_report"].prompt.format(context="")


def test_a_context_of_a_megabyte_is_kept_whole(tmp_path):
    context = "Ünïcödé 漢字 🙂 " * 90_000
    sample = one("narrativeqa", tmp_path, context=context)
    assert len(context.encode()) > 2_000_000 and context in sample.prompt and not sample.error


# -- scores ------------------------------------------------------------------------------------------------------------


def test_only_the_first_line_is_scored_in_three_subsets():
    """A matter of scoring: generation goes on at a newline, and a reply that begins with some is not empty."""
    assert {name for name, subset in SUBSETS.items() if subset.first_line} == {"trec", "triviaqa", "samsum"}
    assert score("triviaqa", "\n\nParis\nQuestion: who?", "Paris") == 1.0
    assert score("hotpotqa", "\n\nParis\nQuestion: who?", "Paris") == pytest.approx(0.5)
    assert score("samsum", "\n\nAnn called. Bob left.\nDialogue: x", "Ann called. Bob left.") == pytest.approx(1.0)
    assert score("trec", "\nDate\nCity", "Date") == 1.0
    assert score("trec", "  \nDate", "Date") == 0.0  # spaces are not stripped: the first line is blank


def test_code_keeps_its_leading_spaces():
    assert score("lcc", "        return x\n", "        return x") == 1.0
    assert score("lcc", "return x\n", "        return x") == 0.67


def test_a_score_is_the_best_over_the_answers_and_has_two_names(tmp_path):
    sample = Sample("x", "", ("London", "Paris"), 32, group="hotpotqa")
    assert LongBench(["hotpotqa"]).score(sample, "Paris") == {"score": 1.0, "qa_f1": 1.0}
    for name, subset in SUBSETS.items():
        sample = one(name, tmp_path, answers=["Paragraph 1"])
        own = {"code_sim_difflib", "code_sim_levenshtein"} if subset.metric == "code_sim" else {subset.metric}
        assert LongBench().score(sample, "").keys() == {"score", *own}


def test_code_has_both_ratios_and_the_chosen_one_is_its_score():
    sample = Sample("x", "", ("if (null == result) {",), 64, group="lcc")
    both = {"code_sim_difflib": 0.62, "code_sim_levenshtein": 0.71}
    assert LongBench().score(sample, "if (result == null) {") == {"score": 0.62, **both}
    chosen = LongBench(code_sim="levenshtein")
    assert chosen.score(sample, "if (result == null) {") == {"score": 0.71, **both}


def test_classes_are_those_of_the_last_row(tmp_path):
    rows = [row(i, all_classes=["old"], answers=["new"]) for i in range(3)] + [row(9, all_classes=["new"])]
    found = samples(["trec"], written(tmp_path, trec=rows))
    assert all(sample.meta["classes"] == ["new"] for sample in found)
    assert "classes" not in one("hotpotqa", tmp_path).meta
    assert LongBench().score(found[0], "new")["score"] in (0.0, 1.0)


def test_scores_come_from_id_answers_group_and_meta_alone(tmp_path):
    for name in SUBSETS:
        sample = one(
            name, tmp_path, answers=["Paragraph 1", "1"] if name != "passage_retrieval_en" else ["Paragraph 1"]
        )
        stored = Sample(sample.id, "", sample.answers, 0, group=sample.group, meta=json.loads(json.dumps(sample.meta)))
        for output in ("Paragraph 1", "1 of 2", "Date\nCity", ""):
            assert LongBench().score(stored, output) == LongBench().score(sample, output)


def test_notes_name_what_the_metrics_are_equal_to():
    assert LongBench(["hotpotqa", "trec"]).notes == {}
    assert LongBench(["lcc"]).notes == {"code_sim": "as fuzzywuzzy without Levenshtein, by Python's difflib"}
    assert LongBench(["lcc"], code_sim="levenshtein").notes == {"code_sim": "as fuzzywuzzy with Levenshtein"}
    assert LongBench().notes.keys() == {"rouge_l", "code_sim"}


# -- on real data ------------------------------------------------------------------------------------------------------


def reply(rows: list[dict[str, Any]], index: int) -> str:
    """A made output that is right in part: an answer, every other one cut, another sample's, and a bit of text."""
    answer, other = rows[index]["answers"][0], rows[(index + 1) % len(rows)]["answers"][0]
    if index % 2:
        answer = answer[: len(answer) * 2 // 3]
    return f"\n\n{answer} {other}\n{rows[index]['context'][:200]}"


# Scores of `reply` by the official `eval.py` and `metrics.py`, with rouge 1.0.1 and fuzzywuzzy 0.18.0 and nothing else.
OFFICIAL = {
    "narrativeqa": 12.68,
    "qasper": 26.34,
    "multifieldqa_en": 31.34,
    "hotpotqa": 7.76,
    "2wikimqa": 10.5,
    "musique": 13.96,
    "gov_report": 65.43,
    "qmsum": 50.64,
    "multi_news": 60.1,
    "trec": 25.0,
    "triviaqa": 48.94,
    "samsum": 60.97,
    "passage_count": 16.67,
    "passage_retrieval_en": 24.11,
    "lcc": 61.38,
    "repobench-p": 61.35,
}
OFFICIAL_WITH_LEVENSHTEIN = {"lcc": 62.23, "repobench-p": 61.52}  # 0.27.5


def scored(task: LongBench, folder: Path) -> float:
    """The score of the task's one subset as the official script rounds it."""
    rows = [
        json.loads(line) for line in (folder / f"{task.subsets[0]}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    ]
    found = {sample.id: sample for sample in task.samples(None, 0)}
    scores = [
        task.score(found[f"{task.subsets[0]}-{row['_id']}"], reply(rows, index))["score"]
        for index, row in enumerate(rows)
    ]
    return round(100 * sum(scores) / len(scores), 2)


@with_mini
@pytest.mark.parametrize("name", SUBSETS)
def test_scores_on_real_answers_are_the_official_ones(name):
    assert scored(LongBench([name], str(MINI)), MINI) == OFFICIAL[name]


@with_mini
@pytest.mark.parametrize("name", OFFICIAL_WITH_LEVENSHTEIN)
def test_scores_of_code_with_levenshtein_are_the_official_ones(name):
    assert scored(LongBench([name], str(MINI), code_sim="levenshtein"), MINI) == OFFICIAL_WITH_LEVENSHTEIN[name]


@with_mini
def test_all_subsets_load_and_their_own_answers_score_100():
    task = LongBench(data_dir=str(MINI))
    found = list(task.samples(None, 0))
    assert {sample.group for sample in found} == set(SUBSETS) and len(found) == len(task) == 187
    assert not any(sample.error for sample in found)
    # Its inputs end so, with a space and a newline that the model reads.
    ends = {"samsum": "Summary: ", "triviaqa": "Answer:\n", "trec": "Type:"}
    for sample in found:
        assert sample.prompt.endswith(ends.get(sample.group, ""))
        for answer in sample.answers:
            assert task.score(sample, answer)["score"] == pytest.approx(1.0)


@with_multi_news
def test_a_whole_subset_loads_and_scores_as_officially():
    folder = DATA / "longbench"
    found = samples(["multi_news"], folder)
    assert len(found) == len({sample.id for sample in found}) == 200
    frame = SUBSETS["multi_news"]
    for sample in found:
        context = sample.prompt.removeprefix(frame.before()).removesuffix(frame.asking(""))
        assert sample.meta["length"] == len(context.split()) + sum(len(answer.split()) for answer in sample.answers)
    assert scored(LongBench(["multi_news"], str(folder)), folder) == 60.62


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"subsets": ["hotpot"]}, r"task\.subsets: no subset hotpot; did you mean hotpotqa\?"),
        ({"subsets": ["multifieldqa_zh"]}, r"no subset multifieldqa_zh; did you mean multifieldqa_en"),
        ({"subsets": []}, r"task\.subsets="),
        ({"subsets": "hotpotqa"}, r"task\.subsets=hotpotqa: a list"),
        ({"subsets": ["lcc", "lcc"]}, r"task\.subsets="),
        ({"subsets": [["lcc"]]}, r"task\.subsets"),
        ({"max_length": 1}, r"task\.max_length=1: a number of tokens, 2 or more, or null"),
        ({"max_length": 1.5}, r"task\.max_length"),
        ({"max_length": "31500"}, r"task\.max_length"),
        ({"code_sim": "rapidfuzz"}, r"task\.code_sim=rapidfuzz: one of difflib, levenshtein"),
    ],
)
def test_a_bad_option_names_its_key(options, message):
    with pytest.raises(ValueError, match=message):
        LongBench(**options)


def test_the_shipped_configuration_is_all_16_subsets_from_the_hub():
    config = shipped("task", "longbench")
    assert config["subsets"] == list(SUBSETS) and config["data_dir"] is None and config["limit"] is None
    check_types("task", {"subsets": ["lcc"], "data_dir": "x", "max_length": 31_500}, config)
    with pytest.raises(ValueError, match=r"task\.code_sim=rapidfuzz: expected difflib \| levenshtein"):
        check_valid("task", {"code_sim": "rapidfuzz"}, config["valid"])
