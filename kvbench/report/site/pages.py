"""What the pages of a site are made of: a template, plain data, and numbers that name their runs.

A number stands in a cell with its name and its value, in a row that names its runs, so that whoever
reads the page can find it again; the script sorts and filters by these.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvbench.report.data.style import style_of
from kvbench.report.html import environment, render


class File(NamedTuple):
    """One file of a site: its path from the site's folder, and what stands in it."""

    path: str
    content: str | bytes


class Page(NamedTuple):
    """A page that is still to be rendered.

    Attributes
    ----------
    path
        from the site's folder.
    title
        its heading.
    template
        the name of its template.
    data
        what the template prints.
    """

    path: str
    title: str
    template: str
    data: dict[str, Any]

    def rendered(self, **shared: Any) -> File:
        """The file of it; `shared` is what stands on every page."""
        words = {"path": self.path, "title": self.title, "root": "../" * self.path.count("/")}
        return File(self.path, render(self.template, **words, **shared, **self.data))


class PageNumber(NamedTuple):
    """A number as a table shows it.

    Attributes
    ----------
    name
        of its quantity.
    value
        unrounded, in the unit of its heading.
    text
        as it is shown.
    more
        what stands small beside it: its interval, and letters that say what is to be known of it.
    """

    name: str
    value: float
    text: str
    more: str = ""

    @property
    def exact(self) -> str:
        """The value in as many digits as a page holds."""
        return f"{self.value:.8g}"


def slug(name: str) -> str:
    """A name in a path.

    A name with other letters than a file of ours becomes what is left of it and a hash.
    """
    if re.fullmatch(r"\w[\w.+-]{0,80}", name, re.ASCII) and name != "index":
        return name
    plain = re.sub(r"[^a-zA-Z0-9_]+", "-", name)[:40].strip("-")
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def label(method: str) -> str:
    """A method's published name."""
    return style_of(method).label


def colour(method: str) -> str:
    """The colour that a method has in the figures."""
    return style_of(method).colour


def words_of(listed: str) -> str:
    """A setting that is a list, such as "[2048,4096]", in words."""
    numbers = listed.strip("[]").split(",")
    return " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))


def begin(words: str) -> str:
    """A sentence's first letter as a capital."""
    return words[:1].upper() + words[1:]


def grouped(items: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    """The items by a key, in order of appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def several(choices: dict[str, tuple[str, list[str]]]) -> dict[str, tuple[str, list[str]]]:
    """Of headings with values, by which a table is filtered, those with two values or more."""
    distinct = {key: (words, list(dict.fromkeys(some))) for key, (words, some) in choices.items()}
    return {key: both for key, both in distinct.items() if len(both[1]) > 1}


environment().filters.update(slug=slug, label=label, colour=colour, begin=begin)
