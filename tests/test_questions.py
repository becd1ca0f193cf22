"""Claims about what every task says of its question: the end of the prompt that asks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.config import TargetConfig, choices, shipped
from kvbench.tasks import Sample, Task, task_of
from kvbench.tasks.leval import SUBSETS as LEVAL
from kvbench.tasks.longbench import SUBSETS

PROBLEM = {"problem": "What is 5 + 2?", "answer": 7}
CHOICES = {f"choice_{letter}": letter for letter in "ABCD"}
CHECKS = {f"checks_{kind}": {"1": "a hall"} for kind in ("once", "range", "periodic")}
LONGBENCH = {"context": "A text.", "input": "What?", "answers": ["Paragraph 1"], "length": 3, "all_classes": ["a"]}
LONGPROC: dict[str, tuple[str, dict[str, Any]]] = {
    "html_to_tsv": (
        "{html_str} of {task_topic} {task_description}{filtering_instruction} as {tsv_header} {{rows}}",
        dict.fromkeys(("task_topic", "task_description", "filtering_instruction", "tsv_header", "gt"), "a town")
        | {"html_path": "page.html", "gt": "town\na town"},
    ),
    "path_traversal": (
        "{city_context} From {src_city} to {dst_city}",
        {"context_nl": "Towns.", "question_repr": ["A", "B"], "answer_nl": "A to B"},
    ),
    "tom_tracking": (
        "{story}\n{question}",
        {"story_components": "Ann", "story": "Ann is in the hall.", "question": "Where?", "solution": "- Step 0: hall"},
    ),
    "countdown": ("{demonstration} Now {nums} to {target}", {"nums": [9, 16, 6, 18], "target": 12}),
}
STRUCTURE = {"type": "csv", "task": "Join", "depth": 1, "width": 1, "few_shot_num": 0, "rule_hint": False}

# What the files of a task's folder hold.
FILES: dict[str, dict[str, Any]] = {
    "longbench": {f"{name}.jsonl": LONGBENCH for name in SUBSETS},
    "gsm8k": {"test.jsonl": {"question": "How many?", "answer": "#### 7"}},
    "math500": {"test.jsonl": PROBLEM},
    "aime": {"aime25.jsonl": PROBLEM},
    "longbench_v2": {
        "data.json": [
            {"_id": "a", "context": "A text.", "question": "Why?", "answer": "A", "difficulty": "easy"}
            | {"length": "short", **CHOICES}
        ]
    },
    "longgenbench": {
        "Dataset_short.json": [{"prompt": "Write.", "type": "Floor", "prefix": "#*#", "number": 2, **CHECKS}]
    },
    "longgenbench_gsm8k": {
        "gsm8k_30.jsonl": {"prompt": "Examples: ...\n\nFollowing Question: \nQuestion_9:\nWhy?", "answers": ["#### 7"]}
    },
    "leval": {f"{name}.jsonl": {"input": "A.", "instructions": ["Why?"], "outputs": ["A"]} for name in LEVAL},
    "structext": {"evaluate_dataset.jsonl": {"q": "### Question:\nHow?\n\n### Answer:\n", "a": "7", "info": STRUCTURE}},
}
SET: dict[str, dict[str, Any]] = {
    "passkey": {"lengths": [300], "positions": 1},
    "niah": {"lengths": [1200], "samples": 1},
    "ruler": {"lengths": [1200], "samples": 1},
    "fidelity": {"lengths": [30], "steps": 3, "samples": 1},
    "latency": {"lengths": [30], "batch": [1]},
}

# Tasks without a question at the end: outputs that the whole prompt is about, a question before its text, no text.
NONE = {"longgenbench", "structext", "fidelity", "latency"}


class Words:
    """A tokenizer with a token a word."""

    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, **options: Any) -> dict[str, list[str]]:
        return {"input_ids": re.findall(r"\w+|[^\w\s]", text)}

    def __len__(self) -> int:
        return 100


def with_folder(name: str, folder: Path) -> Task:
    """A task by its own file of conf, over a folder with a line for each of its kinds of prompts."""
    for file, row in FILES.get(name, {}).items():
        (folder / file).write_text(json.dumps(row))
    if name == "gpqa":
        (folder / "gpqa_diamond.csv").write_text(
            "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\nWhy?,a,b,c,d\n"
        )
    if name == "longproc":
        for kind, (prompt, row) in LONGPROC.items():
            (folder / kind).mkdir()
            (folder / kind / "prompts.yaml").write_text(json.dumps({"USER_PROMPT": prompt}))
            (folder / kind / f"{kind}_0.5k.json").write_text(json.dumps([row]))
        (folder / "html_to_tsv" / "page.html").write_text("<p>A page.</p>")
        SET[name] = {"subsets": [f"{kind}_0.5k" for kind in LONGPROC]}
    harness = ("name", "about", "limit", "valid")
    given = {key: value for key, value in (shipped("task", name) or {}).items() if key not in harness}
    own = {"data_dir": str(folder)} if "data_dir" in given and name != "ruler" else {}
    return task_of(TargetConfig.of(given | own | SET.get(name, {})))


def samples_of(name: str, folder: Path) -> Iterator[Sample]:
    for sample in with_folder(name, folder).samples(Words(), 0):
        assert not sample.error
        yield sample


@pytest.mark.parametrize("name", choices("task"))
def test_a_prompt_ends_with_its_question(name: str, tmp_path: Path) -> None:
    found = list(samples_of(name, tmp_path))
    assert found and all(sample.prompt.endswith(sample.question) for sample in found)
    assert {bool(sample.question) for sample in found} == {name not in NONE}


def test_a_question_of_longproc_is_what_follows_its_text(tmp_path: Path) -> None:
    questions = [(sample.group, sample.question) for sample in samples_of("longproc", tmp_path)]
    assert questions == [
        ("html_to_tsv_0.5k", " of a town a towna town as a town {rows}"),
        ("path_traversal_0.5k", " From A to B"),
        ("tom_tracking_0.5k", "\nWhere?"),
        ("countdown_0.5k", " Now [9, 16, 6, 18] to 12"),
    ]
