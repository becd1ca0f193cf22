"""The figure `capacity`: tokens a second of as many requests as fit into a memory.

It draws what `scripts/bench_capacity.py` prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
DECODING, ALL = "decode_tokens_per_s", "tokens_per_s"
AT_ONCE = "decode_at_once"
WHAT = (
    (
        "numbers: requests at once; lines: passes that read no prompt; dotted: all passes, prompts"
        " included"
    ),
    "upright: from this memory on full attention is as fast",
)
Arms = dict[str, dict[int, Mapping[str, Any]]]  # by method and MiB


class Workload(NamedTuple):
    """What a panel is of: so many requests of a model under an engine.

    Attributes
    ----------
    tokens, answer
        of a prompt, and of its answer.
    lengths
        "equal", or how the prompts' lengths differ.
    """

    engine: str
    model: str
    tokens: int
    answer: int
    lengths: str
    requests: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Workload:
        """That of a line of the script's JSON."""
        return cls(
            engine=str(line["engine"]),
            model=str(line["model"]),
            tokens=int(line["tokens"]),
            answer=int(line["answer"]),
            lengths=str(line["lengths"]),
            requests=int(line["requests"]),
        )

    @property
    def title(self) -> str:
        """In two lines."""
        size = f"{'' if self.lengths == 'equal' else 'up to '}{self.tokens:,} + {self.answer:,}"
        engine = ENGINES.get(self.engine, self.engine)
        return f"{self.model}\n{self.requests} x {size} tokens, {engine}"


def capacity(files: Sequence[Path]) -> Figure:
    """Tokens a second over the memory for keys and values.

    There is a panel for each engine, model and length, and a line for each arm.

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
    for axis, (workload, arms) in zip(axes.flat, panels.items(), strict=False):
        axis.set(title=workload.title, ylabel="tokens a second")
        axis.set_xlabel("memory for keys and values (MiB)")
        _draw(
            axis, arms, styles, {method: crossed.get((workload, method)) for method in arms}, tall
        )
    letters = int(1.1 * TO_AN_INCH * figure.get_figwidth())
    return legend(figure, axes, "\n".join(textwrap.fill(line, letters) for line in WHAT))


def _cells(
    results: Any,
) -> tuple[dict[Workload, Arms], dict[tuple[Workload, str], float | None]]:
    """The arms of each panel, and by panel and method where full attention catches up, in MiB."""
    panels = _panels(results["cells"])
    if not panels:
        raise LookupError
    crossings = [crossing for crossing in results["crossings"] if crossing["by"] == DECODING]
    return panels, {
        (Workload.of(crossing), crossing["method"]): crossing["memory_mib"]
        for crossing in crossings
    }


def _panels(cells: Sequence[Mapping[str, Any]]) -> dict[Workload, Arms]:
    panels: dict[Workload, Arms] = {}
    for cell in cells:
        for method, arm in cell["arms"].items():
            rates = {name: float(arm[name]) for name in (DECODING, ALL, AT_ONCE) if name in arm}
            if rates.get(DECODING, 0) > 0:
                arms = panels.setdefault(Workload.of(cell), {})
                arms.setdefault(str(method), {})[int(cell["memory_mib"])] = rates
    return panels


def _draw(
    axis: Any,
    arms: Arms,
    styles: Mapping[str, Style],
    crossed: Mapping[str, float | None],
    tall: float,
) -> None:
    """Lines of one panel, with names at their ends.

    Beside each point stands how many requests decode at once.
    """
    ends, best = [], _best(arms)
    for method, points in arms.items():
        style, memory = styles[method], sorted(points)
        rates = [points[mib][DECODING] for mib in memory]
        axis.plot(memory, rates, **line_look(style))
        whole = [mib for mib in memory if ALL in points[mib]]
        look = {"color": style.colour, "linestyle": ":", "marker": ".", "linewidth": 1}
        axis.plot(whole, [points[mib][ALL] for mib in whole], **look)
        for mib, rate in zip(memory, rates, strict=True):
            up = rate == best[mib]
            look = {"ha": "center", "va": "bottom" if up else "top", "fontsize": SIZE}
            word, shift = f"{points[mib].get(AT_ONCE, 0):.2g}", (0, 4 if up else -4)
            at = {"textcoords": "offset points", "color": style.colour}
            axis.annotate(word, (mib, rate), shift, **look, **at)
        if crossed[method]:
            axis.axvline(crossed[method], color=style.colour, linewidth=0.6)
        ends.append(End(style.label, style, memory[-1], rates[-1]))
    axis.margins(0.08, 0.15)
    log_y(axis)
    mark_powers(axis, best)
    name_ends(axis, ends, tall)


def _best(arms: Arms) -> dict[int, float]:
    """The highest rate of all arms, by MiB."""
    best: dict[int, float] = {}
    for points in arms.values():
        for mib, rates in points.items():
            best[mib] = max(rates[DECODING], best.get(mib, 0.0))
    return best
