"""What the pages of a site share: the runs behind them, the frame around them, and how a number of a run is written.

A number stands in a cell with its name, its whole value and its run, so that whoever reads the page can find it again;
the script sorts and filters by these.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import kvbench
from kvbench.config import choices
from kvbench.report.claims.page import Judged, judged
from kvbench.report.data.evidence import Evidence
from kvbench.report.data.frame import Runs, missing
from kvbench.report.data.seeds import over_seeds
from kvbench.report.data.select import by_protocol
from kvbench.report.figures.panels import telling
from kvbench.report.figures.style import STYLES, style_of
from kvbench.report.tables.cells import Cell, Table, runs_of
from kvbench.report.tables.formats import NONE, text
from kvbench.report.tables.runs import summary

VALUES = ("score", "kl_mean", "device_kv_bytes", "index_bytes", "moved_bytes_per_step", "tpot_ms_p50", "recall", "n")
RANGE_UP_TO = 3  # samples: of so few the ends of a percentile bootstrap are the least and the largest
ORACLE = "topk"  # scores every key exactly: what selection can come to, and no method to take
HOPELESS = "full attention's own score may be 0, so no method is named best and none has a place"
FAR_OVER = 3.0  # attended / C from which an arm is none of its budget, as what keeps a whole prompt
AXES = ("model", "task", "method", "budget")


class File(NamedTuple):
    """One file of a site: its path from the site's folder, and what stands in it."""

    path: str
    content: str | bytes


class Row(NamedTuple):
    """An arm: the settings that name it, its numbers, and the table that they are from.

    Attributes:
        run: index in `Site.runs`.
        panel: name of the arms that it can be compared with, of the same samples under the same protocol.
        variant: what tells it from others of the same method, budget and panel, or "".
        cell, table: its numbers, and how they are shown.
        full: index of the run of full attention on the same samples, or None.
        is_yardstick: whether it is full attention over keys and values as the model computes them.
        is_hopeless: whether full attention itself may score 0 on these samples, by its interval: then no score tells
            of a method.
    """

    run: int
    model: str
    task: str
    method: str
    budget: str
    panel: str
    variant: str
    cell: Cell
    table: Table
    full: int | None
    is_yardstick: bool
    is_hopeless: bool

    @property
    def is_choice(self) -> bool:
        """Whether it is named among the best: not full attention, not the oracle, within its budget, and on samples
        that full attention answers.
        """
        within = self.cell.numbers.get("attended_share", 0.0) < FAR_OVER
        return within and not self.is_yardstick and not self.is_hopeless and self.method != ORACLE

    @property
    def name(self) -> str:
        """The arm in words, among those of its panel."""
        budget = "" if self.budget == NONE else f" {self.budget}"
        return f"{label_of(self.method)}{budget}{f', {self.variant}' if self.variant else ''}"


