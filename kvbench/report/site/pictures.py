"""The page of pictures: budgets, bytes, lost attention, long answers, and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from kvbench.config import choices
from kvbench.report.claims.page import OURS, SHIPPED, shipped_runs
from kvbench.report.data.run import Runs
from kvbench.report.figures.all import draw, draw_file, drawn
from kvbench.report.figures.interactive import interactive
from kvbench.report.site.pages import File, Page
from kvbench.report.site.rows import Site
from kvbench.runs.stored import DAMAGED, ResultsError

INTERACTIVE = "interactive.html"
MOST_METHODS = 20  # that a reader can distinguish in one picture
# Of more than that, a method of each kind.
REPRESENTATIVES = {
    *("full", "topk", "streaming_llm", "snapkv", "snapkv_racc", "h2o", "quest", "arkvale"),
    *("lychee", "icecache", "icecache_plus", "pariskv", "pqcache", "clusterkv", "magicpig"),
}


class Shown(NamedTuple):
    """A figure of the page.

    Attributes
    ----------
    question
        its heading.
    caption
        what it shows, a clause.
    longest
        a task, of which the runs with the most `task.steps` are drawn; "": all runs are.
    file
        measurements that kvbench ships, of which it is drawn; "": it is drawn of runs.
    archive
        of the runs that kvbench ships, drawn where a site's own make no such picture.
    """

    question: str
    caption: str
    longest: str = ""
    file: str = ""
    archive: str = "claims.tar.xz"


SHOWN = {
    "attended": Shown(
        "What does a budget come to?", "Entries attended over C, against the C that was asked for"
    ),
    "frontier": Shown(
        "What does a byte buy?", "KL, or the score, against the share of full attention's bytes"
    ),
    "read": Shown(
        "What does nearness cost?",
        "How near each method stays for the keys and values that a decode step reads",
    ),
    "question": Shown(
        "Does it survive a question that comes after?",
        "Score by when the question is read: with the context, or after it was compressed",
        archive="question.tar.xz",
    ),
    "lost": Shown(
        "Where is attention lost?", "Attention on what was not selected, by layer and query head"
    ),
    "drift": Shown(
        "Does it stay as near?",
        "KL from full attention over the longest answers",
        longest="fidelity",
    ),
    "written": Shown(
        "How long are the answers?", "New tokens of an answer, and how many end in a loop"
    ),
    "breakeven": Shown(
        "From where is it faster?", "Time of a token against the length of the context"
    ),
    "search": Shown(
        "What does a search find in its time?",
        "Recall against time, beside that of reading",
        file="bench_index_cpu.json",
    ),
    "published": Shown(
        "Is it as published?", "Published scores against ours; a letter says what differs"
    ),
}


def pictures(site: Site) -> Iterator[File | Page]:
    """The page with its pictures: of the site's runs, or else of those that kvbench ships."""
    shots = {}
    for name, shown in SHOWN.items():
        image, note = _drawn(site, name, shown)
        if image:
            yield File(f"pictures/{name}.svg", image)
            shots[name] = {"question": shown.question, "caption": f"{shown.caption}{note}"}
    moving = _interactive(site.without_submissions(site.joined))
    if moving:
        yield File(f"pictures/{INTERACTIVE}", moving)
    words = {"shots": shots, "interactive": INTERACTIVE if moving else ""}
    yield Page("pictures/index.html", "Pictures", "pictures.html", words)


def _interactive(runs: Runs) -> str:
    """The page whose marks say what they are; "" where it cannot be made of these runs."""
    try:
        return interactive(runs)
    except (ResultsError, *DAMAGED):
        return ""


def legible(runs: Runs) -> Runs:
    """The runs of as many methods as a picture has room for, a user's own among them."""
    methods = {run.arm["method"] for run in runs}
    if len(methods) <= MOST_METHODS:
        return runs
    shown = REPRESENTATIVES | (methods - choices("method").keys())
    return runs.only(run for run in runs if run.arm["method"] in shown)


def picture(make: Callable[[], Figure]) -> bytes:
    """A figure as SVG whose text is text; b"" where the runs are not to be drawn in it."""
    try:
        with rc_context({"svg.fonttype": "none"}):
            return drawn(make(), "svg")
    except (ResultsError, *DAMAGED):  # of which a ConfigError is one
        return b""  # not from these runs, or not as kvbench writes them; the tables stand


def _drawn(site: Site, name: str, shown: Shown) -> tuple[bytes, str]:
    """A figure, b"" where there is none, and a note on whose runs it is of."""
    image = (
        b""
        if shown.file
        else picture(
            lambda: draw(name, _chosen(site.without_submissions(site.joined), shown.longest))
        )
    )
    return (image, "") if image else (_of_shipped(name), f" ({OURS})")


@cache
def _of_shipped(name: str) -> bytes:
    """A figure of what kvbench ships; b"" where it was installed without that."""
    shown = SHOWN[name]
    if shown.file:
        return picture(partial(draw_file, name, [SHIPPED / shown.file]))
    runs = shipped_runs(SHIPPED / shown.archive)
    return b"" if runs is None else picture(lambda: draw(name, _chosen(runs, shown.longest)))


def _chosen(runs: Runs, longest: str) -> Runs:
    """The runs to draw."""
    if longest:
        steps = {run: int(run.settings["task.steps"]) for run in runs if run.arm["task"] == longest}
        runs = runs.only([run for run, many in steps.items() if many == max(steps.values())])
    return legible(runs)
