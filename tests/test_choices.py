"""Claims about questions with four choices, GPQA-diamond and LongBench v2: official prompts, answers and counts."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.runs.summary import summarise
from kvbench.runs.sweep import run
from kvbench.tasks import Sample
from kvbench.tasks.gpqa import Gpqa
from kvbench.tasks.longbench_v2 import LongBenchV2
from kvbench.tasks.sources import HubFile

PROMPTS = Path(__file__).parents[2] / "shared" / "data" / "longbench_v2" / "prompts"


def asked(number: int, **fields: Any) -> dict[str, Any]:
    """A question of LongBench v2's."""
    return {
        "_id": str(number),
        "domain": "d",
        "sub_domain": "s",
        "difficulty": "hard" if number % 2 else "easy",
        "length": ("short", "medium", "long")[number % 3],
        "question": f" Which is {number}? ",
        "choice_A": "one",
        "choice_B": " two\n",
        "choice_C": "three",
        "choice_D": "four",
        "answer": "ABCD"[number % 4],
        "context": f"\nA text of {number}. ",
    } | fields


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.json").write_text(json.dumps([asked(number) for number in range(6)]))
    rows = [
        {"Question": f"What is {n} {{?}}", "Correct Answer": f"right {n}"}
        | {f"Incorrect Answer {k}": f"wrong {n} {k}" for k in (1, 2, 3)}
        for n in range(9)
    ]
    with (tmp_path / "gpqa_diamond.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


# -- LongBench v2 ------------------------------------------------------------------------------------------------------


def v2(output: str, gold: str = "B") -> dict[str, float]:
    return LongBenchV2().score(Sample("x", "", (gold,), 1, meta={"difficulty": "hard", "length": "long"}), output)


def test_a_long_question_is_the_official_prompt_whose_places_are_filled_one_after_the_other(tmp_path: Path) -> None:
    row = asked(1, context=" about $Q$ and $DOC$\n", question="why $C_A$?", choice_B="$C_D$ too")
    (tmp_path / "data.json").write_text(json.dumps([row]))
    (sample,) = LongBenchV2(data_dir=str(tmp_path)).samples(None, 0)
    assert sample.prompt == (
        "Please read the following text and answer the question below.\n\n<text>\nabout why one? and $DOC$\n</text>\n\n"
        "What is the correct answer to this question: why one?\n"
        "Choices:\n(A) one\n(B) four too\n(C) three\n(D) four\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    assert sample.prompt.endswith(sample.question) and sample.question.startswith("What is the correct answer")
    assert (sample.chat, sample.truncate, sample.max_length, sample.max_new_tokens) == (True, True, 120_000, 128)


@pytest.mark.skipif(not PROMPTS.is_dir(), reason="needs the sample data folder")
def test_the_template_is_the_official_file(tmp_path: Path) -> None:
    places = {"context": "$DOC$", "question": "$Q$"} | {f"choice_{letter}": f"$C_{letter}$" for letter in "ABCD"}
    (tmp_path / "data.json").write_text(json.dumps([asked(1, **places)]))
    (sample,) = LongBenchV2(data_dir=str(tmp_path)).samples(None, 0)
    assert sample.prompt == (PROMPTS / "0shot.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("The correct answer is (B) two", 1),
        ("**The correct answer is (B)**", 1),
        ("The correct answer is B.", 1),
        ("The correct answer is A. No: The correct answer is (B)", 1),  # brackets come first
        ("The correct answer is (C), not (B)", 0),
        ("the correct answer is (B)", 0),
        ("B", 0),
    ],
)
def test_a_letter_counts_after_the_official_words_alone(output: str, score: float) -> None:
    assert v2(output) == {"accuracy": score, "hard": score, "long": score}


def test_a_run_reports_all_questions_and_those_of_a_kind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.tasks.longbench_v2.NEW_TOKENS", 4)
    words = ["model=dummy-tiny", "task=longbench_v2", f"task.data_dir={folder}", "task.max_length=200"]
    summary = run(composed(*words, "method=snapkv", "budget=64", f"results_dir={tmp_path / 'results'}"))
    assert (summary["n"], summary["failed"]) == (6, 0)
    assert set(summary["scores"]) == {"accuracy", "easy", "hard", "short", "medium", "long"}


def test_a_question_that_failed_counts_among_its_own_kinds_alone() -> None:
    def line(difficulty: str, length: str, **more: Any) -> dict[str, Any]:
        scores = {} if more else {"scores": {"accuracy": 1.0, difficulty: 1.0, length: 1.0}}
        return {"id": length, "group": "", "meta": {"difficulty": difficulty, "length": length}, **scores, **more}

    lines = [line("easy", "short"), line("hard", "long"), {**line("hard", "long", error="out of memory"), "id": "lost"}]
    scores = summarise(lines, "accuracy")["scores"]
    assert scores == {"accuracy": pytest.approx(200 / 3), "easy": 100, "short": 100, "hard": 50, "long": 50}


def test_a_question_of_an_unknown_kind_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([asked(0), asked(1, length="huge"), {"_id": "2"}]))
    found = list(LongBenchV2(data_dir=str(tmp_path)).samples(None, 0))
    assert sorted(one.error for one in found) == [
        "",
        "data.json, line 2: field length: expected one of short, medium, long",
        "data.json, line 3: field context: missing",
    ]


