"""HTML that the pages of a site share: the frame around them, tables, and cells with numbers.

A number stands in a cell with its name, its whole value and its run, so that whoever reads the page
can find it again; the script sorts and filters by these.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import kvbench
from kvbench.models.hub import weights_origin
from kvbench.report.data.run import Run, missing
from kvbench.report.data.stats import FEWEST
from kvbench.report.data.style import style_of
from kvbench.report.site.rows import Row, Site, by_panel
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
    """A method's name in a path.

    A name with other letters than a file of ours becomes what is left of it and a hash.
    """
    if re.fullmatch(r"\w[\w.+-]{0,80}", name, re.ASCII) and name != "index":
        return name
    plain = re.sub(r"[^a-zA-Z0-9_]+", "-", name)[:40].strip("-")
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def linked(method: str, root: str, part: str = "") -> str:
    """A method's name, which leads to its page, or to a part of it such as "#claims"."""
    page = f"{root}methods/{slug(method)}.html{part}"
    return f'<a class="method" href="{page}">{swatch(method)}{escape(label_of(method))}</a>'


def protocols(site: Site) -> str:
    """A list of the panels with the facts on their samples."""
    lines = [
        f"<li><b>{escape(panel)}</b>: {escape('; '.join(_facts(rows)))}</li>"
        for panel, rows in by_panel(site.rows).items()
    ]
    if any(row.run.settings["device"] == "cpu" for row in site.rows):
        lines.append("<li>Times on a CPU are no guide to those on a GPU.</li>")
    return f'<ul class="notes">{"".join(lines)}</ul>'


def _facts(rows: Sequence[Row]) -> Iterator[str]:
    """What is to be known of the samples of a panel, and of how they ran."""
    settings, arms = rows[0].run.settings, [row.run.arm for row in rows]
    counts, lengths = sorted({int(arm["n"]) for arm in arms}), settings.get("task.lengths")
    several = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    of = "" if missing(lengths) else f" of {words_of(str(lengths))} tokens"
    yield f"{several} samples{of}"
    yield str(settings["dtype"])
    if words := weights_origin(str(settings["model.revision"])):
        yield f"weights {words}"
    dense = {row.run.settings["dense_layers"] for row in rows} - {"[]"}
    if len(dense) == 1:
        yield f"layers {words_of(min(dense))} dense"
    if settings["batch"] > 1:
        yield f"up to {settings['batch']} together, whose bytes and times these are"
    if places := {str(arm["measured_on"]) for arm in arms if not missing(arm["measured_on"])}:
        yield f"on {' and '.join(sorted(places))}".replace(", 1 threads", ", 1 thread")
    if counts[-1] < FEWEST:
        yield f"too few to rank methods, which takes {FEWEST} or more"
    if any(_is_ranged(row.run) for row in rows):
        yield "beside a number stands the range of so few"
    for why in dict.fromkeys(row.unranked for row in rows if row.unranked):
        yield f"{why}, so no method is named best and none has a place"


def _is_ranged(run: Run) -> bool:
    return any(estimate is not None and estimate.is_range for estimate in (run.score(), run.kl()))


def words_of(listed: str) -> str:
    """A setting that is a list, such as "[2048,4096]", in words."""
    numbers = listed.strip("[]").split(",")
    return " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))


def cell_of(row: Row, name: str, look: str = "") -> str:
    """A number of an arm as tables show it, with its whole value and its run; a dash for none."""
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
    shown = text(row.table, row.cell, name, 0).split(" ", 1)
    if name == "score" and "score_low" in numbers:
        shown.insert(1, text(row.table, row.cell, "interval", 0))
    return (
        f'<td{column} data-value="{numbers[name]!r}"{ends}'
        f' data-run="{run}">{escape(shown[0])}{small(" ".join(shown[1:]))}</td>'
    )


def ids_of(names: Iterable[str]) -> str:
    """Names of run folders as an attribute holds them."""
    return escape(" ".join(names))


def small(words: str) -> str:
    """Words that stand small after others, or nothing."""
    return f" <small>{escape(words)}</small>" if words else ""


def items(texts: Iterable[str]) -> str:
    """Texts as the items of a list."""
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def definitions(entries: Mapping[str, str]) -> str:
    """What names mean, HTML by HTML, as a list of definitions."""
    return "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in entries.items())


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
        f'<a href="{root}{first}"{" aria-current=page" * (first.partition("/")[0] == here)}>'
        f"{escape(name)}</a>"
        for name, first in sections.items()
    )
    footer = (
        f"Made by kvbench {kvbench.__version__} from {len(site.runs.arms)} runs below"
        f" {site.folders}."
    )
    return File(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="kvbench"><title>{escape(title)} - kvbench</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="{root}site.css"></head><body>
<header><a class="home" href="{root}index.html">kvbench</a><nav>{nav}</nav></header>
<main><h1>{escape(title)}</h1>
{body}
</main><footer>{escape(footer)}</footer><script src="{root}site.js"></script></body></html>
""",
    )