@dataclass(frozen=True)
class Site:
    """The runs that a site is made of.

    Attributes:
        runs: as collected.
        folders: that they are from, in words.
    """

    runs: Runs
    folders: str

    @cached_property
    def joined(self) -> Runs:
        """The runs, one for all that differ in their seed alone."""
        return over_seeds(self.runs, self.runs.arms.index)[0]

    @cached_property
    def evidence(self) -> Evidence:
        """What can be said of them."""
        return Evidence(self.joined)

    @cached_property
    def judged(self) -> list[Judged]:
        """The papers' claims, with the verdicts by these runs and what kvbench ships."""
        return judged(self.runs, [])

    @cached_property
    def tables(self) -> list[Table]:
        """A table of arms for each protocol; timed runs are in none."""
        return summary(self.joined.only(self._untimed), values=VALUES)

    @cached_property
    def rows(self) -> list[Row]:
        """Every arm, the nearest to full attention or with the best score first in its panel; of a task's panels that
        with the most arms first.
        """
        run_of = {runs_of(arm): run for run, arm in self.joined.arm.items()}
        protocols = [what for _, what in by_protocol(self.joined, self._untimed)]
        rows, words = [], {}
        for table, protocol in zip(self.tables, protocols, strict=True):
            for (place, _), cell in table.cells.items():
                labels = dict(zip(table.axes, table.rows[place], strict=True))
                run = run_of[cell.run]
                words[run] = [f"{_short(key)}={value}" for key, value in labels.items() if key not in AXES]
                full = self.evidence.yardstick(run)
                model, task, method, budget = (labels[key] for key in AXES)
                panel = ", ".join(filter(None, [task, model, protocol]))
                bare = self.joined.is_yardstick(run)
                hopeless = full is not None and self._may_score_0(full)
                rows.append(Row(run, model, task, method, budget, panel, "", cell, table, full, bare, hopeless))
        told = []
        for alike in _grouped(self._told_apart(rows), lambda row: (row.panel, row.method, row.budget)):
            shared = set.intersection(*(set(words[row.run]) for row in alike))
            for row in alike:
                apart = [word for word in words[row.run] if word not in shared]
                told.append(row._replace(variant=", ".join(apart)))
        size = Counter(row.panel for row in told)
        return sorted(told, key=lambda row: (row.task, -size[row.panel], row.panel, _rank(row.cell.numbers)))

    def _may_score_0(self, full: int) -> bool:
        """Whether the score of a run of full attention may be 0, by its interval; of one sample, whether it is."""
        score = self.evidence.score(full)
        return (score.mean if score.low is None else score.low) <= 0

    def _told_apart(self, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows, with what tells the samples of a panel from others of its model and task in the panel's name."""
        for own in _grouped(rows, lambda row: row.panel):
            kinds = {row.run: self.evidence.kind(row.run) for row in own}
            settings = {run: dict(part.split("=", 1) for part in kind[:-1]) for run, kind in kinds.items()}
            keys = telling(list(settings.values()))
            names = {
                run: [f"{_short(key)}={setting[key]}" for key in keys if key in setting]
                for run, setting in settings.items()
            }
            for alike in _grouped(own, lambda row: tuple(names[row.run])):  # noqa: B023
                several = len({kinds[row.run][-1] for row in alike}) > 1  # data, which no setting tells apart
                for row in alike:
                    data = [f"data {kinds[row.run][-1]}"] if several else []
                    yield row._replace(panel=", ".join([row.panel, *names[row.run], *data]))

    @cached_property
    def methods(self) -> list[str]:
        """The methods that ran, and all that kvbench ships, in the order in which they are drawn."""
        known = {name: place for place, name in enumerate(STYLES)}
        return sorted({*choices("method"), *self.ran}, key=lambda name: (known.get(name, len(known)), name))

    @cached_property
    def ran(self) -> set[str]:
        """The methods that have an arm."""
        return {row.method for row in self.rows}

    @property
    def timed(self) -> int:
        """So many timed runs there are, of which no page is made."""
        return len(self.joined.arm) - len(self._untimed)

    @cached_property
    def _untimed(self) -> list[int]:
        return [run for run in self.joined.arm if not self.joined.timed(run)]

    def folder_names(self, run: int) -> list[str]:
        """The names of a run's folders, which are their ids; of several seeds all."""
        return [Path(path).name for path in self.joined.arm[run]["paths"]]


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Rows with the same key together, in order of appearance."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _short(key: str) -> str:
    """A setting's name without its section."""
    return key.rpartition(".")[2]


def _rank(numbers: Mapping[str, float]) -> tuple[bool, float, float]:
    """What arms of a panel are ordered by: KL, where there is some, or the score; then device memory."""
    nearness = numbers.get("kl_mean", -numbers["score"])
    return "kl_mean" not in numbers, nearness, numbers.get("device_kv_bytes", 0.0)


def better(one: Row, other: Row) -> bool:
    """Whether an arm is nearer to full attention, or scores higher, than another of its panel."""
    return _rank(one.cell.numbers)[:2] < _rank(other.cell.numbers)[:2]


# -- HTML --------------------------------------------------------------------------------------------------------------


def label_of(method: str) -> str:
    """A method's published name."""
    return style_of(method).label


def swatch(method: str) -> str:
    """A dot in the colour that the method has in the figures."""
    return f'<i class="swatch" style="--colour:{style_of(method).colour}"></i>'


def slug(name: str) -> str:
    """A method's name in a path: itself, or where it has other letters than a file of ours what is left and a hash."""
    if re.fullmatch(r"\w[\w.+-]{0,80}", name, re.ASCII) and name != "index":
        return name
    return f"{re.sub(r'[^a-zA-Z0-9_]+', '-', name)[:40].strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def linked(method: str, root: str, part: str = "") -> str:
    """A method's name, which leads to its page, or to a part of it such as "#claims"."""
    page = f"{root}methods/{slug(method)}.html{part}"
    return f'<a class="method" href="{page}">{swatch(method)}{escape(label_of(method))}</a>'


def dense_of(site: Site, run: int) -> float:
    """The share of the layers that a run leaves dense."""
    return _number(site.joined.arm[run], "dense_share")


def share_of(site: Site, row: Row, indexed: bool = False) -> float | None:
    """Per cent of the keys and values that full attention held on the device for the same samples, in the layers that
    the method selects in: none that the arm leaves dense, none with a window.

    None without full attention's bytes, where samples failed, and where dense layers hold codes of unknown size.

    Args:
        indexed: with the bytes of the method's index, wherever it lies.
    """
    alike = row.full
    if alike is not None and dense_of(site, row.run):
        alike = site.evidence.yardstick(row.run, site.joined.setting[row.run]["kv"])
    if row.full is None or alike is None:
        return None
    own, full, held = (site.joined.arm[run] for run in (row.run, row.full, alike))
    if any(missing(arm["device_kv_bytes"]) or arm["failed"] for arm in (own, full, held)):
        return None
    windowed = _number(own, "windowed_kv_bytes")
    unwindowed = 1 - _number(own, "windowed_share")
    dense = dense_of(site, row.run) / unwindowed if unwindowed > 0 else 1.0  # of the layers without a window
    whole = (full["device_kv_bytes"] - windowed) * (1 - dense)
    kept = own["device_kv_bytes"] - windowed - (held["device_kv_bytes"] - windowed) * dense
    index = _number(own, "index_bytes") if indexed else 0.0
    return float(100 * (kept + index) / whole) if whole else None


def _number(arm: Mapping[str, Any], name: str) -> float:
    """A number of an audit, 0 where it says nothing."""
    return 0.0 if missing(arm[name]) else float(arm[name])


def protocols(site: Site) -> str:
    """A line for each panel: on how many samples of which lengths, computed in what, on which machine."""
    lines = []
    for panel in dict.fromkeys(row.panel for row in site.rows):
        own = [row.run for row in site.rows if row.panel == panel]
        hopeless = any(row.is_hopeless for row in site.rows if row.panel == panel)
        setting, arms = site.joined.setting[own[0]], [site.joined.arm[run] for run in own]
        counts = sorted({int(arm["n"]) for arm in arms})
        lengths = "" if missing(setting.get("task.lengths")) else f" of {words_of(setting['task.lengths'])} tokens"
        dense = {site.joined.setting[run]["dense_layers"] for run in own} - {"[]"}
        places = sorted({str(arm["measured_on"]) for arm in arms if not missing(arm["measured_on"])})
        facts = [
            f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} samples{lengths}",
            f"{setting['dtype']}",
            f"layers {words_of(min(dense))} dense" if len(dense) == 1 else "",
            f"up to {setting['batch']} together, whose bytes and times these are" if setting["batch"] > 1 else "",
            f"on {' and '.join(places).replace(', 1 threads', ', 1 thread')}" if places else "",
            "an interval of so few is their range" if counts[-1] <= RANGE_UP_TO and counts[-1] > 1 else "",
            HOPELESS if hopeless else "",
        ]
        lines.append(f"<li><b>{escape(panel)}</b>: {escape('; '.join(filter(None, facts)))}</li>")
    slow = any(site.joined.setting[row.run]["device"] == "cpu" for row in site.rows)
    told = "<li>Times on a CPU are no guide to those on a GPU.</li>" if slow else ""
    return f'<ul class="notes">{"".join(lines)}{told}</ul>'