def test_a_question_without_a_letter_to_be_right_or_with_another_s_id_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([asked(0), asked(1, answer="(B)"), asked(0)]))
    found = {one.id: one.error for one in LongBenchV2(data_dir=str(tmp_path)).samples(None, 0)}
    good = [id for id, error in found.items() if not error]
    assert len(found) == 3 and len(good) == 1
    assert any("field answer: " in error for error in found.values())
    assert any("field _id: 0 " in error for error in found.values())


# -- GPQA --------------------------------------------------------------------------------------------------------------


def test_choices_stand_as_simple_evals_shuffles_them(folder: Path) -> None:
    found = {one.id: one for one in Gpqa(data_dir=str(folder)).samples(None, seed=5)}
    generator = random.Random(0)
    for number in range(9):
        texts = [f"right {number}", *(f"wrong {number} {k}" for k in (1, 2, 3))]
        shown = [texts[choice] for choice in generator.sample(range(4), 4)]
        listed = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", shown, strict=True))
        sample = found[f"gpqa-{number}"]
        assert sample.prompt.endswith(f"answering.\n\nWhat is {number} {{?}}\n\n{listed}")
        assert sample.answers == ("ABCD"[shown.index(texts[0])],)
        assert not sample.meta  # nothing of the text is stored


def test_the_words_around_a_question_are_simple_evals(folder: Path) -> None:
    (sample, *_) = Gpqa(data_dir=str(folder)).samples(None, 0)
    before = sample.prompt.removesuffix(sample.question)
    # Of its QUERY_TEMPLATE_MULTICHOICE up to the question.
    assert hashlib.sha256(before.encode()).hexdigest().startswith("cdee602f1b59ab8d")


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("so\nAnswer: B", 1),
        ("ANSWER : $B$", 1),
        ("Answer: A\nAnswer: B", 0),  # the first counts
        ("answer: b", 0),
        ("(B)", 0),
    ],
)
def test_the_first_letter_after_answer_counts(output: str, score: float) -> None:
    assert Gpqa().score(Sample("x", "", ("B",), 1), output) == {"accuracy": score}


def test_gated_data_without_a_token_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubFile, "cached", lambda file: None)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"task\.data_dir: Idavidrein/gpqa/gpqa_diamond.csv is gated and there is no"):
        check(composed("task=gpqa", "task.max_new_tokens=8"))


def test_a_run_stores_no_text_of_a_gated_question(folder: Path, tmp_path: Path) -> None:
    words = ["task=gpqa", f"task.data_dir={folder}", "task.max_new_tokens=2", "task.limit=2", "method=full"]
    summary = run(composed(*words, "budget=null", f"results_dir={tmp_path / 'results'}"))
    assert (summary["n"], summary["failed"]) == (2, 0)
    stored = "".join(path.read_text() for path in tmp_path.glob("results/runs/**/*") if path.is_file())
    assert "wrong " not in stored and "right " not in stored
