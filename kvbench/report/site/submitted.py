"""The pages on runs of others: how to add yours, and what was found in each submission."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from kvbench.config import docs_dir
from kvbench.report.site.markup import File, definitions, items, linked, page, slug
from kvbench.report.site.prose import document
from kvbench.report.site.rows import Site
from kvbench.report.submissions.checked import CHECKS, Submission

PATH = "submissions.html"
NO_PROOF = (
    "No check shows that a number was measured: only who runs it again can. A repeat says so beside"
    " its row."
)


def add_yours(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The tutorial on a method of one's own: from nothing to a row."""
    title, body = document(docs_dir() / "tutorials" / "own_method.md")
    yield page("add.html", title, site, sections, body)


def submissions(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """What each submission gave, or by what it fails."""
    checks = {escape(name): escape(description) for name, description in CHECKS.items()}
    body = f"""<p>Runs that others made and gave. Nothing of one is run here; it is read as data and
held against the board's own runs. {NO_PROOF}</p>
<details><summary>What was checked of each that has rows</summary><dl>{definitions(checks)}</dl>
</details>
{"".join(_section(submission) for submission in site.submitted)}"""
    yield page(PATH, "Runs of others", site, sections, body)


def anchor(submission: Submission) -> str:
    """The part of the page that is about a submission."""
    return f"{PATH}#{slug(submission.name)}"


def _section(submission: Submission) -> str:
    who, link = escape(submission.manifest.who), escape(submission.manifest.link)
    facts = {
        "by": f'<a href="{link}" rel="nofollow noopener">{who}</a>' if link else who,
        "kvbench": escape(submission.manifest.version),
        "on": escape(" and ".join(submission.machines)),
    }
    listed = definitions({name: words for name, words in facts.items() if words})
    rows = [
        f"<li>{linked(run.arm['method'], '')} {escape(run.label('budget'))},"
        f" {escape(run.label('task'))}, {run.arm['n']} samples: all checks passed; {escape(code)}"
        f" <small>{escape(run.folder_names[0])}</small></li>"
        for run, code in zip(submission.rows, submission.code, strict=True)
    ]
    remarks = [f"Taken on trust: {submission.taken_on_trust}"] * bool(submission.unread)
    remarks += [f"Repeats, and has no row of its own: {words}" for words in submission.repeats]
    failed = '<p class="warning">It fails, and gives no rows.</p>' if submission.reasons else ""
    return f"""<section id="{slug(submission.name)}"><h2>{escape(submission.name)}</h2>
<dl>{listed}</dl>{failed}
<ul>{"".join(rows)}{items([*remarks, *submission.reasons])}</ul></section>"""
