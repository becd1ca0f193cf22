"""Claims about LongProc: whole procedures are right, broken ones count as published, programs run where allowed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from driver import slow

from kvbench.cli.checks import check
from kvbench.cli.compose import composed
from kvbench.config import ConfigError
from kvbench.runs.sweep import run
from kvbench.tasks import Sample
from kvbench.tasks.longproc import LongProc, countdown, cpp
from kvbench.tasks.longproc.scores import html_to_tsv, path_traversal, tom_tracking

DATA = Path(__file__).parents[2] / "shared" / "data" / "longproc"
with_compiler = pytest.mark.skipif(cpp.compiler() is None, reason="needs g++")

DOUBLED = "int main() { int n; cin >> n; cout << 2 * n << endl; }"
ROWS: dict[str, dict[str, Any]] = {
    "html_to_tsv_0.5k": {
        "html_path": "page.html",
        "task_topic": "towns",
        "task_description": "name and size",
        "filtering_instruction": "",
        "tsv_header": "name\tsize",
        "gt": "name\tsize\nRome\t3\nThe Hague\t1",
    },
    "pseudo_to_code_0.5k": {
        "pseudocode_lines": ["print twice the input"],
        "code_lines": [DOUBLED],
        "testcases": [[["2"], ["4"]], [["5"], ["10"]]],
    },
    "path_traversal_0.5k": {
        "context_nl": "Cities.",
        "question_repr": ["A", "C"],
        "answer_nl": "From A to B.\nFrom B to C.",
    },
    "tom_tracking_0.5k": {
        "story_components": "Agents: [Ann].",
        "story": "Step 0: Ann is in the hall.",
        "question": "Where?",
        "solution": "Ann:\n- Step 0: in the hall\n- Step 1: in the attic",
    },
    "countdown_0.5k": {"nums": [9, 16, 6, 18], "target": 12},
}
PROMPTS = {
    "html_to_tsv": "{html_str} on {task_topic}: {task_description}{filtering_instruction} as {tsv_header} {{rows}}",
    "pseudo_to_code": "Write {pseudocode}",
    "path_traversal": "{city_context} From {src_city} to {dst_city}?",
    "tom_tracking": "{story_components} {story} {question}",
    "countdown": "{demonstration} Now {nums} to {target}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, row in ROWS.items():
        kind = name.rpartition("_")[0]
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{name}.json").write_text(json.dumps([row]))
        (tmp_path / kind / "prompts.yaml").write_text(json.dumps({"USER_PROMPT": PROMPTS[kind]}))
    (tmp_path / "html_to_tsv" / "page.html").write_text("<p>Rome {3}</p>")
    return tmp_path


def sample_of(folder: Path, name: str) -> tuple[LongProc, Sample]:
    task = LongProc([name], execute=name.startswith("pseudo") and cpp.compiler() is not None, data_dir=str(folder))
    (sample,) = task.samples(None, 0)
    return task, sample


WHOLE = {"html_to_tsv_0.5k": "```tsv\n{}\n```", "path_traversal_0.5k": "<Route>\n{}\n</Route>"}


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("pseudo")])
def test_the_reference_is_right_and_nothing_is_wrong(name: str, folder: Path) -> None:
    task, sample = sample_of(folder, name)
    assert task.score(sample, WHOLE.get(name, "{}").format(sample.answers[0]))["score"] == 1
    assert task.score(sample, "")["score"] == 0
    assert (sample.chat, sample.max_new_tokens, sample.group) == (True, 1024, name)


def test_a_prompt_is_the_folder_s_own_template_filled(folder: Path) -> None:
    _, page = sample_of(folder, "html_to_tsv_0.5k")
    assert page.prompt == "<p>Rome {3}</p> on towns: name and size as name\tsize {rows}"
    _, numbers = sample_of(folder, "countdown_0.5k")
    assert numbers.prompt.count("# Example\n") == 2 and numbers.prompt.endswith("Now [9, 16, 6, 18] to 12")


def test_countdown_s_search_is_written_as_published() -> None:
    text = countdown.demonstration([9, 16, 6, 18], 12)
    lines = text.split("\n")
    assert lines[:2] == [
        "# Search Procedure",
        "Initial number set: [9, 16, 6, 18], target: 12. Options for choosing two numbers: "
        "[(9, 16), (9, 6), (9, 18), (16, 6), (16, 18), (6, 18)].",
    ]
    assert lines[2] == " |- Pick two numbers (9, 16) (numbers left: [6, 18]). Try possible operations."
    assert lines[3].startswith(
        "  |- Try 16 + 9 = 25. Add 25 to the number set. Current number set: [25, 6, 18], target"
    )
    assert countdown.is_solution([9, 16, 6, 18], 12, text.split("<Solution>\n")[1].split("\n</Solution>")[0])


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("18 - 16 = 2\n9 - 2 = 7\n7 + 6 = 13", False),  # another target
        ("18 - 16 = 2\n9 + 9 = 18\n18 - 6 = 12", False),  # a number that is not there
        ("9 + 16 = 24\n24 - 18 = 6\n6 + 6 = 12", False),  # wrong arithmetic
        ("__import__('os') = 1\n1 = 1\n1 = 1", False),
        ("16 / 0 = 0\n1 = 1\n1 = 1", False),
        (f"1{'0' * 400} / 3 = 5\n1 = 1\n1 = 1", False),
    ],
)
def test_a_solution_is_checked_by_its_arithmetic(text: str, right: bool) -> None:
    assert countdown.is_solution([9, 16, 6, 18], 12, text) is right


def test_a_search_gets_credit_up_to_its_first_other_step() -> None:
    whole = countdown.demonstration([9, 16, 6, 18], 12)
    start, *steps = whole.split("\n\nNow")[0].split("\n")[1:]
    broken = "\n".join([start, *steps[:4], steps[4].replace("= ", "= 1"), "   |- Try something else", *steps[6:]])
    # Another result is no other step, another operation is.
    assert countdown.share_of_search(f"# Search Procedure\n{broken}", whole) == 5 / len(steps)
    assert countdown.share_of_search(whole, whole) == (len(steps) - 1) / len(steps)
    assert countdown.share_of_search(f"# Search Procedure\n{start}", whole) == 0


def test_rows_routes_and_traces_get_their_shares() -> None:
    table = ROWS["html_to_tsv_0.5k"]["gt"]
    found = html_to_tsv("```tsv\nn\ts\nhague\t1\nParis\t2\ntorn\n```", table)
    assert (found["precision"], found["recall"], found["f1"]) == (0.5, 0.5, 0.5)
    assert html_to_tsv("```tsv\nname\nRome\n```", table)["extraction_rate"] == 0
    assert path_traversal("<Route>a\nx\nc</Route>", "a\nb\nc") == {
        "accuracy": 0.0,
        "partial_accuracy": 2 / 3,  # the wrong line counts, too
        "extraction_rate": 1.0,
    }
    trace = "- Step 0: in the hall\n- Step 1: attic\n- Step 2: attic"
    assert tom_tracking("- 0: hall\n- 1: cellar\n- 2: attic", trace)["partial_accuracy"] == 1 / 3
    assert tom_tracking("so:\n- 0 hall\n- 1 attic\n- 2 the attic\nend", trace)["accuracy"] == 1


@with_compiler
@pytest.mark.parametrize(
    ("program", "right"),
    [
        (DOUBLED, 1),
        ("int main() { cout << 4 << endl; }", 0),  # right for the first case alone
        ("int main() { return x; }", 0),
        *slow(
            ("int main() { while (true) cout << 1 << endl; }", 0),  # stopped by the limit on files
            (f"{DOUBLED[:-1]} while (true); }}", 0),  # right, and stopped by the clock
        ),
    ],
)
def test_a_program_is_right_if_it_passes_its_cases(program: str, right: float, folder: Path) -> None:
    task, sample = sample_of(folder, "pseudo_to_code_0.5k")
    assert task.score(sample, f"Here:\n```c++\n{program}\n```")["accuracy"] == right
    assert task.score(sample, program)["extraction_rate"] == 0


def test_bad_input_is_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(ConfigError) as error:
            check(composed("task=longproc", f"task.data_dir={folder}", *words))
        return str(error.value)

    assert "task.execute=false: pseudo_to_code_0.5k" in refused("task.subsets=[pseudo_to_code_0.5k]")
    assert "no subset travel_planning_2k" in refused("task.subsets=[travel_planning_2k]")
    assert "task.subsets=[countdown_0.5k] takes what is there" in refused("task.subsets=[countdown_8k]")
    assert "task.data_dir=null: " in refused("task.data_dir=null")
    monkeypatch.setattr(cpp, "compiler", lambda: None)
    assert "task.execute=true: no g++" in refused("task.execute=true")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("countdown_0.5k", {"nums": ["9", 16, 6, 18]}),
        ("pseudo_to_code_0.5k", {"pseudocode_lines": [1, 2]}),
        ("tom_tracking_0.5k", {"solution": "in the hall"}),
        # what nothing, or all, would be right by
        ("html_to_tsv_0.5k", {"gt": "name\tsize"}),
        ("path_traversal_0.5k", {"answer_nl": " "}),
        ("pseudo_to_code_0.5k", {"testcases": []}),
        ("pseudo_to_code_0.5k", {"testcases": [[["1"]]]}),
        ("pseudo_to_code_0.5k", {"testcases": [[["1"], [2]]]}),
    ],
)
def test_a_bad_row_costs_one_sample(name: str, changed: dict[str, Any], folder: Path) -> None:
    file = folder / name.rpartition("_")[0] / f"{name}.json"
    file.write_text(json.dumps([ROWS[name] | changed, ROWS[name]]))
    task = LongProc([name], execute=True, data_dir=str(folder))
    errors = {one.id: one.error for one in task.samples(None, 0)}
    assert errors[f"{name}-0"].startswith(f"{name}.json, line 1: ") and not errors[f"{name}-1"]


def test_a_run_reports_each_subset(folder: Path, tmp_path: Path) -> None:
    subsets = "html_to_tsv_0.5k,path_traversal_0.5k,tom_tracking_0.5k"
    words = ["model=dummy-tiny", f"task.data_dir={folder}", f"task.subsets=[{subsets}]", "task.max_new_tokens=4"]
    summary = run(
        composed("task=longproc", *words, "method=snapkv", "budget=64", f"results_dir={tmp_path / 'results'}")
    )
    assert (summary["n"], summary["failed"]) == (3, 0) and set(summary["groups"]) == set(subsets.split(","))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the sample data folder")
@pytest.mark.parametrize("name", ["path_traversal_0.5k", "tom_tracking_2k", "countdown_0.5k"])
def test_every_real_reference_is_right(name: str) -> None:
    task = LongProc([name], data_dir=str(DATA))
    found = list(task.samples(None, 0))
    assert len(found) == 200
    assert all(task.score(one, WHOLE.get(name, "{}").format(one.answers[0]))["score"] == 1 for one in found)


@with_compiler
def test_what_a_program_leaves_behind_ends_with_it(folder: Path, tmp_path: Path) -> None:
    late = tmp_path / "late"
    code = f'if (!fork()) {{ sleep(1); ofstream("{late}") << 1; }}'
    assert cpp.passes(f"#include <unistd.h>\nint main() {{ {code} return 0; }}", [[[""], [""]]]) is False
    time.sleep(1.5)
    assert not late.exists()
