"""The numbers of the pages are those of the committed runs: their tables are made anew, their prose quotes these."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from kvbench.cli import report

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "fill_tables.py"))
each_page = pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * page.startswith("docs/")) for page in SCRIPT["PAGES"]]
)


@each_page
def test_the_tables_of_a_page_are_those_of_the_committed_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert SCRIPT["filled"](text) == text, "python scripts/fill_tables.py"


@each_page
def test_a_number_in_the_prose_of_a_page_is_one_of_its_section_s_tables(page: str) -> None:
    assert SCRIPT["unfounded"]((ROOT / page).read_text(encoding="utf-8")) == []


PAGE = """# A page

## One

<!-- table: demo -->

Quest's KL is .43, at C = 256 of 2,048 tokens; 25 % of the needles are found{}.

## Two

<!-- numbers: times -->
A step takes .84 of full attention's.
"""


def test_a_page_is_filled_once_and_then_stays() -> None:
    once = SCRIPT["filled"](PAGE)
    assert "| `quest` | 0.4303 ± 0.0699 |" in once and "|\n\nQuest's KL" in once and SCRIPT["filled"](once) == once
    assert SCRIPT["unfounded"](once) == []


@pytest.mark.parametrize("number", [".44", "26 %", "1.6 times", "0.4309", "as much as .84", "11 texts"])
def test_a_number_that_no_run_of_the_section_has_is_found(number: str) -> None:
    """One of another section, too, and one whose last digit is off."""
    wrong = SCRIPT["filled"](PAGE.format(f", or {number}"))
    (found,) = SCRIPT["unfounded"](wrong)
    assert found.partition(":")[0] in number


def test_a_number_of_a_table_that_is_not_made_is_found() -> None:
    assert SCRIPT["unfounded"]("## One\n\n| method | KL |\n|---|---|\n| `quest` | 0.99 |\n") != []


def test_every_picture_that_a_page_shows_has_a_command_that_is_taken() -> None:
    drawn = SCRIPT["described"]()["pictures"]
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in SCRIPT["PAGES"]]
    shown = {Path(link).name for text in texts for link in re.findall(r"\(([\w/.]+\.png)\)", text)}
    kept = {path.name for path in (ROOT / "results").glob("*.png")}
    of_programs = {"demo_tradeoff.png", "bench_long_cpu.png"}  # which kvbench demo draws, and a script drew once
    assert shown | kept <= drawn.keys() | of_programs
    for name, command in drawn.items():
        assert (ROOT / "results" / name).is_file(), "python scripts/fill_tables.py --pictures"
        report._check(report._parser().parse_args([*shlex.split(command), "--out", str(ROOT / "results" / name)]))
