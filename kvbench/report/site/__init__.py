"""A static site of runs: a start page, a leaderboard, claims, methods, pictures, pairs of arms.

`kvbench report FOLDER --out site/` writes it. Nothing of it needs a server or is fetched from
elsewhere. A further kind of page is a function of `Site` that yields files, and a line of `PAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import kvbench
from kvbench.config import ConfigError
from kvbench.report.data.run import Runs
from kvbench.report.site.board import board
from kvbench.report.site.claims import claim_pages
from kvbench.report.site.files import check, write_files
from kvbench.report.site.front import front
from kvbench.report.site.methods import method_pages
from kvbench.report.site.pages import File, Page
from kvbench.report.site.pictures import pictures
from kvbench.report.site.rows import Site
from kvbench.report.site.samples import samples
from kvbench.report.site.submitted import PATH, add_yours, submissions
from kvbench.report.submissions.checked import Submission

ASSETS = ("site.css", "site.js")


class Pages(NamedTuple):
    """One kind of page.

    Attributes
    ----------
    first
        path of the page that the site's navigation leads to.
    make
        all pages and what they need.
    """

    first: str
    make: Callable[[Site], Iterator[File | Page]]


PAGES = {
    "Start": Pages("index.html", front),
    "Leaderboard": Pages("leaderboard.html", board),
    "Claims": Pages("claims/index.html", claim_pages),
    "Methods": Pages("methods/index.html", method_pages),
    "Pictures": Pages("pictures/index.html", pictures),
    "Two arms": Pages("samples/index.html", samples),
    "Add yours": Pages("add.html", add_yours),
}
OF_OTHERS = {"Runs of others": Pages(PATH, submissions)}  # of a site that has some


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
        (path for run in runs for path in run.arm["paths"] if _lies_in(path, out)), None
    ):
        raise ConfigError(f"--out {out}: holds the run {run_path}; name a folder beside the runs")
    site = Site(runs, folders, submitted)
    if not site.rows:
        raise ConfigError(
            f"--out {out}: timed runs alone make no site; --out report.html shows them"
        )
    kinds = PAGES | (OF_OTHERS if submitted else {})
    shared = {
        "nav": {name: pages.first for name, pages in kinds.items()},
        "version": kvbench.__version__,
        "total": len(runs.arms),
        "folders": folders,
    }
    files = [
        file.rendered(**shared) if isinstance(file, Page) else file
        for pages in kinds.values()
        for file in pages.make(site)
    ]
    files += [File(name, Path(__file__).with_name(name).read_bytes()) for name in ASSETS]
    write_files(out, files)


def _lies_in(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


__all__ = ["PAGES", "check", "write"]
