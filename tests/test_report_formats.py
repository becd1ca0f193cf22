"""Printed tables: every format says the same, escapes what it must, and fits."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

import pytest
from driver import slow
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from report_runs import cell_of
from rich.console import Console

from kvbench.report import html
from kvbench.report.data import papers as published
from kvbench.report.data.frame import SkippedRun
from kvbench.report.tables import formats, latex
from kvbench.report.tables.cells import BRIEF_SCORE, WITH_SCORE, ReportTable
from kvbench.report.tables.published import COMPARED_LINES, merge_published
from kvbench.report.tables.runs import OVERVIEW
from kvbench.runs.quantities import QUANTITIES, named

AWKWARD = "a_b & 50 % #1 $x$ {y} ~z^ \\w <b>|c|</b> \"q\" 'r'"


def scores(rows: int = 2, columns: int = 3, label: str = "quest") -> ReportTable:
    """A table of scores with everything that goes with one."""
    numbers = {"score": 71.25, "score_low": 60.0, "score_high": 80.5, "against_full": 3.0, "against_full_low": -1.0}
    numbers |= {"against_full_high": 7.0, "attended_share": 1.484, "samples": 20.0, "failed": 2.0}
    numbers |= {"pairs": 20.0}
    one = cell_of(numbers, {"score": "bf"})
    lines = {"score": QUANTITIES["score"], **WITH_SCORE}
    labels = [(f"{label}{row}", "64") for row in range(rows)]
    names = [f"task {column}" for column in range(columns)]
    cells = {(row, column): one for row in range(rows) for column in range(columns)}
    return ReportTable("t", "A title", ("method", "budget"), labels, names, cells, lines, ["A note."])


def across(label: str = "quest") -> ReportTable:
    """A table whose values stand side by side."""
    table = scores(2, 1, label)
    return ReportTable("t", table.title, table.axes, table.rows, [""], table.cells, table.lines, table.notes)


def paper() -> ReportTable:
    """A published table of which ours has one cell of three."""
    ours = cell_of(
        {
            "score": 48.0,
            "score_low": 40.0,
            "score_high": 56.0,
            "samples": 200.0,
            "published": 49.25,
            "difference": -1.25,
        }
    )
    cells = {(0, 0): ours, (0, 1): cell_of({"published": 30.5}), (0, 2): cell_of({"published": 7.0}, mapped=False)}
    return ReportTable("p", "P", ("",), [("IceCache 256",)], ["A", "B", "C"], cells, COMPARED_LINES, [])


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_fewer_pairs_than_samples_are_told():
    table = scores(1, 1)
    few = cell_of({**table.cells[0, 0].numbers, "pairs": 12.0})
    assert formats.text(table, few, "against_full", 0) == "+3.0 [-1.0, 7.0] (12 pairs)"


# -- formats -----------------------------------------------------------------------------------------------------------


def test_markdown_has_the_same_cells_in_every_line():
    told = formats.markdown([scores(label=AWKWARD)])
    lines = [line for line in told.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}
    assert len(lines) == 2 + 2 * 5 and told.startswith("### A title\n") and "- A note." in told


@given(st.integers(30, 200), st.integers(1, 12))
def test_the_console_s_parts_hold_every_column_once_and_fit(width, columns):
    table = scores(1, columns)
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        formats.console([table], console)
    told = captured.get()
    assert told.count("71.2 (bf)") == columns and told.count("+3.0 [-1.0, 7.0]") == columns
    if width >= 60:  # room for the labels and one column
        assert max(map(len, told.splitlines())) <= width


@given(st.integers(40, 200))
def test_an_overview_fits_and_says_what_it_had_no_room_for(width):
    numbers = dict.fromkeys(OVERVIEW, 12.5) | {
        "score_low": 1.0,
        "score_high": 50.0,
        "pairs": 20.0,
        "against_full": -3.0,
        "samples": 20.0,
    }
    numbers |= {"against_full_low": -5.0, "against_full_high": -1.0}
    rows = [("a-model", task, method, "64") for task in ("niah", "passkey") for method in ("full", "streaming_llm")]
    lines = {**BRIEF_SCORE, **{name: named(name) for name in OVERVIEW[1:]}}
    cells = {(row, 0): cell_of(numbers, {"tpot_ms_mean": "c"}) for row in range(len(rows))}
    axes = ("model", "task", "method", "budget")
    table = ReportTable("o", "4 runs", axes, rows, [""], cells, lines, ["A note. " * 40], shared=2)
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        left_out = formats.console([table], console)
    told = captured.get()
    assert told.count("12.5* [1.0, 50.0]") == 4, "the score always stands"
    assert told.count("a-model, niah") == told.count("a-model, passkey") == 1
    assert max(map(len, told.splitlines())) <= min(width, 120)
    headings = [line.heading for line in lines.values()]
    assert left_out == headings[len(headings) - len(left_out) :]
    assert left_out or width > 80


PUBLISHED = list(published.ids())


@pytest.mark.parametrize("id", [*PUBLISHED[::4], *slow(*(id for at, id in enumerate(PUBLISHED) if at % 4))])
def test_every_published_table_prints_in_every_format(id):
    table = merge_published(None, published.table(id))
    numbers = [cell.numbers["published"] for cell in table.cells.values() if cell.numbers]
    console = Console(width=140, file=io.StringIO())
    with console.capture() as captured:
        formats.console([table], console)
    page = Page(html.page("t", "", [table], {}, []))
    read = csv.DictReader(io.StringIO(formats.csv_text([table])))
    assert sorted(float(line["published"]) for line in read if line["published"]) == sorted(numbers)
    shown = {text for row in formats.grid(table).rows for line in row for text in line.texts}
    for told in (captured.get(), formats.markdown([table]), latex.latex([table]), "\n".join(page.words)):
        assert all(text in told for text in shown)
        assert all(column.split()[0] in told for column in table.columns if not set(column) & set("_%"))


# -- HTML --------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags that must balance, what the page refers to, and its words."""

    VOID = {"meta", "img", "link", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def picture() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2], [3, 4])
    return figure


