"""Claims about RULER's ready-made samples: lines and tables become the samples that a generator would have given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from kvbench.tasks import Sample
from kvbench.tasks.ruler.task import ALL_SUBSETS, Ruler
from kvbench.tasks.sources import HubFile


def words_as_tokens(text, **options):
    return {"input_ids": re.findall(r"\w+|[^\w\s]", text)}


def generated(subset: str, samples: int = 3) -> list[Sample]:
    return list(Ruler([subset], [2048], samples).samples(words_as_tokens, 0))


def row(sample: Sample, **changed) -> dict:
    """A line as RULER writes it: the index of needles is the place of the answer, so that some are alike."""
    text = sample.prompt + sample.answer_prefix
    return {"index": 7, "input": text, "outputs": list(sample.answers), "length": len(text), **changed}


def folder(tmp_path: Path, subset: str, rows: list, length: int = 4096) -> str:
    file = tmp_path / str(length) / f"{subset}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows) + "\n")
    return str(tmp_path)


def read(data_dir: str, subset: str, samples: int = 3, length: int = 4096) -> list[Sample]:
    return list(Ruler([subset], [length], samples, data_dir=data_dir).samples(None, 0))


@pytest.mark.parametrize("subset", ALL_SUBSETS)
def test_a_line_becomes_the_sample_that_it_was_made_of(tmp_path, subset):
    made = generated(subset)
    found = read(folder(tmp_path, subset, [row(sample) for sample in made]), subset)
    for index, (one, other) in enumerate(zip(made, found, strict=True)):
        meta = {"subset": subset, "length": 4096, "data": f"{subset}.jsonl"}
        name = f"{subset}-4096-{index}"
        assert other == replace(one, id=name, group=f"{subset}/4096", meta=meta)


# Where NVIDIA/kvpress cuts RULER's prompts: at the last match (evaluation/benchmarks/ruler).
CUTS = {
    "niah": r"What (?:is|are all) the special magic",
    "vt": r"Question: Find all variables that are assigned the value",
    "cwe": r"Question: What are the 10 most common words in the above list\?",
    "fwe": r"Question: Do not provide any explanation\.",
    "qa": r"Answer the question based on the given documents\.",
}


@pytest.mark.parametrize("subset", ALL_SUBSETS)
def test_a_question_begins_where_kvpress_cuts(tmp_path, subset):
    made = generated(subset)
    for sample in made + read(folder(tmp_path, subset, [row(sample) for sample in made]), subset):
        *_, last = re.finditer(CUTS[subset.partition("_")[0]], sample.prompt)
        assert sample.prompt[last.start() :] == sample.question


def test_an_answer_prefix_of_its_own_is_taken_as_it_is(tmp_path):
    [sample] = generated("vt", 1)
    line = row(sample, input=sample.prompt, answer_prefix="The variables are:")
    [found] = read(folder(tmp_path, "vt", [line]), "vt", 1)
    assert (found.prompt, found.answer_prefix) == (sample.prompt, " The variables are:")
    assert found.question == sample.question


def test_a_prompt_without_question_or_prefix_stays_whole(tmp_path):
    [found] = read(folder(tmp_path, "qa_1", [{"input": "One.\nTwo.", "outputs": ["x"]}]), "qa_1", 1)
    assert (found.prompt, found.question, found.answer_prefix) == ("One.\nTwo.", "", "")


def test_numbers_as_outputs_are_texts(tmp_path):
    [found] = read(folder(tmp_path, "vt", [{"input": "a", "outputs": [12]}]), "vt", 1)
    assert found.answers == ("12",)


def test_a_bad_line_costs_one_sample(tmp_path):
    first, _, last = generated("vt")
    found = read(folder(tmp_path, "vt", [row(first), "{", row(last)]), "vt")
    assert [bool(sample.error) for sample in found] == [False, True, False]
    assert found[1].error.startswith("vt.jsonl, line 2: not JSON") and found[1].id == "vt-4096-1"
    assert Ruler(["vt"], [4096]).score(found[1], "x")["score"] == 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"answer_prefix": 5}, "field answer_prefix: expected str, not int"),
        ({"answer_prefix": ["x"]}, "field answer_prefix: expected str, not list"),
        ({"outputs": []}, "field outputs: expected one text or number, or more, not blank"),
        ({"outputs": [None]}, "field outputs: expected one text or number, or more, not blank"),
        (
            {"outputs": ["Paris", " "]},
            "field outputs: expected one text or number, or more, not blank",
        ),  # in every answer
    ],
)
def test_a_field_that_is_none_of_ruler_s_costs_its_sample(tmp_path, changed, told):
    good = generated("vt", 1)[0]
    bad, other = read(folder(tmp_path, "vt", [row(good, **changed), row(good)]), "vt", 2)
    assert bad.error == f"vt.jsonl, line 1: {told}" and not other.error


def test_a_folder_s_name_may_be_a_number_and_a_word_of_one_option_is_none_of_another_s(tmp_path):
    [source] = Ruler(["vt"], [4096], data_dir=5).sources
    assert source.file == Path("5/4096/vt.jsonl")
    [words] = Ruler(["cwe"], [4096], words="generated").sources
    [squad] = Ruler(["qa_1"], [4096], squad="wonderwords").sources
    assert (words.key, squad.key) == ("task.words", "task.squad")


def test_a_file_with_too_few_lines_is_refused(tmp_path):
    data = folder(tmp_path, "vt", [row(sample) for sample in generated("vt")])
    with pytest.raises(ValueError, match=r"task\.samples=4: .*vt\.jsonl has 3 lines"):
        read(data, "vt", 4)


@pytest.mark.parametrize("layout", ["4096/data/vt", "4096/vt", "data/vt", "vt"])
def test_what_rulers_scripts_write_is_read_where_they_write_it(tmp_path, layout):
    made = generated("vt", 2)
    file = tmp_path / layout / "validation.jsonl"
    file.parent.mkdir(parents=True)
    lines = [row(one, input=one.prompt, answer_prefix=one.answer_prefix, length=4000) for one in made]
    file.write_text("\n".join(map(json.dumps, lines)))
    for one, other in zip(made, read(str(tmp_path), "vt", 2), strict=True):
        assert (other.prompt, other.question, other.answer_prefix) == (one.prompt, one.question, one.answer_prefix)
        assert other.answers == one.answers and other.meta["data"] == "vt/validation.jsonl"
    if layout.startswith("4096"):
        return
    for length in (2048, 8192):  # no folder says of which length they are
        with pytest.raises(ValueError, match=rf"^task\.data_dir: .*line 1: field length: 4000; .*lengths=\[{length}\]"):
            read(str(tmp_path), "vt", 1, length)
    with pytest.raises(ValueError, match="no such folder"):  # nor of two at once
        Ruler(["vt"], [4096, 8192], 1, data_dir=str(tmp_path)).sources[0].check()


@pytest.mark.parametrize("subset", ["vt", "cwe", "fwe", "qa_1", "niah_single_2", "niah_multiquery"])
def test_prompts_in_a_models_chat_template_are_refused(tmp_path, subset):
    [made] = generated(subset, 1)
    data = folder(tmp_path, subset, [row(made, input=f"<|user|>\n{made.prompt}<|end|>\n<|assistant|>\n")])
    with pytest.raises(ValueError, match=rf"^task\.data_dir: .*{subset}\.jsonl, line 1: .*<\|user\|>.*base$"):
        read(data, subset, 1)


def test_a_missing_file_is_refused_before_anything_is_read(tmp_path):
    task = Ruler(["vt", "cwe"], [4096, 8192], samples=1, data_dir=folder(tmp_path, "vt", []))
    assert task.stored
    first, *others = task.sources
    first.check()
    assert len(others) == 3
    for source in others:
        with pytest.raises(ValueError, match=r"task\.data_dir: .*: no such (file|folder)"):
            source.check()


def test_every_prefix_is_fair_to_subsets_and_lengths(tmp_path):
    for length in (4096, 8192):
        for subset in ("vt", "cwe"):
            data = folder(tmp_path, subset, [row(sample) for sample in generated(subset)], length)
    task = Ruler(["vt", "cwe"], [4096, 8192], 3, data_dir=data)
    groups = [sample.group for sample in task.samples(None, 0)]
    assert groups == ["vt/4096", "cwe/4096", "vt/8192", "cwe/8192"] * 3
    assert len(task) == 12


@pytest.fixture
def hub_table(tmp_path, monkeypatch):
    """The hub's file of 4096 tokens, as if it were in the local cache."""
    made = [sample for subset in ("vt", "niah_single_1") for sample in generated(subset)]
    columns = [
        {
            "context": sample.prompt.removesuffix(sample.question),
            "question": sample.question + " ",
            "answer_prefix": sample.answer_prefix.strip(),
            "answer": list(sample.answers),
            "task": sample.meta["subset"],
            "max_new_tokens": sample.max_new_tokens,
        }
        for sample in made
    ]
    file = tmp_path / "test.parquet"
    pandas.DataFrame(columns).to_parquet(file)
    monkeypatch.setattr(HubFile, "cached", lambda self: file)
    return made