def words_of(listed: str) -> str:
    """A setting that is a list, such as "[2048,4096]", in words."""
    numbers = listed.strip("[]").split(",")
    return " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))


def cell_of(row: Row, name: str, look: str = "") -> str:
    """A number of an arm as a report's tables show it, with its whole value and its run; a dash where there is none."""
    numbers, run = row.cell.numbers, ids_of(Path(path).name for path in row.cell.run.split("; "))
    column = f' data-name="{name}"'
    if name not in numbers:
        return f'<td{column} class="{f"none {look}".strip()}">{NONE}</td>'
    column += f' class="{look}"' if look else ""
    ends = "".join(
        f' data-{end}="{numbers[key]!r}"'
        for end, key in zip(("low", "high"), ends_of(name), strict=True)
        if key in numbers
    )
    first, _, rest = text(row.table, row.cell, name, 0).partition(" ")
    if name == "score" and "low" in numbers:
        rest = f"{text(row.table, row.cell, 'interval', 0)} {rest}".rstrip()
    return f'<td{column} data-value="{numbers[name]!r}"{ends} data-run="{run}">{escape(first)}{small(rest)}</td>'


def ids_of(names: Iterable[str]) -> str:
    """Names of run folders as an attribute holds them."""
    return escape(" ".join(names))


