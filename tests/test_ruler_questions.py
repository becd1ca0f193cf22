"""Claims about several questions of RULER's about one context."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvbench.tasks import Sample
from kvbench.tasks.ruler.task import ALL_SUBSETS, SUBSETS, Ruler

ASKED = [name for name in ALL_SUBSETS if name not in ("cwe", "fwe")]
each_subset = pytest.mark.parametrize("subset", ASKED)


def words_as_tokens(text: str, **options: Any) -> dict[str, list[str]]:
    return {"input_ids": re.findall(r"\w+|[^\w\s]", text)}


def made(subset: str, questions: int = 3, samples: int = 2, length: int = 2048, **options: Any) -> list[Sample]:
    task = Ruler([subset], [length], samples, questions=questions, **options)
    found = list(task.samples(words_as_tokens, 0))
    assert len(found) == len(task) == samples * questions
    return found


def context(sample: Sample) -> str:
    assert sample.prompt.endswith(sample.question)
    return sample.prompt.removesuffix(sample.question)


@each_subset
def test_the_questions_of_a_context_follow_each_other(subset: str) -> None:
    found = made(subset)
    together = [(text, list(samples)) for text, samples in groupby(found, context)]
    assert [len(samples) for _, samples in together] == [3, 3] and len({text for text, _ in together}) == 2
    for index, (_, samples) in enumerate(together):
        assert [sample.id for sample in samples] == [f"{subset}-2048-{index}-q{number}" for number in (1, 2, 3)]
        assert len({(sample.question, sample.answers) for sample in samples}) == 3


@each_subset
@pytest.mark.parametrize("fit", ["official", "tight"])
def test_each_question_fits_its_length(subset: str, fit: str) -> None:
    for sample in made(subset, fit=fit):
        read = len(words_as_tokens(sample.prompt + sample.answer_prefix)["input_ids"])
        assert read + sample.max_new_tokens <= 2048


@pytest.mark.parametrize("subset", SUBSETS)
def test_a_context_hides_the_needles_of_all_its_questions(subset: str) -> None:
    for sample in made(subset):
        hidden: dict[str, list[str]] = {}
        for key, value in re.findall(r"magic \w+ for (\S+) is: ([\w-]+)\.", context(sample)):
            hidden.setdefault(key, []).append(value)
        keys = re.search(r"magic \w+ for (.+) mentioned", sample.question)[1].replace(", and ", ", ").split(", ")
        assert sorted(sample.answers) == sorted(value for key in keys for value in hidden[key])


def test_a_chain_for_each_question_leads_to_its_value() -> None:
    for sample in made("vt"):
        task = context(sample).rpartition("Memorize and track")[2]
        holds = {}
        for name, value in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", task, re.MULTILINE):
            holds[name] = holds.get(value, value)
        assert len(holds) == 15
        asked = re.search(r"the value (\d+) in", sample.question)[1]
        assert set(sample.answers) == {name for name, value in holds.items() if value == asked}


def file_of(folder: Path, subset: str) -> dict[str, str]:
    """SQuAD's or HotpotQA's file of questions that a document each, or two, answer."""
    file = folder / "file.json"
    if subset == "qa_1":
        entry = {"id": "a", "question": "What says {}?"}
        paragraphs = [
            {
                "context": f"Paragraph {n} says x{n}x.",
                "qas": [entry | {"question": f"What says {n}?", "answers": [{"text": f"x{n}x"}]}],
            }
            for n in range(6)
        ]
        file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}, {"paragraphs": paragraphs}]}))
        return {"squad": str(file)}
    rows = [
        {
            "question": f"What says {n}?",
            "answer": f"x{n}x",
            "supporting_facts": [[f"A{n}", 0], [f"B{n}", 0]],
            "context": [
                [f"A{n}", [f"Of B{n}."]],
                [f"B{n}", [f"Says x{n}x."]],
                *([f"C{n}{i}", ["No."]] for i in range(4)),
            ],
        }
        for n in range(6)
    ]
    file.write_text(json.dumps(rows))
    return {"hotpotqa": str(file)}


@pytest.mark.parametrize("subset", ["qa_1", "qa_2"])
@pytest.mark.parametrize("from_file", [True, False])
def test_the_documents_answer_all_their_questions(subset: str, from_file: bool, tmp_path: Path) -> None:
    for sample in made(subset, length=700, **(file_of(tmp_path, subset) if from_file else {})):
        [answer] = sample.answers[:1]
        documents = re.split(r"\n\nDocument \d+:\n", context(sample))
        assert any(answer in document for document in documents)
        assert len(sample.meta["depths"]) == int(subset[-1])
        asked = re.search(r"What says (\d)\?", sample.question)
        assert not from_file or (asked and answer == f"x{asked[1]}x")


def test_questions_of_a_file_are_taken_once(tmp_path: Path) -> None:
    file = file_of(tmp_path, "qa_2")
    asked = [sample.question for sample in made("qa_2", length=700, **file)]
    assert len(set(asked)) == 6
    with pytest.raises(ValueError, match=r"task\.samples=3, task\.questions=3: file\.json has 6"):
        made("qa_2", samples=3, length=700, **file)


@pytest.mark.parametrize(
    ("subset", "questions", "options", "says"),
    [
        ("cwe", 2, {}, "cwe"),
        ("fwe", 2, {}, "fwe"),
        ("niah_multiquery", 11, {}, "room for 10"),
        ("niah_single_2", 41, {}, "room for 40"),
        ("vt", 0, {}, "1 or more"),
        ("vt", 2.0, {}, "1 or more"),
        ("vt", 2, {"data_dir": "folder"}, "task.data_dir=folder"),
    ],
)
def test_what_has_one_question_is_refused(subset: str, questions: Any, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^task\.questions={questions}: .*{says}"):
        Ruler([subset], [2048], questions=questions, **options)


def test_one_question_has_the_prompts_that_there_were_before_several_could_be_asked() -> None:
    found = [
        (sample.id, sample.prompt, sample.answer_prefix, sample.answers)
        for sample in Ruler(ALL_SUBSETS, [1200], 1).samples(words_as_tokens, 0)
    ]
    assert hashlib.sha256(repr(found).encode()).hexdigest()[:16] == "c52c214770c9b1b1"
