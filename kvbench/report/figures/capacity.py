"""The figure `capacity` of a file: tokens a second of as many requests as fit into a memory.

It draws what `scripts/bench_capacity.py` prints; of timed runs it is in `specs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from kvbench.report.data.style import Style, style_of
from kvbench.report.figures.charts import (
    Chart,
    Curve,
    Mark,
    Rule,
    Scale,
    draw_charts,
    fold_words,
    with_legend,
)

ENGINES = {"vllm": "vLLM", "hf": "KVCache"}
DECODING, ALL = "decode_tokens_per_s", "tokens_per_s"
WHAT = (
    "numbers: requests at once; lines: passes that read no prompt; dotted: all passes, prompts"
    " included",
    "upright: from this memory on full attention is as fast",
)
Workload = tuple[tuple[str, Any], ...]  # so many requests of a model under an engine


def capacity(results: Any) -> Figure:
    """Tokens a second over the memory for keys and values.

    There is a chart for each engine, model and length that ran in two memories or more, and a line
    for each arm.

    Parameters
    ----------
    results
        the script's JSON.
    """
    every = _charts(results)
    charts = [chart for chart in every if len(set(chart.places)) > 1] or every
    alone = len(every) - len(charts)
    notes = [f"not drawn: {alone} workloads in one memory alone"] * bool(alone)
    title = "tokens a second in equal memory for keys and values; up is better"
    figure, axes = draw_charts(charts, title)
    fold_words(figure, axes, named=True)
    return with_legend(figure, axes, [*WHAT, *notes], named=True)


def _charts(results: Any) -> list[Chart]:
    workloads: dict[Workload, list[Any]] = {}
    for cell in results["cells"]:
        workloads.setdefault(_workload(cell), []).append(cell)
    crossings = [one for one in results["crossings"] if one["by"] == DECODING]
    charts = [
        Chart(
            title=_title(cells[0]),
            x=Scale("memory for keys and values (MiB)", "values"),
            y=Scale("tokens a second", "log"),
            curves=curves,
            rules=[
                Rule(
                    one["memory_mib"],
                    "",
                    {"color": style_of(one["method"]).colour, "linewidth": 0.6},
                )
                for one in crossings
                if _workload(one) == workload and one["memory_mib"]
            ],
            named=True,
        )
        for workload, cells in workloads.items()
        if (curves := list(_curves(cells)))
    ]
    if not charts:
        raise LookupError
    return charts


def _workload(line: Mapping[str, Any]) -> Workload:
    """What a line of the script's JSON shares with others of its chart."""
    keys = ("engine", "model", "tokens", "answer", "lengths", "requests")
    return tuple((key, line[key]) for key in keys)


def _title(cell: Mapping[str, Any]) -> str:
    upto = "" if cell["lengths"] == "equal" else "up to "
    size = f"{upto}{cell['tokens']:,} + {cell['answer']:,} tokens"
    engine = ENGINES.get(cell["engine"], cell["engine"])
    return f"{cell['model']}: {cell['requests']} x {size}, {engine}"


def _curves(cells: Sequence[Mapping[str, Any]]) -> Iterator[Curve]:
    """The line of each method, and a dotted one of its passes with prompts."""
    by_memory = sorted(cells, key=lambda cell: cell["memory_mib"])
    for method in dict.fromkeys(name for cell in cells for name in cell["arms"]):
        arms = [
            (float(cell["memory_mib"]), cell["arms"][method])
            for cell in by_memory
            if method in cell["arms"]
        ]
        decoding = [
            Mark(memory, float(arm[DECODING]), words=f"{arm.get('decode_at_once', 0):.2g}")
            for memory, arm in arms
            if float(arm[DECODING]) > 0
        ]
        if decoding:
            style = style_of(method)
            yield Curve(style.label, style, decoding, method=method)
            whole = [Mark(memory, float(arm[ALL])) for memory, arm in arms if ALL in arm]
            if whole:
                yield Curve("", Style("", style.colour, ".", ":"), whole, method=method)