def ends_of(name: str) -> tuple[str, str]:
    """What the ends of a number's interval are called in a cell."""
    return ("low", "high") if name == "score" else (f"{name}_low", f"{name}_high")


def small(words: str) -> str:
    """Words that stand small behind others, or nothing."""
    return f" <small>{escape(words)}</small>" if words else ""


def figure(path: str, words: str) -> str:
    """A picture with words below it, which a small screen opens alone to look at it closely."""
    path = escape(path)
    return (
        f'<figure><a href="{path}"><img loading="lazy" src="{path}" alt="{words}"></a>'
        f"<figcaption>{words}.</figcaption></figure>"
    )


def table_of(head: str, lines: Iterable[str], look: str = "") -> str:
    """A table that scrolls by itself where the screen is narrow.

    Args:
        head: the headings, HTML of one row; "": none.
        lines: the rows, HTML.
        look: its class.
    """
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table class="{look}">{top}<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>'


def page(path: str, title: str, site: Site, sections: Mapping[str, str], body: str) -> File:
    """A whole page.

    Args:
        path: from the site's folder.
        title: its heading.
        site: for what stands below every page.
        sections: of the site, their first page by their name.
        body: HTML.
    """
    root = "../" * path.count("/")
    here = path.partition("/")[0]
    nav = "".join(
        f'<a href="{root}{first}"{" aria-current=page" if first.partition("/")[0] == here else ""}>{escape(name)}</a>'
        for name, first in sections.items()
    )
    about = f"Made by kvbench {kvbench.__version__} from {len(site.runs.arms)} runs below {site.folders}."
    return File(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="kvbench"><title>{escape(title)} - kvbench</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="{root}site.css"></head><body>
<header><a class="home" href="{root}index.html">kvbench</a><nav>{nav}</nav></header>
<main><h1>{escape(title)}</h1>
{body}
</main><footer>{escape(about)}</footer><script src="{root}site.js"></script></body></html>
""",
    )
