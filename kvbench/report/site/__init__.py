"""A static site of runs: a start page, a leaderboard, claims, methods, pictures, pairs of arms.

`kvbench report FOLDER --out site/` writes it. Nothing of it needs a server or is fetched from
elsewhere. A further kind of page is a function of `Site` that yields files, and a line of `PAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import kvbench
from kvbench.config import ConfigError, shipped_folder
from kvbench.report.data.run import Runs
from kvbench.report.site.board import board
from kvbench.report.site.claims import claim_pages
from kvbench.report.site.files import check, write_files
from kvbench.report.site.front import front
from kvbench.report.site.methods import method_pages
from kvbench.report.site.pages import File, Page
from kvbench.report.site.pictures import pictures
from kvbench.report.site.prose import document
from kvbench.report.site.rows import Site
from kvbench.report.site.samples import samples
from kvbench.report.submissions.checked import CHECKS, Submission


def add_yours(site: Site) -> Iterator[Page]:
    """The tutorial on a method of one's own: from nothing to a row."""
    title, body = document(shipped_folder("docs") / "tutorials" / "own_method.md")
    yield Page("add.html", title, "document.html", {"body": body})


def submissions(site: Site) -> Iterator[Page]:
    """What each submission gave, or by what it fails."""
    data = {"checks": CHECKS, "submissions": site.submitted}
    yield Page("submissions.html", "Runs of others", "submissions.html", data)


ASSETS = ("site.css", "site.js")


# Of each kind of page the path of the one that the site's navigation leads to, and what makes all.
Kind = tuple[str, Callable[[Site], Iterator[File | Page]]]
PAGES: dict[str, Kind] = {
    "Start": ("index.html", front),
    "Leaderboard": ("leaderboard.html", board),
    "Claims": ("claims/index.html", claim_pages),
    "Methods": ("methods/index.html", method_pages),
    "Pictures": ("pictures/index.html", pictures),
    "Two arms": ("samples/index.html", samples),
    "Add yours": ("add.html", add_yours),
}
# Of a site that has some.
OF_OTHERS: dict[str, Kind] = {"Runs of others": ("submissions.html", submissions)}


def write(runs: Runs, folders: str, out: Path, submitted: Sequence[Submission] = ()) -> None:
    """Write a site; pages of an older one there that are not of this one go away.

    Parameters
    ----------
    runs
        all that shall be on it.
    folders
        that they are from, in words.
    out
        the site's folder.
    submitted
        what others gave, of which the rows are among the runs.

    Raises
    ------
    ConfigError
        the folder holds something else or cannot be written, or the runs are timed ones alone.
    """
    check(out)
    if run_path := next(
        (
            path
            for run in runs
            for path in run.arm["paths"]
            if path.resolve().is_relative_to(out.resolve())
        ),
        None,
    ):
        raise ConfigError(f"--out {out}: holds the run {run_path}; name a folder beside the runs")
    site = Site(runs, folders, submitted)
    if not site.rows:
        raise ConfigError(
            f"--out {out}: timed runs alone make no site; --out report.html shows them"
        )
    kinds = PAGES | (OF_OTHERS if submitted else {})
    shared = {
        "nav": {name: first for name, (first, _) in kinds.items()},
        "version": kvbench.__version__,
        "total": len(runs.arms),
        "folders": folders,
    }
    files = [
        file.rendered(**shared) if isinstance(file, Page) else file
        for _, make in kinds.values()
        for file in make(site)
    ]
    files += [File(name, Path(__file__).with_name(name).read_bytes()) for name in ASSETS]
    write_files(out, files)


__all__ = ["PAGES", "check", "write"]
