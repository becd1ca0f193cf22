"""What the pages of `docs/` say, as HTML.

What a method is, where its paper leaves a choice, how to add one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from kvbench.config import docs_dir

CHOICE = "Where the paper"  # how the heading of a section on deviations begins


def readme_entry(method: str) -> str:
    """What a page of `docs/methods/` says of a method, or ""."""
    pages = sorted((docs_dir() / "methods").glob("*.md"))
    entries = (entry for page in pages for entry in _blocks(_text(page)))
    return next((html(entry) for entry in entries if entry.startswith(f"`{method}` ")), "")


def choices_taken(target: str) -> str:
    """Where a method's paper or code leaves a choice, and which was taken.

    It is from the method's page; "" without one.

    Parameters
    ----------
    target
        its class, such as "methods.icecache.IceCache".
    """
    package, module = target.split(".")[:2]
    page = docs_dir() / "methods" / f"{module}.md" if package == "methods" else Path()
    sections = re.split(r"^## ", _text(page), flags=re.MULTILINE)
    return "".join(
        html(section.partition("\n")[2]) for section in sections if section.startswith(CHOICE)
    )


def document(path: Path) -> tuple[str, str]:
    """The title of a page, and all that follows it as HTML.

    Headings, paragraphs, lists and code are known.
    """
    title, rest = _text(path).removeprefix("# ").split("\n", 1)
    parts = []
    for place, part in enumerate(re.split(r"^```.*\n", rest, flags=re.MULTILINE)):
        if place % 2:
            parts.append(f"<pre><code>{escape(part, quote=False)}</code></pre>")
            continue
        for section in re.split(r"^(?=## )", part, flags=re.MULTILINE):
            heading = re.match(r"## (.*)\n", section)
            parts.append(f"<h2>{_inline(heading[1])}</h2>" if heading else "")
            parts.append(html(section[heading.end() :] if heading else section))
    return title, "\n".join(filter(None, parts))


def html(markdown: str) -> str:
    """Paragraphs and lists with code; of links the words: they lead to files outside the site."""
    out, listed = [], False
    for block in _blocks(markdown):
        item = block.startswith("- ")
        if item != listed:
            out.append("<ul>" if item else "</ul>")
            listed = item
        words = _inline(block.removeprefix("- "))
        out.append(f"<li>{words}</li>" if item else f"<p>{words}</p>")
    return "\n".join([*out, *(["</ul>"] if listed else [])])


def _inline(words: str) -> str:
    words = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", escape(words, quote=False))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", words)


def _blocks(markdown: str) -> Iterator[str]:
    """Paragraphs and items, each on one line; tables, headings and code are left out."""
    for block in re.split(r"\n\s*\n|\n(?=- )", markdown.strip()):
        if block and not block.lstrip().startswith(("|", "#", "```", "!")):
            yield " ".join(block.split())


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
