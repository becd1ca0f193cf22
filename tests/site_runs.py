"""Runs of five arms, the site that is made of them, and the cells of its tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from report_runs import record, stored

from kvbench.cli.report import main
from kvbench.report.site.pictures import INTERACTIVE

# (method, budget) -> scores of two groups, MiB on the device, ms a token
DENSE, INDEX = 0.02, 2**20  # share of the layers, bytes of every arm
ARMS: dict[tuple[str, int | None], tuple[list[float], list[float], float, float]] = {
    ("full", None): ([1, 1, 1] * 4, [1, 1, 1] * 4, 40.0, 9.0),
    ("quest", 64): ([1, 1, 0] * 4, [0, 1, 0] * 4, 40.0, 5.0),
    ("quest", 128): ([1, 1, 1] * 4, [0, 1, 1] * 4, 40.0, 6.0),
    ("snapkv", 64): ([1, 0, 0] * 4, [0, 0, 0] * 4, 1.0, 3.0),
    ("pariskv", 64): ([1, 1, 0] * 4, [1, 1, 1] * 4, 1.5, 12.0),
}


def answers(method: str, budget: int | None) -> list[dict[str, Any]]:
    short, long, size, time = ARMS[method, budget]
    audit = {"attended_mean": 80.0, "attended_max": 96, "budget": budget, "moved_bytes_per_step": 512.0}
    audit |= {"attended_bytes_per_step": 2.0**20}
    audit |= {"dense_share": DENSE, "index_bytes": INDEX}
    more = {
        "audit": {**audit, "device_kv_bytes": int(size * 2**20)},
        "tpot_ms": {"mean": 2 * time, "p50": time},
        "answers": ["</script>"],
    }
    return [
        record(f"{group}-{number}", group, score, output=f"{method} says <b>{number}</b><!-- <script src=a>", **more)
        for group, scores in (("short", short), ("long", long))
        for number, score in enumerate(scores)
    ]


def stored_arms(folder: Path) -> Path:
    for method, budget in ARMS:
        stored(folder, method, budget, answers(method, budget))
    return folder


def made(results: Path, out: Path) -> Path:
    assert main([str(results), "--out", str(out)]) == 0
    return out


class Cells(HTMLParser):
    """The cells of a page with their words; what their row has among its data, each cell has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str], str]] = []
        self.row: dict[str, str] = {}
        self.open = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.row = dict(attrs)
        if tag == "td":
            self.found.append(({**self.row, **dict(attrs)}, ""))
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open &= tag != "td"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def cells_of(page: str) -> list[tuple[dict[str, str], str]]:
    parser = Cells()
    parser.feed(page)
    return parser.found


class Outline(HTMLParser):
    """What a keyboard and a screen reader need of a page: `faults` says what is missing."""

    VOID = {"meta", "link", "img", "input", "br", "line", "circle", "polyline", "hr"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.levels: list[int] = []
        self.faults: list[str] = []
        self.captions = self.tables = 0
        self.feed(page)
        self.faults += [f"{self.tables - self.captions} tables without a caption"] * (self.tables != self.captions)
        self.faults += [f"id {id} twice" for id in {*self.ids} if self.ids.count(id) > 1]
        self.faults += ["not one h1"] * (self.levels.count(1) != 1)
        jumps = [pair for pair in zip(self.levels, self.levels[1:], strict=False) if pair[1] > pair[0] + 1]
        self.faults += [f"h{one} then h{two}" for one, two in jumps]
        self.faults += [f"{tag} is not closed" for tag in self.stack]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        own = dict(attrs)
        self.ids += [own["id"]] if "id" in own else []
        self.tables += tag == "table"
        self.captions += tag == "caption"
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        wanted = {"th": "scope", "img": "alt", "html": "lang", "form": "aria-label"}
        if tag in wanted and not own.get(wanted[tag]):
            self.faults.append(f"{tag} without {wanted[tag]}")
        if tag in ("input", "select") and "label" not in self.stack:
            self.faults.append(f"{tag} {own.get('name')} without a label")
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            top = self.stack.pop()
            self.faults += [f"{top} is closed by {tag}"] * (top != tag)


def own_pages(site: Path) -> list[Path]:
    """The HTML files that kvbench writes itself; one is Vega's, where that is installed."""
    return [page for page in site.rglob("*.html") if page.name != INTERACTIVE]
