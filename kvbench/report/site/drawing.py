"""What a site's pictures share: which runs one has room for, and a figure as a file of the site."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib import rc_context
from matplotlib.figure import Figure

from kvbench.config import choices
from kvbench.report.data.run import Runs
from kvbench.report.figures.all import drawn
from kvbench.runs.stored import DAMAGED, ResultsError

MOST_METHODS = 20  # that a reader can distinguish in one picture
# Of more than that, a method of each kind.
REPRESENTATIVES = {
    *(
        "full",
        "topk",
        "streaming_llm",
        "snapkv",
        "snapkv_racc",
        "h2o",
        "quest",
        "arkvale",
        "lychee",
    ),
    *("icecache", "icecache_plus", "pariskv", "pqcache", "clusterkv", "magicpig"),
}


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
