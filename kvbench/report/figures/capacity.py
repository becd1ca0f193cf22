"""The figure `capacity`: tokens a second of as many requests as fit into a memory (of
`scripts/bench_capacity.py`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvbench.report.data.style import Style, styles_of
from kvbench.report.figures.labels import SIZE, End, height_for, name_ends
from kvbench.report.figures.panels import (
    TO_AN_INCH,
    legend,
    line_look,
    log_y,
    mark_powers,
    of_script,
    tiled,
)

ENGINES = {"vllm": "vLLM", "hf": "KVCache"}
DECODING, ALL, AT_ONCE = "decode_tokens_per_s", "tokens_per_s", "decode_at_once"
WHAT = (
    (
        "numbers: requests at once; lines: passes that read no prompt; dotted: all passes, prompts"
        " included"
    ),
    "upright: from this memory on full attention is as fast",
)
# engine, model, tokens of a prompt and of its answer, lengths, requests
Panel = tuple[str, str, int, int, str, int]
Arms = dict[str, dict[int, Mapping[str, Any]]]  # by method and MiB


def capacity(files: Sequence[Path]) -> Figure:
    """Tokens a second over the memory for keys and values; a panel for each engine, model and
    length, a line an arm.

    Parameters
    ----------
    files
        the script's JSON.

    Raises
    ------
    ConfigError
        it is not.
    """
    panels, crossed = of_script(files, "capacity", "bench_capacity", _cells)
    styles = styles_of(dict.fromkeys(method for arms in panels.values() for method in arms))
    tall = height_for(max(map(len, panels.values())))
    figure, axes = tiled(
        len(panels), "tokens a second in equal memory for keys and values; up is better", tall + 0.6
    )
    for axis, (key, arms) in zip(axes.flat, panels.items(), strict=False):
        engine, model, tokens, answer, lengths, requests = key
        size = (
            f"{requests} x {'' if lengths == 'equal' else 'up to '}{tokens:,} + {answer:,} tokens"
        )
        axis.set(title=f"{model}\n{size}, {ENGINES.get(engine, engine)}", ylabel="tokens a second")
        axis.set_xlabel("memory for keys and values (MiB)")
        _draw(axis, arms, styles, {method: crossed.get((*key, method)) for method in arms}, tall)
    letters = int(1.1 * TO_AN_INCH * figure.get_figwidth())
    return legend(figure, axes, "\n".join(textwrap.fill(line, letters) for line in WHAT))


def _cells(results: Any) -> tuple[dict[Panel, Arms], dict[tuple[str | int, ...], float | None]]:
    """Arms of each panel, and by panel and method the MiB from which on full attention is
    as fast.
    """
    panels = _panels(results["cells"])
    if not panels:
        raise LookupError
    crossings = [crossing for crossing in results["crossings"] if crossing["by"] == DECODING]
    return panels, {
        (*_panel(crossing), crossing["method"]): crossing["memory_mib"] for crossing in crossings
    }


def _panel(line: Mapping[str, Any]) -> Panel:
    words, numbers = ("engine", "model", "lengths"), ("tokens", "answer", "requests")
    engine, model, lengths = (str(line[name]) for name in words)
    tokens, answer, requests = (int(line[name]) for name in numbers)
    return engine, model, tokens, answer, lengths, requests


def _panels(cells: Sequence[Mapping[str, Any]]) -> dict[Panel, Arms]:
    panels: dict[Panel, Arms] = {}
    for cell in cells:
        for method, arm in cell["arms"].items():
            rates = {name: float(arm[name]) for name in (DECODING, ALL, AT_ONCE) if name in arm}
            if rates.get(DECODING, 0) > 0:
                panels.setdefault(_panel(cell), {}).setdefault(str(method), {})[
                    int(cell["memory_mib"])
                ] = rates
    return panels


def _draw(
    axis: Any,
    arms: Arms,
    styles: Mapping[str, Style],
    crossed: Mapping[str, float | None],
    tall: float,
) -> None:
    """Lines of one panel, with names at their ends and the requests at once beside their points."""
    ends = []
    for method, points in arms.items():
        style, memory = styles[method], sorted(points)
        rates = [points[mib][DECODING] for mib in memory]
        axis.plot(memory, rates, **line_look(style))
        whole = [mib for mib in memory if ALL in points[mib]]
        axis.plot(
            whole,
            [points[mib][ALL] for mib in whole],
            color=style.colour,
            linestyle=":",
            marker=".",
            linewidth=1,
        )
        for mib, rate in zip(memory, rates, strict=True):
            highest = rate == max(other[mib][DECODING] for other in arms.values() if mib in other)
            look = {
                "ha": "center",
                "va": "bottom" if highest else "top",
                "fontsize": SIZE,
                "color": style.colour,
            }
            word, shift = f"{points[mib].get(AT_ONCE, 0):.2g}", (0, 4 if highest else -4)
            axis.annotate(word, (mib, rate), shift, textcoords="offset points", **look)
        if crossed[method]:
            axis.axvline(crossed[method], color=style.colour, linewidth=0.6)
        ends.append(End(style.label, style, memory[-1], rates[-1]))
    axis.margins(0.08, 0.15)
    log_y(axis)
    mark_powers(axis, [mib for points in arms.values() for mib in points])
    name_ends(axis, ends, tall)
