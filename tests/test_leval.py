"""Claims about L-Eval: its questions follow each other, its cuts and readings of a reply are the official ones."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.tasks import Sample
from kvbench.tasks.leval import SUBSETS, LEval, judgement, letter, letters, number

ANSWERS = {"sci_fi": "True [fact: False]", "topic_retrieval_longchat": "The art of tea", "gsm100": "18"}


def line(document: str, questions: int, answer: str, **changed: Any) -> str:
    asked = [f"Why {number} of {{document}}?" for number in range(questions)]
    return json.dumps({"input": document, "instructions": asked, "outputs": [answer] * questions, **changed}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents with three questions, and gsm100's one document on two lines."""
    for name in SUBSETS:
        texts = ["Same.", "Same."] if name == "gsm100" else [f"{name} one {{x}}.", f"{name} two."]
        (tmp_path / f"{name}.jsonl").write_text("".join(line(text, 3, ANSWERS.get(name, "(B) b")) for text in texts))
    return tmp_path


def made(folder: Path, *subsets: str, **options: Any) -> list[Sample]:
    task = LEval(subsets or tuple(SUBSETS), str(folder), **options)
    found = list(task.samples(options.pop("tokenizer", None), 0))
    assert len(found) == len(task)
    return found


def context(sample: Sample) -> str:
    assert sample.prompt.endswith(sample.question)
    return sample.prompt.removesuffix(sample.question)


def test_the_questions_of_a_document_follow_each_other(folder: Path) -> None:
    found = made(folder)
    runs = [(samples[0].group, len(samples)) for _, own in groupby(found, context) if (samples := list(own))]
    first, second = runs[:6], runs[6:]
    assert [name for name, _ in first] == list(SUBSETS) and {count for name, count in first if name != "gsm100"} == {3}
    assert ("gsm100", 6) in first and [name for name, _ in second] == [name for name in SUBSETS if name != "gsm100"]
    assert len({sample.id for sample in found}) == len(found) == 36


def test_a_prompt_is_the_official_one(folder: Path) -> None:
    (exam,) = [one for one in made(folder, "quality") if one.id == "quality-0-2"]
    system, _, text = exam.prompt.partition("\n\n")
    assert system.startswith("Now you are given") and system.endswith("concise and accurate answer. ")
    assert text == (
        "Document is as follows. quality one {x}. \nQuestion: Why 1 of {document}?.  Please directly give the answer "
        "without any additional output or explanation "
    )
    assert (exam.answer_prefix, exam.chat, exam.max_new_tokens, exam.answers) == ("\nAnswer:", True, 512, ("(B) b",))
    (problem,) = [one for one in made(folder, "gsm100") if one.id == "gsm100-0-2"]
    assert problem.prompt.endswith(" _ . \n\nSame.\n\nWhy 1 of {document}?")
    assert (problem.answer_prefix, problem.chat) == ("", False)


def test_files_may_lie_in_the_repository_s_folder(folder: Path) -> None:
    nested = folder / "Closed-ended-tasks"
    nested.mkdir()
    (folder / "tpo.jsonl").rename(nested / "tpo.jsonl")
    assert len(made(folder, "tpo")) == 6


def official_cut(document: str, most: int) -> str:
    """Word for word what the official loop does, with a token a letter."""
    cut = 0
    while len(document) > most:
        document = " ".join(document.split(" ")[: most - cut])
        cut += 250
    return document


def test_a_document_too_long_loses_its_end_as_officially(tmp_path: Path) -> None:
    text = " ".join(f"word{place}" for place in range(900))
    (tmp_path / "tpo.jsonl").write_text(line(text, 1, "A"))
    task = LEval(["tpo"], str(tmp_path), max_length=2600)
    (sample,) = task.samples(lambda words, **options: {"input_ids": words}, 0)
    kept = official_cut(text, 2600)
    assert 0 < len(kept) < len(text) and context(sample).endswith(f"follows. {kept}")


