"""StrucText-Eval: which prompts are asked, and what their answers score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.tasks.structext import StrucText

ANSWER = '{ "id":"n", "Q":"zy", "subs":[] }'


def line(answer: str = ANSWER, **info: Any) -> str:
    usual = {"type": "json", "task": "TextRetrieval", "depth": 2, "width": 1, "few_shot_num": 0, "rule_hint": False}
    return json.dumps({"q": f"### Question: {info}\n### Answer:\n", "a": answer, "info": usual | info}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    other = [line(rule_hint=True), line(few_shot_num=3), line(few_shot_num=3, type="csv", answer="2")]
    text = "".join(
        [line(), line(type="csv", answer="0"), *other, '{"q": "no answer"}\n', line().replace("depth", "deep")]
    )
    (tmp_path / "evaluate_dataset.jsonl").write_text(text)
    return str(tmp_path)


def test_prompts_with_so_many_examples_and_the_hint_or_not_are_asked(folder: str) -> None:
    def asked(shots: int, hint: bool) -> list[tuple[str, str]]:
        task = StrucText(shots, hint, data_dir=folder)
        found = list(task.samples(None, 0))
        assert len(task) == len(found) and all(sample.error or sample.chat for sample in found)
        return sorted((sample.id.removeprefix("structext-"), sample.group) for sample in found)

    bad = [("5", ""), ("6", "json")]  # a line that is bad says its language, where it can
    assert asked(0, False) == [("0", "json"), ("1", "csv"), *bad]
    assert asked(0, True) == [("2", "json"), *bad]
    assert asked(3, False) == [("3", "json"), ("4", "csv"), *bad]
    errors = {sample.id: sample.error for sample in StrucText(data_dir=folder).samples(None, 0) if sample.error}
    assert (
        "line 6: field a: missing" in errors["structext-5"] and "line 7: field info: no depth" in errors["structext-6"]
    )


@pytest.mark.parametrize(
    ("output", "score", "exact"),
    [
        (f" {ANSWER}\n", 1, 1),
        ('{ "id":"n", "Q":"zy", }', 2 * 4 / 9, 0),  # four of five words
        ('{ "id":"n", }', 0, 0),  # three of five: 6 / 8, which is not yet .75 as the script computes it
        ("", 0, 0),
    ],
)
def test_an_answer_scores_its_rouge_l_and_nothing_below_three_quarters(
    folder: str, output: str, score: float, exact: float
) -> None:
    task = StrucText(data_dir=folder)
    sample = next(one for one in task.samples(None, 0) if one.id == "structext-0")
    assert task.score(sample, output) == {"score": pytest.approx(score, abs=1e-6), "exact": exact}


def test_bad_settings_are_refused_in_a_line(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^structext: task\.data_dir=null: "):
        check(composed("task=structext"))
    with pytest.raises(ValueError, match=r"^task\.shots=7: .*task\.hint=False$"):
        alone = Path(folder) / "evaluate_dataset.jsonl"
        alone.write_text(line())
        list(StrucText(7, data_dir=folder).samples(None, 0))
