"""Claims about MATH500 and AIME: the published prompts, and that gold answers, and no others, are right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.runs.sweep import run
from kvbench.tasks import Sample
from kvbench.tasks.maths import Aime, Math500

DATA = Path(__file__).parents[2] / "shared" / "data"
with_data = pytest.mark.skipif(not (DATA / "math500").is_dir(), reason="needs the sample data folder")

PROBLEMS = [
    {"problem": f"What is {n} + $\\frac{{1}}{{2}}$?", "answer": f"\\frac{{{2 * n + 1}}}{{2}}"} for n in range(4)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in PROBLEMS))
    (tmp_path / "aime25.jsonl").write_text(json.dumps({"problem": "What is 5 + 2?", "answer": 7}) + "\n")
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"problem": "What is 5 + 20?", "answer": "025"}) + "\n")
    return tmp_path


def right(gold: str, output: str) -> float:
    return Math500().score(Sample("x", "", (gold,), 1), output)["accuracy"]


@pytest.mark.parametrize(
    ("gold", "output", "score"),
    [
        (r"\frac{3}{2}", r"first \boxed{2}. No. It is \boxed{\dfrac32}.", 1),  # the last box counts
        (r"\frac{3}{2}", r"first \boxed{\frac{3}{2}}. No. It is \boxed{2}.", 0),
        ("1,2", r"so \boxed{1} or \boxed{2}", 1),  # boxes that belong together are one answer
        (r"\frac{3}{2}", r"\boxed{1.5}", 1),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", 1),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(\pi/2, 3)}", 0),
        ("025", r"\boxed{25}", 1),
        ("025", r"\boxed{52}", 0),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
        ("204", "\\boxed{204}, for $x_{1} = 3$ gives $2^{8} - 52$.", 1),  # not what checks it
        ("5", r"The final answer is \boxed{4}. Wait. The final answer is $5$.", 1),
        ("204", r"\boxed{} The answer is 204", 1),
        ("5", "The final answer is $5$.", 1),
        ("42", "Let $x_{1} = 3$. So the answer is 42.", 1),  # braces before an answer without a box
        (r"\frac{14}{3}", r"As $a_{n} = 2^{n}$, the final answer is $\frac{14}{3}$.", 1),
        ("8", "Since $2^{3}$ is the volume, the final answer is $9$.", 0),
        (r"\frac{3}{2}", r"so it is \boxed{\frac{3}{2}", 1),  # cut before it closes
        ("7", "I do not know", 0),
        ("7", "", 0),
    ],
)
def test_an_answer_is_right_if_it_equals_the_gold_one_whatever_its_form(gold: str, output: str, score: float) -> None:
    assert right(gold, output) == score


def test_a_problem_is_asked_in_a_chat_or_as_r_kv_asks(folder: Path) -> None:
    tasks = (Math500(variant, 9, str(folder)) for variant in ("chat", "rkv"))
    chat, raw = ({one.id: one for one in task.samples(None, 0)} for task in tasks)
    problem, wish = PROBLEMS[2]["problem"], "\nPlease reason step by step, and put your final answer within \\boxed{}."
    sample = chat["math500-2"]
    assert (sample.prompt, sample.chat, sample.max_new_tokens) == (problem + wish, True, 9)
    assert raw["math500-2"].prompt.startswith(f"You are given a math problem.\n\nProblem: {problem}\n\n You need")
    assert raw["math500-2"].prompt.endswith("Final answer:  \\boxed{}") and not raw["math500-2"].chat


def test_aime_has_a_group_a_year(folder: Path) -> None:
    found = {one.group: one.answers for one in Aime([2024, 2025], data_dir=str(folder)).samples(None, 0)}
    assert found == {"2024": ("025",), "2025": ("7",)}
    with pytest.raises(ValueError, match=r"task\.years=\[2023\]: .*2024, 2025"):
        Aime([2023])


def test_a_problem_without_an_answer_fails_itself_alone(tmp_path: Path) -> None:
    rows = [{"problem": "What?", "answer": answer} for answer in ("7", " ", True)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {one.id: one.error for one in Math500(data_dir=str(tmp_path)).samples(None, 0)}
    assert [bool(found[f"math500-{place}"]) for place in range(3)] == [False, True, True]


@with_data
def test_all_gold_answers_of_the_real_problems_are_right() -> None:
    task = Aime([2024, 2025], data_dir=str(DATA / "aime"))
    found = list(task.samples(None, 0))
    assert len(found) == 60 and all(task.score(one, f"\\boxed{{{one.answers[0]}}}")["accuracy"] for one in found)
    assert not any(task.score(one, f"\\boxed{{{int(one.answers[0]) + 1}}}")["accuracy"] for one in found)


@pytest.mark.slow
@with_data
def test_all_solutions_of_math500_are_right() -> None:
    rows = [json.loads(line) for line in (DATA / "math500" / "math.jsonl").read_text().splitlines()]
    assert sum(right(row["answer"], row["solution"]) for row in rows) == len(rows) == 500


@pytest.mark.slow  # a grader and its grammar are loaded
def test_a_run_ends_in_scores_and_names_its_grader(folder: Path, tmp_path: Path) -> None:
    words = ["task=math500", f"task.data_dir={folder}", "task.max_new_tokens=8", "method=snapkv", "budget=64"]
    summary = run(composed(*words, f"results_dir={tmp_path / 'results'}"))
    assert (summary["n"], summary["failed"]) == (4, 0) and summary["score"] is not None
    (told,) = tmp_path.glob("results/runs/**/run.yaml")
    assert "math-verify" in told.read_text()


def test_what_a_run_lacks_is_said_in_one_line_before_a_model_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["task=math500", f"task.data_dir={folder}"]
    with pytest.raises(ConfigError, match=r"task\.max_new_tokens=32768: .*tiny"):
        check(composed(*words))
    with pytest.raises(ConfigError, match=r"task\.data_dir: .*test.jsonl: no such file"):
        check(composed("task=math500", "task.max_new_tokens=8", f"task.data_dir={folder.parent}"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"task=math500: math-verify .*'kvbench\[math\]'"):
        Math500(data_dir=str(folder))
