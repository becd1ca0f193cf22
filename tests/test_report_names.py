"""Names in run folders are a stranger's: no format takes them for markup, a formula, a pattern or a command."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from matplotlib.text import Text
from report_runs import record, stored
from rich.console import Console
from test_report_formats import scores

from kvbench.config import ConfigError
from kvbench.report import html
from kvbench.report.claims.claim import claims
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.data.table import plain_csv
from kvbench.report.figures import all as figures
from kvbench.report.figures.labels import as_written
from kvbench.report.site.claims import concerns_method
from kvbench.report.tables import formats
from kvbench.report.tables import runs as tables
from kvbench.report.tables.latex import escaped, latex

HOSTILE = [
    "=1+1",
    '=HYPERLINK("http://x","y")',
    "+1+1",
    "-1+1",
    "@SUM(A1)",
    "\t=1",
    "a|b",
    "a\\|b\\",
    "*a* _b_ __c__ a_b",
    "`a` ``b",
    "<b>a</b> <script>",
    "[a](b) ![c](d)",
    "[bold]a[/bold] [/x]",
    "a$b$c^",
    r"\frac{a}{b}",
    "$$",
    "_mine",
    "*mine",
    "a(b",
    "[z",
    "a\nb",
    "&amp; # ~ % {}",
]
# What YAML can hold and a terminal shows.
NAMES = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co", "Cn"]), min_size=1, max_size=12),
    st.text("=+-@|*_`<>[]()!\\$^&#~{}%'\"ab 1", min_size=1, max_size=12),
)


def shown(words: str) -> str:
    return " ".join(words.split())


def cells_of(told: str) -> list[str]:
    """The words of each cell of Markdown's tables, by a parser of its own."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(told)
    inline = [token for before, token in zip(tokens, tokens[1:], strict=False) if before.type in ("th_open", "td_open")]
    kinds = {child.type for token in inline for child in token.children or []}
    assert kinds <= {"text", "text_special"}, kinds
    return ["".join(child.content for child in token.children or []) for token in inline]


@settings(max_examples=40)
@given(NAMES)
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    cells = cells_of(formats.markdown([scores(1, 1, label=name)]))
    assert shown(f"{name}0") in cells
    assert len(cells) == 4 + 5 * 4
    title = MarkdownIt().render("### " + formats.plain_markdown(f"A {name} #"))
    assert re.sub("<[^>]*>", "", title).strip().startswith("A") and title.count("<") == 2


def test_markdown_leaves_a_name_of_the_field_as_it_is() -> None:
    assert formats.plain_markdown("streaming_llm 0.5 (m)") == "streaming_llm 0.5 (m)"


@settings(max_examples=40)
@given(NAMES)
def test_no_spreadsheet_takes_a_name_for_a_formula(name: str) -> None:
    table = scores(1, 1, label=name)
    table = type(table)(**{**vars(table), "columns": [name], "rows": [(name, "64")], "axes": (name, "budget")})
    head, line = csv.reader(io.StringIO(formats.csv_text([table])))
    for cell in (head[1], line[1], line[3]):
        assert cell.removeprefix("'") == name.removeprefix("'")
        assert cell[0] not in "=+-@\t\r" or cell == "-" or float(cell) is not None
    assert line[head.index("against_full_low")] == "-1.0", "a number stays one"


@pytest.mark.parametrize("value", [-1.5, "-1.5", "-", "", "quest", 3])
def test_numbers_and_plain_words_are_as_they_were(value: Any) -> None:
    assert plain_csv(value) == value


def unescaped(source: str) -> str:
    """What LaTeX prints of these words; fails at a character that is a command to it."""
    words = {r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"$\pm$": "±"}
    words |= {r"\textless{}": "<", r"\textgreater{}": ">", r"\textbar{}": "|", "{}": ""}
    words |= {f"\\{one}": one for one in "&%$#_{}"}
    parts = re.split("(" + "|".join(map(re.escape, words)) + ")", source)
    assert not re.search(r"[\\&%$#_{}~^<>|\n]", "".join(parts[::2]))
    return "".join(words.get(part, part) for part in parts)