@pytest.mark.parametrize("subset", ["vt", "niah_single_1"])
def test_the_hubs_table_gives_the_rows_of_a_subset(hub_table, subset):
    made = [sample for sample in hub_table if sample.meta["subset"] == subset]
    for one, other in zip(made, read("hub", subset), strict=True):
        assert (other.prompt, other.question, other.answers) == (one.prompt + " ", one.question + " ", one.answers)
        assert other.answer_prefix == one.answer_prefix.strip()
        assert other.max_new_tokens == one.max_new_tokens and other.chat
        assert other.meta["data"] == "simonjegou/ruler/4096/test-00000-of-00001.parquet"


def test_the_hub_has_one_file_for_all_subsets_of_a_length(hub_table):
    task = Ruler(["vt", "niah_single_1"], [4096], 3, data_dir="hub")
    [source] = task.sources
    assert isinstance(source, HubFile) and source.repo == "simonjegou/ruler" and len(list(task.samples(None, 0))) == 6


def test_the_hub_has_three_lengths():
    with pytest.raises(ValueError, match=r"task\.lengths=\[4096, 5000\]: the hub has 4096, 8192, 16384"):
        Ruler(["vt"], [4096, 5000], data_dir="hub")


def test_a_table_of_another_shape_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "test.parquet"
    pandas.DataFrame([{"input": "a", "task": "vt"}]).to_parquet(file)
    monkeypatch.setattr(HubFile, "cached", lambda self: file)
    with pytest.raises(ValueError, match=r"task\.data_dir=hub: simonjegou/ruler/4096"):
        read("hub", "vt")
