"""The page of pictures: budgets, bytes, lost attention, long answers, and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

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


# Of each figure of the page the question that it answers, and what it shows, a clause.
SHOWN = {
    "attended": (
        "What does a budget come to?",
        "Entries attended over C, against the C that was asked for",
    ),
    "frontier": (
        "What does a byte buy?",
        "KL, or the score, against the share of full attention's bytes",
    ),
    "read": (
        "What does nearness cost?",
        "How near each method stays for the keys and values that a decode step reads",
    ),
    "question": (
        "Does it survive a question that comes after?",
        "Score by when the question is read: with the context, or after it was compressed",
    ),
    "lost": (
        "Where is attention lost?",
        "Attention on what was not selected, by layer and query head",
    ),
    "drift": ("Does it stay as near?", "KL from full attention over the longest answers"),
    "written": (
        "How long are the answers?",
        "New tokens of an answer, and how many end in a loop",
    ),
    "breakeven": (
        "From where is it faster?",
        "Time of a token against the length of the context",
    ),
    "search": (
        "What does a search find in its time?",
        "Recall against time, beside that of reading",
    ),
    "published": (
        "Is it as published?",
        "Published scores against ours; a letter says what differs",
    ),
}
LONGEST = {"drift": "fidelity"}  # tasks of which the runs with the most `task.steps` are drawn
FILES = {"search": "bench_index_cpu.json"}  # measurements that it is drawn of, instead of runs
# The runs that kvbench ships, drawn where a site's own make no such picture.
ARCHIVES = dict.fromkeys(SHOWN, "claims.tar.xz") | {"question": "question.tar.xz"}


def pictures(site: Site) -> Iterator[File | Page]:
    """The page with its pictures: of the site's runs, or else of those that kvbench ships."""
    shots = {}
    runs = site.without_submissions(site.joined)
    for name, (question, caption) in SHOWN.items():
        image, note = _of_runs(name, runs), ""
        if not image:
            image, note = _of_shipped(name), f" ({OURS})"
        if image:
            yield File(f"pictures/{name}.svg", image)
            shots[name] = {"question": question, "caption": f"{caption}{note}"}
    try:
        moving = interactive(runs)  # whose marks say what they are
    except (ResultsError, *DAMAGED):
        moving = ""  # it cannot be made of these runs
    if moving:
        yield File(f"pictures/{INTERACTIVE}", moving)
    words = {"shots": shots, "interactive": INTERACTIVE if moving else ""}
    yield Page("pictures/index.html", "Pictures", "pictures.html", words)


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


def _of_runs(name: str, runs: Runs) -> bytes:
    """A figure of these runs; b"" without one."""
    return b"" if name in FILES else picture(lambda: draw(name, _chosen(name, runs)))


def _chosen(name: str, runs: Runs) -> Runs:
    """The runs of a figure: the longest where that says so, of the methods that are shown."""
    if task := LONGEST.get(name):
        steps = {run: int(run.settings["task.steps"]) for run in runs if run.arm["task"] == task}
        runs = runs.only([run for run, many in steps.items() if many == max(steps.values())])
    return legible(runs)


@cache
def _of_shipped(name: str) -> bytes:
    """A figure of what kvbench ships; b"" where it was installed without that."""
    if name in FILES:
        return picture(partial(draw_file, name, [SHIPPED / FILES[name]]))
    runs = shipped_runs(SHIPPED / ARCHIVES[name])
    return b"" if runs is None else _of_runs(name, runs)