@pytest.mark.parametrize(
    ("reply", "said"),
    [("(C) Tr'en", "C"), ("The answer is C.", "C"), ("BA", "B"), ("none of them", "A"), ("", "None"), ("BC", "BC")]
    + [("Answer: B", "A"), ("D", "D")],
)
def test_a_letter_is_read_as_officially(reply: str, said: str) -> None:
    assert letter(reply) == said


@pytest.mark.parametrize(
    ("reply", "said"),
    [("BA", "AB"), ("The correct answers are A, C.", "C"), ("BD", "BD"), ("A C D.", "ACD"), ("B, A.", "AB")]
    + [("none", "A"), ("xDBx", "DB"), (" ", "None"), ("No idea. Question 2. A.", "A")],
)
def test_several_letters_are_read_as_officially(reply: str, said: str) -> None:
    assert letters(reply) == said


def test_numbers_and_judgements_are_read_as_officially() -> None:
    assert number("So.\n\nThe answer is $1,234.50 then") == "1234" and number("It has 3 or -4.5 parts\n\n6") == "4"
    assert (number("none"), judgement("Untrue, I think"), judgement("It says so")) == ("", "true", "")


SCORES = [
    ("quality", "(B) b", "B", 1, 1),
    ("quality", "(B) b", "Answer: B", 0, 1),
    ("quality", "(B) b", "The Best is B.", 1, 1),
    ("quality", "(B) b", "CB", 0, 0),
    ("coursera", "BD", "DB", 1, 1),
    ("coursera", "BD", "D", 0.25, 0),
    ("coursera", "BD", "ABD", 0, 0),
    ("sci_fi", "True [fact: False]", "True.", 1, 1),
    ("sci_fi", "True [fact: False]", "That is untrue.", 1, 0),
    ("sci_fi", "False [fact: True]", "It is not there", 0, 0),
    ("gsm100", "18", "So 9 * 2. The answer is 18.", 1, 1),
    ("gsm100", "18", "They are 18", 1, 0),
    ("gsm100", "18", "The answer is -18", 1, 0),
    ("gsm100", "18", "None", 0, 0),
]


@pytest.mark.parametrize(("subset", "answer", "reply", "official", "strict"), SCORES)
def test_the_official_score_has_a_strict_one_beside_it(
    subset: str, answer: str, reply: str, official: float, strict: float
) -> None:
    sample = Sample("x", "", (answer,), 1, group=subset)
    assert LEval([subset], "nowhere").score(sample, reply) == {"score": official, "strict": strict}


def test_a_topic_counts_where_the_reply_has_it() -> None:
    sample = Sample("x", "", ("The art of tea",), 1, group="topic_retrieval_longchat")
    task = LEval(["topic_retrieval_longchat"], "nowhere")
    assert task.score(sample, "It was: the  Art of TEA!") == {"score": 1} and task.score(sample, "tea") == {"score": 0}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"outputs": ["A"]}, "outputs: 1, of 2"),
        ({"instructions": [], "outputs": []}, "one or more"),
        ({"outputs": ["A", " "]}, "one or more"),
        ({"input": 5}, "field input"),
    ],
)
def test_a_bad_line_costs_its_own_sample(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "tpo.jsonl").write_text(line("a", 2, "A", **changed) + line("b", 2, "A"))
    found = made(tmp_path, "tpo")
    (bad,) = [sample for sample in found if sample.error]
    assert len(found) == 3 and bad.error.startswith("tpo.jsonl, line 1: ") and says in bad.error


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("task.data_dir=null", r"task\.data_dir=null: .*LEval"),
        ("task.subsets=[tpa]", r"task\.subsets: no subset tpa"),
        ("task.max_length=0", r"task\.max_length=0"),
        ("task.max_new_tokens=0", r"task\.max_new_tokens=0"),
        ("task.subsets=[tpo]", r"task\.data_dir: .*tpo\.jsonl"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(word: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        check(composed("task=leval", f"task.data_dir={tmp_path}", word))
