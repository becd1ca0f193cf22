"""The pages on runs of others: how to add yours, and what was found in each submission."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.config import shipped_folder
from kvbench.report.site.pages import Page, slug
from kvbench.report.site.prose import document
from kvbench.report.site.rows import Site
from kvbench.report.submissions.checked import CHECKS, Submission

PATH = "submissions.html"


def add_yours(site: Site) -> Iterator[Page]:
    """The tutorial on a method of one's own: from nothing to a row."""
    title, body = document(shipped_folder("docs") / "tutorials" / "own_method.md")
    yield Page("add.html", title, "document.html", {"body": body})


def submissions(site: Site) -> Iterator[Page]:
    """What each submission gave, or by what it fails."""
    data = {"checks": CHECKS, "submissions": site.submitted}
    yield Page(PATH, "Runs of others", "submissions.html", data)


def anchor(submission: Submission) -> str:
    """The part of the page that is about a submission."""
    return f"{PATH}#{slug(submission.name)}"