@settings(max_examples=40)
@given(NAMES)
def test_latex_prints_a_name_as_it_is(name: str) -> None:
    assert unescaped(escaped(name)) == shown(name)
    assert not re.match(r"[\[*]", escaped(name)), "a \\\\ before it would take it for its own"


class Words(HTMLParser):
    """The words of a page, and the tags in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.tags = "", set[str]()
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.words += data

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)


@settings(max_examples=20)
@given(NAMES)
def test_html_and_the_console_show_a_name_as_it_is(name: str) -> None:
    table = scores(1, 1, label=name)
    table = type(table)(**{**vars(table), "title": name, "axes": (name, "budget")})
    page = Words(html.page(name, name, [table], {}, [(Path("x"), name)]))
    plain = Words(html.page("a", "a", [scores(1, 1)], {}, [(Path("x"), "a")]))
    assert page.words.count(name) >= 5 and page.tags == plain.tags


@pytest.mark.parametrize("name", ["[bold]a[/bold] [/x]", "a(b", "*a* _b_", "=1+1"])
def test_a_console_takes_no_name_for_its_markup(name: str) -> None:
    table = scores(1, 1, label=name)
    table = type(table)(**{**vars(table), "title": name, "axes": (name, "budget")})
    console = Console(width=200, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        formats.console([table], console)
    assert captured.get().count(name) == 3


# -- figures and whole reports -----------------------------------------------------------------------------------------


def runs_named(folder: Path, name: str) -> Runs:
    """Runs in which a stranger has given everything this name."""
    for method in ("full", "quest", name):
        for budget in (64, 128):
            lines = [record(f"{name}-{number}", name, number % 2) for number in range(4)]
            stored(folder, method, budget, lines, task=name, model=name, options={"subset": name, name: name})
    return collect([folder])


@pytest.mark.parametrize("name", ["a$b$c^", "_m", "=1[/x]|(", "$\\frac{$*"])
def test_figures_draw_a_name_as_it_is_and_every_table_can_be_made(tmp_path: Path, name: str) -> None:
    runs = runs_named(tmp_path, name)
    figure = figures.draw("budget", runs)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any(name in text for text in legend)
    assert figures.drawn(figure, "svg") and figures.drawn(figure, "png")
    assert all(not text.get_parse_math() for text in figure.findobj(Text) if name in text.get_text())
    made = [*tables.overview(runs), *tables.summary(runs), *tables.by_group(runs)]
    assert all(make(made) for make in (formats.markdown, formats.csv_text, latex))
    formats.console(made, Console(file=io.StringIO(), width=100))


def test_numbers_along_an_axis_keep_their_powers() -> None:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([1, 1000], [1, 1000], label="$x$")
    axis.set(xscale="log", title="$x$")
    as_written(figure)
    figure.draw_without_rendering()
    ticks = [tick for tick in axis.get_xticklabels() if "mathdefault" in tick.get_text()]
    assert ticks and all(tick.get_parse_math() for tick in ticks) and not axis.title.get_parse_math()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a$b$c^", "_mine", "a\nb", "[bold]a[/bold] [/x]", "<b>&", "a(b"])
def test_every_figure_of_hostile_names_can_be_drawn_or_says_why_not(tmp_path: Path, name: str) -> None:
    runs = runs_named(tmp_path, name)
    for kind in figures.FIGURES:
        try:
            figures.drawn(figures.draw(kind, runs), "svg")
        except ConfigError:
            continue


@given(NAMES)
@example("a(b")
@example("[z")
def test_a_name_is_no_pattern(name: str) -> None:
    assert not any(concerns_method(claim, f"{name}(") for claim in claims())
