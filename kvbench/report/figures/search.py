"""The figure `search`: what a search finds in its time, and the time to read as much.

It draws what `scripts/bench_index.py` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.report.data.style import ORANGE, PURPLE, Style, styles_of
from kvbench.report.figures.panels import grid, legend, line_look, of_script
from kvbench.report.figures.pareto import FRONT

# The arms of the script that are drawn: IceCache's trees as their presets rank nodes, and faiss on
# the same keys.
TREES = styles_of(["icecache", "icecache_plus"])
ARMS = {
    "dci point": TREES["icecache"],
    "dci_plus centroid": TREES["icecache_plus"],
    "faiss_hnsw": Style("faiss, HNSW", ORANGE, "v"),
    "faiss_ivf": Style("faiss, IVF", PURPLE, "o"),
}
SAME_BYTES: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.8}
ALL = {**FRONT, "linestyle": ":"}


def search(files: Sequence[Path]) -> Figure:
    """Recall of the exact top k against the time of one query.

    There is a row for each kind of keys and a column for each number of them. A point is a beam
    width, or faiss's efSearch or nprobe. A thin line is the time to read the nodes and keys that it
    scored at the pace of one pass over all keys; what lies in a cache is read faster than that.

    Parameters
    ----------
    files
        the script's JSON.

    Raises
    ------
    ConfigError
        it is not.
    """
    runs = of_script(files, "search", "bench_index", _runs)
    kinds, sizes = (list(dict.fromkeys(names)) for names in zip(*runs, strict=True))
    title = "recall of the exact top k against the time of a query, on one thread"
    figure, axes = grid(len(kinds), len(sizes), title, 1.9)
    for row, kind in zip(axes, kinds, strict=True):
        for axis, size in zip(row, sizes, strict=True):
            axis.set_title(f"{size:,} keys, {kind}")
            if (kind, size) in runs:
                _draw(axis, runs[kind, size])
            else:
                axis.set_title("")
                axis.set_axis_off()
        row[0].set_ylabel("recall")
    for axis in axes[-1]:
        axis.set_xlabel("time of a query (us)")
    words = "the same bytes at the pace of one pass over all keys"
    pace = Line2D([], [], color=FRONT["color"], label=words, **SAME_BYTES)
    return legend(figure, axes, "", [pace])


def _runs(results: Any) -> dict[tuple[Any, Any], Any]:
    runs = {(run["keys"], run["n"]): _single_queries(run) for run in results["runs"]}
    if not runs:
        raise LookupError
    return runs


def _single_queries(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The numbers of queries that are asked one by one."""
    numbers: Mapping[str, Any] = next(group for group in run["groups"] if group["group"] == 1)
    return numbers


def _draw(axis: Any, numbers: Mapping[str, Any]) -> None:
    for arm, style in ARMS.items():
        points = sorted(numbers["points"].get(arm, []), key=lambda point: point["recall"])
        recall = [point["recall"] for point in points]
        look = {**line_look(style), "markersize": 3, "linewidth": 1}
        axis.plot([point["query_us"] for point in points], recall, label=style.label, **look)
        if points and "floor_us" in points[0]:
            look = {"color": style.colour, "linestyle": style.line, **SAME_BYTES}
            axis.plot([point["floor_us"] for point in points], recall, **look)
    axis.axvline(numbers["stream_us"], label="one pass over all keys", **FRONT)
    axis.axvline(numbers["flat_us"], label="faiss, all keys scored", **ALL)
    axis.set(xscale="log", ylim=(-0.03, 1.03))
    axis.grid(alpha=0.3)
