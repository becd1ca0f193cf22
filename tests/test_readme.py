"""What the documentation shows works as it stands there, and what it names is there."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from words import configs

import kvbench
from kvbench.cli import report
from kvbench.cli.checks import check
from kvbench.cli.commands import COMMANDS
from kvbench.config import ASSETS, choices, conf_dir, fetched_folder, method_config
from kvbench.runs.command import command_of
from kvbench.runs.quantities import PASSED, QUANTITIES
from kvbench.runs.stored import contents, runs_in

ROOT = Path(__file__).parent.parent
FOLDERS = ("conf", "docs", "kvbench", "methods", "notebooks", "results", "scripts", "tests")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted({*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))})
}

each_page = pytest.mark.parametrize("page", PAGES)


def blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def prose(page: str) -> str:
    """A page without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def table(page: str, head: str) -> dict[str, list[str]]:
    """The table whose head row begins with this cell: the other cells of each row, by the word in its first."""
    lines = PAGES[page].split(f"| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in rows}


def run(folder: Path, *words: str) -> str:
    """What `python -m kvbench` prints with these words, started in a folder."""
    command = [sys.executable, "-m", "kvbench", "--config-dir", "conf", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_number_of_a_summary_is_explained_on_one_page():
    page = PAGES["docs/reference/numbers.md"]
    assert not [name for name in QUANTITIES if f"`{name}`" not in page and name not in PASSED]
    summaries = (
        json.loads(contents(path / "summary.json")) for path in runs_in([ROOT / "results/reference_tiny.tar.xz"])
    )
    found = {(part, key) for one in summaries for part in ("audit", "probe", "machine") for key in one.get(part, {})}
    assert len(found) > 20
    assert not [key for part, key in found if f"`{part}.{key}`" not in page and f"`{key}`" not in page]


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_task_that_the_tasks_page_adds_runs_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    page = "docs/guide/tasks.md"
    code = next(block for block in blocks(page, "python") if "class Colours" in block)
    config = next(block for block in blocks(page, "yaml") if "colours.Colours" in block)
    (tmp_path / "colours.py").write_text(code)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "colours.yaml").write_text(config)
    (tmp_path / "colours.jsonl").write_text('{"text": "Snow is white.", "colour": "white"}\n{"text": "no colour"}\n')
    printed = run(tmp_path, "task=colours", "method=full", "budget=null")
    assert "(2 samples, 1 failed)" in printed and "colours.jsonl, line 2: field colour: missing" in printed
    (written,) = tmp_path.rglob("run.yaml")
    assert command_of(written.parent).startswith("python -m kvbench --config-dir conf "), "the folder's name is kept"


def commands(command: str) -> list[str]:
    """What the pages' plain code blocks give to a command, without what needs a folder of the reader's."""
    plain = [
        block for text in PAGES.values() for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    lines = {line for block in plain for line in block.replace("\\\n", " ").splitlines()}
    asked = sorted(line.removeprefix(f"{command} ") for line in lines if line.startswith(f"{command} "))
    return [line for line in asked if "FOLDER" not in line]


def test_the_commands_that_the_pages_show_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path))
    for name in ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"):
        shutil.copytree(ASSETS / "tiny", fetched_folder(name))  # stands in for the fetched model
    runs = [shlex.split(line, comments=True) for line in commands("python -m kvbench")]
    named = {word.partition("=")[2] for words in runs for word in words if word.startswith("+experiment=")}
    assert named and named <= set(choices("experiment"))  # what is in them is tested with the experiments
    for words in runs:
        if not any(word.startswith(("+experiment=", "--help")) for word in words):
            for config in configs(*words):
                check(config)
    reports = [shlex.split(line, comments=True) for line in commands("kvbench report")]
    assert len(runs) > 5 and len(reports) > 5
    for word in (line.split()[0] for line in commands("kvbench")):
        assert word in COMMANDS or word.startswith("-") or "=" in word
    for words in reports:
        report._check(report._parser().parse_args(words))


# -- what there is, and what the pages list ----------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "group"), [("methods/README.md", "method"), ("docs/guide/tasks.md", "task")])
def test_every_choice_stands_in_a_table(page: str, group: str) -> None:
    """Related ones in one row."""
    named = [name for cell in table(page, f"`{group}=`") for name in re.findall(r"\w+", cell)]
    assert sorted(named) == sorted(choices(group))


def test_every_task_is_described_on_the_tasks_page() -> None:
    listed = "\n".join(line for line in PAGES["docs/guide/tasks.md"].splitlines() if line.startswith("- `"))
    assert set(re.findall(r"`(\w+)`", listed)) >= set(choices("task"))


def test_every_method_is_described_on_one_page() -> None:
    """In a paragraph that begins with its name, which the site shows as well."""
    described = [
        name
        for page, text in PAGES.items()
        if page.startswith("docs/methods/")
        for name in {*re.findall(r"(?<=\n\n)`(\w+)` ", text)} & {*choices("method")}
    ]
    assert sorted(described) == sorted(choices("method"))