def test_a_page_is_whole_and_fetches_nothing():
    left = [SkippedRun("results/a", "unfinished")]
    text = html.page("T", "about", [scores(), across()], {"one": ("A picture", picture())}, left, ["figure=x: no run"])
    page = Page(text)
    assert {image["src"].partition(",")[0] for image in page.all("img")} == {"data:image/svg+xml;base64"}
    assert not page.all("link") and not any("src" in script for script in page.all("script"))
    assert all(link["href"].startswith("#") for link in page.all("a"))
    assert "url(" not in text and "@import" not in text
    assert "width: max-content" in text and "overflow-x" not in text, "as wide as its widest table"
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {link["href"][1:] for link in page.all("a")} <= ids
    assert "1 runs left out" in page.words and "results/a: unfinished" in page.words
    assert "figure=x: no run" in page.words


def test_names_are_text_and_never_tags():
    awkward = "<script>alert(1)</script>&\"'"
    page = Page(html.page(awkward, awkward, [scores(label=awkward)], {}, [SkippedRun(awkward, awkward)]))
    assert len(page.all("script")) == 1
    assert page.words.count(awkward) >= 3


def test_a_column_is_sorted_by_the_number_that_a_row_shows_first():
    page = Page(html.page("T", "", [paper()], {}, []))
    values: dict[str, str] = {}
    for cell in page.all("td"):
        if "data-value" in cell:
            values.setdefault(cell["data-column"], cell["data-value"])
    # Ours where it was run, else the published.
    assert values == {"2": "48.0", "3": "30.5", "4": "7.0"}
    assert len(page.all("tbody")) == 1 and len(page.all("button")) == 4


@pytest.mark.parametrize("shown, value", [("10 %", "0.1"), ("64", "64.0"), ("-12.5 [-20.0, 1.0]", "-12.5")])
def test_labels_sort_as_what_they_mean(shown, value):
    table = scores(1, 1)
    page = Page(html.page("T", "", [ReportTable(**{**vars(table), "rows": [("quest", shown)]})], {}, []))
    assert [cell["data-value"] for cell in page.all("th") if cell.get("scope") == "row"] == ["quest", value]


def test_the_same_report_is_the_same_file():
    pages = [html.page("T", "", [scores()], {"one": ("A", picture())}, []) for _ in range(2)]
    assert pages[0] == pages[1]
