"""HTML that the pages of a site share: the frame around them, tables, and how a number of a run is
written.

A number stands in a cell with its name, its whole value and its run, so that whoever reads the page
can find it again; the script sorts and filters by these.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

import kvbench
from kvbench.models.hub import weights_origin
from kvbench.report.data.run import Run, missing
from kvbench.report.data.stats import FEWEST
from kvbench.report.data.style import style_of
from kvbench.report.site.rows import Row, Site
from kvbench.report.tables.formats import NONE, text


class File(NamedTuple):
    """One file of a site: its path from the site's folder, and what stands in it."""

    path: str
    content: str | bytes


def label_of(method: str) -> str:
    """A method's published name."""
    return style_of(method).label


def swatch(method: str) -> str:
    """A dot in the colour that the method has in the figures."""
    return f'<i class="swatch" style="--colour:{style_of(method).colour}"></i>'


def slug(name: str) -> str:
    """A method's name in a path: itself, or where it has other letters than a file of ours what is
    left and a hash.
    """
    if re.fullmatch(r"\w[\w.+-]{0,80}", name, re.ASCII) and name != "index":
        return name
    return f"{re.sub(r'[^a-zA-Z0-9_]+', '-', name)[:40].strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def linked(method: str, root: str, part: str = "") -> str:
    """A method's name, which leads to its page, or to a part of it such as "#claims"."""
    page = f"{root}methods/{slug(method)}.html{part}"
    return f'<a class="method" href="{page}">{swatch(method)}{escape(label_of(method))}</a>'


def protocols(site: Site) -> str:
    """A line for each panel: on how many samples of which lengths, computed in what, on which
    machine.
    """
    lines = []
    for panel in dict.fromkeys(row.panel for row in site.rows):
        panel_runs = [row.run for row in site.rows if row.panel == panel]
        whys = dict.fromkeys(
            row.unranked for row in site.rows if row.panel == panel and row.unranked
        )
        setting, arms = panel_runs[0].settings, [run.arm for run in panel_runs]
        counts = sorted({int(arm["n"]) for arm in arms})
        lengths = (
            ""
            if missing(setting.get("task.lengths"))
            else f" of {words_of(setting['task.lengths'])} tokens"
        )
        dense = {run.settings["dense_layers"] for run in panel_runs} - {"[]"}
        places = sorted(
            {str(arm["measured_on"]) for arm in arms if not missing(arm["measured_on"])}
        )
        facts = [
            f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} samples{lengths}",
            f"{setting['dtype']}",
            f"weights {words}" if (words := weights_origin(str(setting["model.revision"]))) else "",
            f"layers {words_of(min(dense))} dense" if len(dense) == 1 else "",
            (
                f"up to {setting['batch']} together, whose bytes and times these are"
                if setting["batch"] > 1
                else ""
            ),
            f"on {' and '.join(places).replace(', 1 threads', ', 1 thread')}" if places else "",
            f"too few to rank methods, which takes {FEWEST} or more" if counts[-1] < FEWEST else "",
            (
                "beside a number stands the range of so few"
                if any(map(_is_ranged, panel_runs))
                else ""
            ),
            *(f"{why}, so no method is named best and none has a place" for why in whys),
        ]
        lines.append(f"<li><b>{escape(panel)}</b>: {escape('; '.join(filter(None, facts)))}</li>")
    slow = any(row.run.settings["device"] == "cpu" for row in site.rows)
    warning = "<li>Times on a CPU are no guide to those on a GPU.</li>" if slow else ""
    return f'<ul class="notes">{"".join(lines)}{warning}</ul>'


def _is_ranged(run: Run) -> bool:
    return any(estimate is not None and estimate.is_range for estimate in (run.score(), run.kl()))


def words_of(listed: str) -> str:
    """A setting that is a list, such as "[2048,4096]", in words."""
    numbers = listed.strip("[]").split(",")
    return " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))


def cell_of(row: Row, name: str, look: str = "") -> str:
    """A number of an arm as a report's tables show it, with its whole value and its run; a dash
    where there is none.
    """
    numbers, run = row.cell.numbers, ids_of(Path(path).name for path in row.cell.run.split("; "))
    column = f' data-name="{name}"'
    if name not in numbers:
        return f'<td{column} class="{f"none {look}".strip()}">{NONE}</td>'
    column += f' class="{look}"' if look else ""
    column += f' data-length="{row.length}"' if row.length else ""
    ends = "".join(
        f' data-{end}="{numbers[key]!r}"'
        for end in ("low", "high")
        if (key := f"{name}_{end}") in numbers
    )
    first, _, rest = text(row.table, row.cell, name, 0).partition(" ")
    if name == "score" and "score_low" in numbers:
        rest = f"{text(row.table, row.cell, 'interval', 0)} {rest}".rstrip()
    return (
        f'<td{column} data-value="{numbers[name]!r}"{ends}'
        f' data-run="{run}">{escape(first)}{small(rest)}</td>'
    )


def ids_of(names: Iterable[str]) -> str:
    """Names of run folders as an attribute holds them."""
    return escape(" ".join(names))


def small(words: str) -> str:
    """Words that stand small after others, or nothing."""
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

    Parameters
    ----------
    head
        the headings, HTML of one row; "": none.
    lines
        the rows, HTML.
    look
        its class.
    """
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return (
        '<div class="scroll"><table'
        f' class="{look}">{top}<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>'
    )


def page(path: str, title: str, site: Site, sections: Mapping[str, str], body: str) -> File:
    """A whole page.

    Parameters
    ----------
    path
        from the site's folder.
    title
        its heading.
    site
        for what stands below every page.
    sections
        of the site, their first page by their name.
    body
        HTML.
    """
    root = "../" * path.count("/")
    here = path.partition("/")[0]
    nav = "".join(
        f'<a href="{root}{first}"{" aria-current=page" if first.partition("/")[0] == here else ""}>{escape(name)}</a>'
        for name, first in sections.items()
    )
    footer = (
        f"Made by kvbench {kvbench.__version__} from {len(site.runs.arms)} runs below"
        f" {site.folders}."
    )
    return File(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="kvbench"><title>{escape(title)} - kvbench</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="{root}site.css"></head><body>
<header><a class="home" href="{root}index.html">kvbench</a><nav>{nav}</nav></header>
<main><h1>{escape(title)}</h1>
{body}
</main><footer>{escape(footer)}</footer><script src="{root}site.js"></script></body></html>
""",
    )
