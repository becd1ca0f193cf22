"""The figure `length`: how the time of a token grows with the context."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.report.data.run import CELL, Run, Runs
from kvbench.report.data.style import Style
from kvbench.report.figures.panels import (
    NOT_COMPARED,
    Panel,
    arms_for,
    curves_of,
    finished,
    line_look,
    mark_powers,
    panels_of,
    tiled,
    untimed,
)
from kvbench.runs.quantities import QUANTITIES
from kvbench.runs.summary import is_disturbed, same_machine


def length(runs: Runs) -> Figure:
    """Time per token against the length of the context.

    (IceCache, Fig. 8; LycheeCluster, Fig. 4.)
    """
    timed = arms_for(runs, "length", probed=False, columns=["tpot_ms_mean"])
    timed = timed[timed["tpot_ms_mean"].notna()]
    panels = panels_of("length", runs, timed, NOT_COMPARED | CELL, times=True, lines="method")
    curves = [
        (panel, panel_curves) for panel in panels if (panel_curves := _length_curves(runs, panel))
    ]
    if not curves:
        raise ConfigError(
            "figure=length: no task of these runs has prompts of several lengths; task.lengths sets"
            " them"
        )
    figure, axes = tiled(len(curves), "time per token against context length", 2.6)
    for axis, (panel, drawn) in zip(axes.flat, curves, strict=False):
        for label, style, times in drawn:
            axis.plot(times.index, times, label=label, **line_look(style))
        axis.set(title=panel.title, xlabel="prompt tokens", ylabel=QUANTITIES["tpot_ms_mean"].axis)
        axis.set_ylim(bottom=0)
        mark_powers(axis, [tokens for *_, times in drawn for tokens in times.index])
    return finished(figure, axes, [panel for panel, _ in curves], times=True, notes=untimed(runs))


def _length_curves(runs: Runs, panel: Panel) -> list[tuple[str, Style, pd.Series]]:
    """The median time per token by prompt tokens, with label and style; of several lengths only.

    Runs of an arm at other lengths are one curve; of a batch of several rows there is none.
    """
    curves, arms = [], dict[str, tuple[Style, list[Run]]]()
    for label, style, run in curves_of(runs, panel):
        arms.setdefault(label, (style, []))[1].append(run)
    for label, (style, arm_runs) in arms.items():
        by_length: dict[int, list[dict[str, Any]]] = {}
        for record in itertools.chain.from_iterable(run.timed_samples() for run in arm_runs):
            meta = record["meta"]
            if record.get("tpot_ms") and "length" in meta and meta.get("batch", 1) == 1:
                by_length.setdefault(meta["length"], []).append(record)
        samples = [
            record
            for same_length in by_length.values()
            for record in same_machine(same_length)
            if not is_disturbed(record)
        ]
        times = pd.DataFrame(
            {
                "length": [sample["meta"]["length"] for sample in samples],
                "tokens": [sample["prompt_tokens"] for sample in samples],
                "ms": [sample["tpot_ms"]["mean"] for sample in samples],
            }
        )
        if times["length"].nunique() > 1:
            curves.append(
                (label, style, times.groupby("length").median().set_index("tokens")["ms"])
            )
    return curves