def test_the_tables_of_budgets_have_every_method_with_its_minimum() -> None:
    minima = {name: method_config(name).minimum for name in choices("method")}
    for accounting, page_part in zip(
        ("paper", "unified"), ("C, as published", "C, with unified accounting"), strict=True
    ):
        rows = table("docs/methods/budgets.md", f"method | {page_part}")
        shown = {name: None if rest[-1] == "none" else int(rest[-1]) for name, rest in rows.items()}
        assert shown == {name: least[accounting] for name, least in minima.items()}


def test_the_tables_of_what_methods_come_to_are_those_of_the_committed_runs() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "method_table.py"))
    methods = script["found"]()
    assert f"\n\n{script['written'](methods)}\n\n" in PAGES["docs/methods/at_256.md"], "python scripts/method_table.py"
    assert f"\n\n{script['front'](methods)}\n\n" in PAGES["methods/README.md"], "python scripts/method_table.py"


def test_every_experiment_and_launcher_stands_in_a_table() -> None:
    cells = " ".join(cell for row in table("docs/guide/experiments.md", "paper").values() for cell in row)
    assert set(re.findall(r"`(\w+)`", cells)) == set(choices("experiment"))
    launchers = {path.stem for path in (conf_dir() / "hydra" / "launcher").glob("*.yaml")}
    assert set(table("docs/tutorials/slurm.md", "`hydra/launcher=`")) == launchers


def test_every_figure_and_executor_stands_on_its_page() -> None:
    from kvbench.attention.executor import EXECUTORS
    from kvbench.report.figures.all import FIGURES, OF_FILES

    assert set(table("docs/guide/reports.md", "`--figure`")) == {*FIGURES, *OF_FILES}
    assert set(table("docs/guide/attention.md", "`attention=`")) == {*EXECUTORS, "flashinfer", "auto"}


def test_every_file_and_folder_of_the_harness_stands_in_its_page_s_tree() -> None:
    tree = PAGES["kvbench/README.md"].split("## The rooms")[1].split("```")[1]
    listed, folder = set(), ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else name
        listed.add(name if name == folder else folder + name)
    assert [path for path in sorted(listed) if not (ROOT / path).exists()] == []
    there = {path.name for path in (ROOT / "kvbench").iterdir()} - {"README.md", "__init__.py", "__pycache__"}
    assert {path.split("/")[1] for path in listed if path.startswith("kvbench/")} - {""} == there


# -- every page --------------------------------------------------------------------------------------------------------


def test_front_pages_are_read_in_minutes() -> None:
    assert len(PAGES["README.md"].split()) <= 900 and len(PAGES["results/FINDINGS.md"].split()) <= 1500


def test_the_readme_defines_its_words_at_first_use_and_names_the_defaults() -> None:
    page = PAGES["README.md"]
    for word in ("budget", "accounting"):
        assert page.lower().index(word) - 2 == page.lower().find(f"**{word}**"), word
    (config,) = configs()
    defaults = {config.method.name, config.task.name, f"budget={config.budget}"}
    assert defaults <= set(re.findall(r"[\w=]+", re.findall(r"^python -m kvbench +#.*$", page, re.MULTILINE)[0]))


@each_page
def test_a_page_s_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", prose(page))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / page).parent.joinpath(link.partition("#")[0]).exists()] == []


@each_page
def test_a_page_names_no_file_that_is_not_there(page: str) -> None:
    spans = " ".join(re.findall(r"`([^`\n]+)`", prose(page)))
    named = re.findall(rf"(?<![\w/.=-])((?:{'|'.join(FOLDERS)})/[\w/.-]*)", spans)
    beside = re.findall(
        r"(?<![\w/.-])(\w+\.(?:py|cff|txt))\b", spans
    )  # a file of the page's own folder, or of the root
    missing = [path for path in named if not (ROOT / path).exists()]
    missing += [name for name in beside if not any((at / name).exists() for at in ((ROOT / page).parent, ROOT))]
    assert missing == []


def test_the_patterns_for_files_and_links_find_some() -> None:
    assert re.findall(r"\]\(([^)]+)\)", prose("README.md"))
    assert "`kvbench/method`" in prose("docs/guide/write_a_method.md")


@each_page
def test_a_table_s_cells_fit_a_line(page: str) -> None:
    rows = [line for line in prose(page).splitlines() if line.startswith("|")]
    assert [cell for line in rows for cell in line.split("|") if len(cell.strip()) >= 120] == []


@pytest.mark.parametrize("group", ["method", "task", "model", "experiment"])
def test_what_the_help_says_of_a_choice_is_short(group: str) -> None:
    assert [name for name, about in choices(group).items() if not 0 < len(about) <= 100] == []


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= cited.keys()
    assert cited["version"] == kvbench.__version__
    assert f"## [{kvbench.__version__}]" in PAGES["CHANGELOG.md"]
