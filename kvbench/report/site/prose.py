"""What the pages of `docs/` say of a method, of its paper's open choices, and of adding one."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from kvbench.config import shipped_folder

CHOICE = "Where the paper"  # how the heading of a section on deviations begins


def readme_entry(method: str) -> Markup:
    """What a page of `docs/methods/` says of a method, or ""."""
    pages = sorted((shipped_folder("docs") / "methods").glob("*.md"))
    entries = (entry for page in pages for entry in re.split(r"\n\s*\n", _text(page)))
    own = (html(entry) for entry in entries if entry.startswith(f"`{method}` "))
    return next(own, Markup(""))


def choices_taken(target: str) -> Markup:
    """Where a method's paper or code leaves a choice, and which was taken.

    It is from the method's page; "" without one.

    Parameters
    ----------
    target
        its class, such as "methods.icecache.IceCache".
    """
    package, module = target.split(".")[:2]
    page = shipped_folder("docs") / "methods" / f"{module}.md" if package == "methods" else Path()
    sections = re.split(r"^## ", _text(page), flags=re.MULTILINE)
    return Markup("").join(
        html(section.partition("\n")[2]) for section in sections if section.startswith(CHOICE)
    )


def document(path: Path) -> tuple[str, Markup]:
    """The title of a page, and all that follows it as HTML."""
    title, rest = _text(path).removeprefix("# ").split("\n", 1)
    return title, html(rest)


def html(markdown: str) -> Markup:
    """Markdown as HTML; of links the words alone: they lead to files outside the site."""
    return Markup(_markdown().render(markdown))


@functools.cache
def _markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    for name in ("link_open", "link_close", "image"):
        parser.add_render_rule(name, _nothing)
    return parser


def _nothing(*_: Any) -> str:
    return ""


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
