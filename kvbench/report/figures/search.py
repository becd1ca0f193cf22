"""The figure `search`: what a search finds in its time, and the time to read as much.

It draws what `scripts/bench_index.py` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from kvbench.report.data.style import STYLES, Style
from kvbench.report.figures.charts import (
    FRONT,
    Chart,
    Curve,
    Mark,
    Rule,
    Scale,
    draw_charts,
    with_legend,
)

# The arms of the script that are drawn: IceCache's trees as their presets rank nodes, and faiss on
# the same keys.
ARMS = {
    "dci point": STYLES["icecache"],
    "dci_plus centroid": STYLES["icecache_plus"],
    "faiss_hnsw": Style("faiss, HNSW", "#3B6EA8", "v"),
    "faiss_ivf": Style("faiss, IVF", "#C4453C", "o"),
}
ALL = {**FRONT, "linestyle": ":"}


def search(results: Any) -> Figure:
    """Recall of the exact top k against the time of one query.

    There is a chart for each kind and number of keys. A point is a beam width, or faiss's efSearch
    or nprobe. A line without markers is the time to read the nodes and keys that the arm of its
    colour scored at the pace of one pass over all keys; what lies in a cache is read faster.

    Parameters
    ----------
    results
        the script's JSON.
    """
    charts = _charts(results)
    title = "recall of the exact top k against the time of a query, on one thread"
    figure, axes = draw_charts(charts, title, 1.9, across=3)
    words = "lines without markers: the same bytes at the pace of one pass over all keys"
    return with_legend(figure, axes, [words])


def _charts(results: Any) -> list[Chart]:
    charts = [
        Chart(
            title=f"{run['n']:,} keys, {run['keys']}",
            x=Scale("time of a query (us)", "log"),
            y=Scale("recall", "share"),
            curves=list(_curves(numbers)),
            rules=(
                Rule(numbers["stream_us"], "one pass over all keys", FRONT),
                Rule(numbers["flat_us"], "faiss, all keys scored", ALL),
            ),
        )
        for run in results["runs"]
        for numbers in run["groups"]
        if numbers["group"] == 1  # queries that come one by one
    ]
    if not charts:
        raise LookupError
    return charts


def _curves(numbers: Mapping[str, Any]) -> Iterator[Curve]:
    """The curve of each arm, and that of the pace at which its bytes can be read."""
    for arm, style in ARMS.items():
        points = sorted(numbers["points"].get(arm, []), key=lambda point: point["recall"])
        if not points:
            continue
        yield Curve(style.label, style, [Mark(p["query_us"], p["recall"]) for p in points])
        if "floor_us" in points[0]:
            plain = Style("", style.colour, "")
            yield Curve("_", plain, [Mark(p["floor_us"], p["recall"]) for p in points])
