"""Pictures of the audit: what a budget came to, and how good a method is for the bytes that a step reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.evidence import Evidence
from kvbench.report.data.frame import YARDSTICK, Runs, missing
from kvbench.report.data.stats import COVERAGE, Estimate
from kvbench.report.figures.labels import GAP, End, name_ends
from kvbench.report.figures.panels import (
    Series,
    arms_for,
    draw_intervals,
    finished,
    grid,
    line_look,
    mark_powers,
    panels_of,
    series_of,
)
from kvbench.report.figures.tradeoff import FRONT, draw_front
from kvbench.runs.quantities import MIB, QUANTITIES

SHARE, KL = QUANTITIES["attended_share"], QUANTITIES["kl_mean"]
READ = f"KV read per step ({MIB.name})"
WHAT = (
    "KV read: attended in all layers, and scanned to choose; thin lines: with all of the method's index; dashed: front"
)
LEAST_KL = 1e-5  # nats; what is nearer is drawn there, and its name says so
WIDE, TALL = 6.6, 3.4  # inches of a panel with names beside it, and of its axis at least


def attended(runs: Runs) -> Figure:
    """What was attended over the budget, against the budget: 1 is what was asked for."""
    arms = arms_for(runs, "attended", probed=False, scored=True)
    arms = arms[arms[SHARE.name].notna()]
    if not len(arms):
        raise ConfigError(f"figure=attended: no run with a budget among {len(runs.arms)} runs")
    panels = panels_of("attended", runs, arms)
    lines = [list(series_of(runs, own)) for _, own in panels]
    tall = _tall(lines)
    size = (WIDE, tall + 0.9)
    figure, axes = grid(math.ceil(len(panels) / 2), min(2, len(panels)), "measured over nominal budget", size)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, own), series in zip(axes.flat, panels, lines, strict=False):
        axis.axhline(1, color=FRONT["color"], linewidth=1, linestyle="--", zorder=1)
        axis.set(title=title, xlabel="budget C (tokens)", ylabel=f"{SHARE.title}, mean over KV heads, layers and steps")
        ends = []
        for one in series:
            x, y = one.arms["budget_tokens"].astype(float), one.arms[SHARE.name].astype(float)
            axis.plot(x, y, **line_look(one.style))
            ends.append(End(one.label(), one.style, x.iloc[-1], y.iloc[-1]))
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        mark_powers(axis, own["budget_tokens"].astype(float))
        name_ends(axis, ends, tall)
    return finished(figure, axes, [own for _, own in panels], named=True)


def read(runs: Runs) -> Figure:
    """Score, and KL from full attention, against the bytes of KV that a decode step reads; a row for each panel."""
    arms = arms_for(runs, "read", probed=False, scored=True)
    evidence = Evidence(runs)
    arms = arms.assign(read=[bytes_read(evidence, run) for run in arms.index])
    arms = arms[arms["read"].notna()]
    if (arms["method"] == YARDSTICK).all():
        raise ConfigError("figure=read: no run of a sparse method whose audit has attended_bytes_per_step")
    panels = panels_of("read", runs, arms)
    lines = [list(series_of(runs, own)) for _, own in panels]
    both = arms[KL.name].notna().any()
    measures = MEASURES if both else MEASURES[:1]
    title = (
        f"nearness over bytes read, with {COVERAGE} % intervals; left and {'up or down' if both else 'up'} is better"
    )
    tall = _tall(lines)
    figure, axes = grid(len(panels), len(measures), f"{title}\n{WHAT}", (WIDE, tall + 0.9))
    for (title, _), row, series in zip(panels, axes, lines, strict=True):
        for axis, (name, found) in zip(row, measures, strict=False):
            axis.set(title=title, xlabel=READ, ylabel=QUANTITIES[name].axis)
            _draw(axis, series, name, partial(found, evidence), tall)
    return finished(figure, axes, [own for _, own in panels], named=True)


def _tall(lines: Sequence[Sequence[Series]]) -> float:
    """Height of an axis that has room for the names beside it."""
    return max(TALL, GAP * max(map(len, lines)))


def bytes_read(evidence: Evidence, run: int) -> float:
    """Bytes of KV that a decode step of a run reads on average; NaN where its audit does not say.

    What is attended in all layers, as it is held (`kv=`), and what the method scanned of the stored keys. What a method
    reads of an index of its own is in no audit.
    """
    own = evidence.runs.arm[run]
    attended = own["attended_bytes_per_step"]
    scanned = 0.0 if missing(own["read_bytes_per_step"]) else own["read_bytes_per_step"]
    return math.nan if missing(attended) else float(attended + scanned)


Found = Callable[[Evidence, int], Estimate | None]
MEASURES: Sequence[tuple[str, Found]] = (("score", Evidence.score), (KL.name, Evidence.kl))


def _draw(axis: Any, series: Sequence[Series], name: str, found: Callable[[int], Estimate | None], tall: float) -> None:
    """One measure of arms over the bytes they read, with names beside the lines and the Pareto front."""
    ends, costs, values = [], [], []
    for one in series:
        known = {run: value for run in one.arms.index if (value := found(run)) and (name == "score" or value.mean > 0)}
        if not known:
            continue
        near = [value if name == "score" else at_least(value) for value in known.values()]
        own = one.arms.loc[list(known)]
        x, index = MIB.scale * own["read"], MIB.scale * own["index_bytes"].astype(float).fillna(0)
        draw_intervals(axis, one, x, near)
        axis.hlines([value.mean for value in near], x, x + index, color=one.style.colour, linewidth=0.6, alpha=0.6)
        last = int(x.to_numpy().argmax())
        below = f" (below {LEAST_KL:g})" if name != "score" and near[last].mean == LEAST_KL else ""
        ends.append(End(f"{one.label()}{below}", one.style, x.iloc[last], near[last].mean))
        costs += list(x)
        values += [value.mean for value in near]
    if not costs:
        axis.set_title("")
        axis.set_axis_off()  # a task without this measure
        return
    axis.set(**({"ylim": (-5, 105)} if name == "score" else {"yscale": "log"}))
    right = axis.get_xlim()[1]
    mark_powers(axis, [2.0**octave for octave in range(math.floor(math.log2(min(costs))), math.ceil(math.log2(right)))])
    draw_front(axis, costs, values, more_is_better=name == "score")
    name_ends(axis, ends, tall)


def at_least(kl: Estimate) -> Estimate:
    """A KL divergence as a log axis has room for it."""
    low, high = (None if end is None else max(end, LEAST_KL) for end in (kl.low, kl.high))
    return Estimate(max(kl.mean, LEAST_KL), low, high, kl.n)
