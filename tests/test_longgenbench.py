"""Claims about the two LongGenBenches: what counts as a part, what a judge is asked, and problems in their places."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.cli.judge import main as judge
from kvbench.config import ConfigError
from kvbench.runs.summary import summarise
from kvbench.runs.sweep import run
from kvbench.tasks import Sample, longgenbench
from kvbench.tasks.longgenbench import LongGenBench, ManyProblems

DATA = Path(__file__).parents[2] / "shared" / "data"

ROW = {
    "prompt": "Describe 4 floors. *** started ***\n#*# Floor 1:",
    "checks_once": {"2": "a library"},
    "checks_range": {"3": "a gym", "4": "a gym"},
    "checks_periodic": {},
    "type": "Floor",
    "prefix": "#*# Floor 1:",
    "number": 4,
}
PROBLEMS = {
    "prompt": "Examples: \n...",
    "questions": ["one", "two", "three"],
    "answers": ["so\n#### 18", "#### 1,200", "#### -3"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Dataset_short.json").write_text(json.dumps([ROW, ROW | {"type": "Block", "prefix": "#*# Block 1:"}]))
    (tmp_path / "gsm8k_30.jsonl").write_text(json.dumps(PROBLEMS) + "\n")
    return tmp_path


def floors(folder: Path) -> tuple[LongGenBench, Sample]:
    task = LongGenBench(data_dir=str(folder))
    return task, next(one for one in task.samples(None, 0) if one.group == "Floor")


@pytest.mark.parametrize(
    ("output", "share"),
    [
        (" hall.\n#*# Floor 2: books #*# Floor 3: a gym\n#*# Floor 4: a roof *** finished", 1.0),
        (" hall. #*# Floor 4: a roof *** finished #*# Floor 2: too late", 0.5),
        (" hall. #*# Floor 7: above the roof", 0.25),
        (" hall. Floor 2 is above. #*# Floor 1: once more #*# next, see Floor 3", 0.5),  # the first number of a block
        ("", 0.25),  # the first part's beginning was given
    ],
)
def test_parts_count_whose_number_is_asked_for(folder: Path, output: str, share: float) -> None:
    task, sample = floors(folder)
    assert task.score(sample, output) == {"completion": share}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"number": 0}, "field number: expected at least 1"),
        ({"checks_once": {"two": "a"}}, "expected numbers of parts"),
    ],
)
def test_a_bad_row_costs_one_sample(changed: dict[str, Any], told: str, folder: Path) -> None:
    (folder / "Dataset_short.json").write_text(json.dumps([ROW | changed, ROW | {"type": "Floor (a"}]))
    task = LongGenBench(data_dir=str(folder))
    bad, good = sorted(task.samples(None, 0), key=lambda one: one.id)
    assert told in bad.error and not good.error
    assert task.score(good, " hall. #*# Floor (a 2: books") == {"completion": 0.25}


def test_a_judge_is_asked_of_each_part_that_is_there(folder: Path) -> None:
    task, sample = floors(folder)
    asked = task.questions(sample, " hall. #*# Floor 2: books #*# Floor 4: bars")
    assert asked == {
        "once/2": "Context:  Floor 2: books ### Instruction: Does this context include the a library? "
        "Please answer with 'yes' or 'no' only.",
        "range/3": "",
        "range/4": "Context:  Floor 4: bars### Instruction: Does this context include the a gym? "
        "Please answer with 'yes' or 'no' only.",
    }


def test_a_prompt_is_raw_and_ends_at_the_mark(folder: Path) -> None:
    _, sample = floors(folder)
    assert (sample.prompt, sample.chat, sample.stop) == (ROW["prompt"], False, ("*** finished",))
    assert sample.max_new_tokens == 16000


@pytest.mark.skipif(not (DATA / "longgenbench").is_dir(), reason="needs the sample data folder")
@pytest.mark.parametrize("size", ["short", "long"])
def test_the_real_prompts_ask_for_parts_whose_whole_list_has_everything(size: Any) -> None:
    task = LongGenBench(size, data_dir=str(DATA / "longgenbench"))
    found = list(task.samples(None, 0))
    assert len(found) == 400 and all(one.prompt.endswith(one.meta["prefix"]) for one in found)
    for sample in found:
        kind, number = sample.meta["type"], sample.meta["number"]
        assert task.score(sample, "".join(f" x #*# {kind} {part}:" for part in range(2, number + 1)))["completion"] == 1


# -- many problems in one prompt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "share"),
    [
        ("Answer_9: so\nThe answer is 18.\n\nAnswer_10: The answer is 1.", 2 / 3),  # a comma ends a number
        ("Answer_9: I skip it.\nAnswer_10: The answer is 18.", 1 / 3),  # its place goes to the next
        ("Answer_9: The answer is $18.", 0),
        ("The answer is 18.", 0),
        ("Answer_9: The answer is 18. Answer_10: The answer is 1. Answer_11: The answer is -3.", 2 / 3),
    ],
)
def test_a_number_counts_in_its_place(folder: Path, output: str, share: float) -> None:
    task = ManyProblems(data_dir=str(folder))
    (sample,) = task.samples(None, 0)
    assert task.score(sample, output)["accuracy"] == pytest.approx(share)


def test_the_task_stands_before_the_problems_as_scope_writes_it(folder: Path) -> None:
    marked, plain = (
        next(ManyProblems(30, kind, data_dir=str(folder)).samples(None, 0)) for kind in ("llama3", "plain")
    )
    assert plain.prompt == plain.prompt.partition("\n\n")[0] + "\n\n" + PROBLEMS["prompt"]
    task = plain.prompt.partition("\n\n")[0]
    assert marked.prompt == f"<<SYS>>\n {task} \n<</SYS>>\n\n{PROBLEMS['prompt']}"
    assert hashlib.sha256(task.encode()).hexdigest().startswith("032559098aad5492")  # of SCOPE's own text


# -- runs and bad input ------------------------------------------------------------------------------------------------


def test_a_judge_s_replies_are_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight checks two are of the first part, which is there whatever the model wrote."""
    (folder / "Dataset_short.json").write_text(json.dumps([ROW | {"checks_once": {"1": "a hall", "4": "a roof"}}] * 2))
    words = ["task=longgenbench", f"task.data_dir={folder}", "task.max_new_tokens=1", "method=full", "budget=null"]
    run(composed(*words, f"results_dir={tmp_path / 'results'}"))
    asked, replied = tmp_path / "asked.jsonl", tmp_path / "replied.jsonl"
    (one,) = tmp_path.glob("results/runs/**/samples.jsonl")
    assert judge([str(one.parent), "--questions", str(asked)]) == 0
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["once/1", "once/1"]

    def read(replies: list[str]) -> int:
        both = zip(lines, replies, strict=False)
        replied.write_text("".join(json.dumps({**line, "reply": reply}) + "\n" for line, reply in both))
        capsys.readouterr()
        return judge([str(one.parent), "--replies", str(replied)])

    assert read([" Yes.", "no"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((one.parent / "judged.json").read_text())
    assert (found["once"], found["range"], found["stic_1"], found["stic_2"]) == (0.5, 0, 0.5, 1 / 8)
    assert (found["judged"], found["checks"]) == (2, 8)
    assert read(["yes"]) == 2 and "no reply to longgenbench-" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["longgenbench", "longgenbench_gsm8k"])
def test_a_run_ends_in_a_score(task: str, folder: Path, tmp_path: Path) -> None:
    words = [f"task={task}", f"task.data_dir={folder}", "task.max_new_tokens=4", "method=snapkv", "budget=64"]
    summary = run(composed(*words, f"results_dir={tmp_path / 'results'}"))
    assert summary["failed"] == 0 and summary["score"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=longgenbench"], r"task\.data_dir=null: needs the folder of Dataset_short\.json, Dataset of the repos"),
        (["task=longgenbench_gsm8k", "task.problems=45"], r"task\.problems=45: one of 30, 60"),
    ],
)
def test_what_is_not_there_is_said_before_a_model_loads(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(composed(*words, "task.max_new_tokens=4"))


@given(
    st.lists(st.sampled_from(["Answer_1:", "Answer_:", "Answer_23:", "answer is ", "7", "81", " ", "x\n"]), max_size=12)
)
def test_answers_are_those_of_the_official_pattern(parts):
    output = "".join(parts)
    official = re.compile(r"Answer_\d+:\s*.*?answer is (\d+)", re.DOTALL)
    assert longgenbench.answers_in(output) == official.findall(output)


def test_an_output_full_of_beginnings_is_read_once():
    assert longgenbench.answers_in("Answer_1:" * 10**5 + " " * 10**6) == []


def test_a_bad_line_counts_in_its_own_scenario_and_one_without_any_in_none(folder: Path, tmp_path: Path) -> None:
    bad = [ROW | {"number": 0}, "no prompt"]
    (folder / "Dataset_short.json").write_text(json.dumps([ROW, ROW | {"type": "Block"}, *bad]))
    found = list(LongGenBench(data_dir=str(folder)).samples(None, 0))
    assert sorted((one.group, bool(one.error)) for one in found) == [
        ("", True), ("Block", False), ("Floor", False), ("Floor", True)
    ]  # fmt: skip
    records = [
        {"id": one.id, "group": one.group, "scores": {"completion": 1.0}, "error": one.error or None} for one in found
    ]
    summary = summarise(records, "completion")
    assert summary["macro"]["score"] == pytest.approx((50 + 100) / 2) and summary["failed"] == 2


def test_a_number_without_end_is_no_part(folder: Path) -> None:
    task, sample = floors(folder)
    assert task.score(sample, " hall. #*# Floor " + "7" * 5000) == {"completion": 0.25}
