"""The figure `frontier`: where a bit buys more than a token, by share of full attention's bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.config import ConfigError
from kvbench.memory.kinds import KINDS
from kvbench.report.data.run import Runs
from kvbench.report.data.sizes import share_of_full
from kvbench.report.data.style import BLACK, COLOURS, MARKERS, Style, style_of
from kvbench.report.figures.labels import height_for
from kvbench.report.figures.nearness import (
    EstimateOf,
    draw_curves,
    finish_curves,
    intervals_of,
    measured,
)
from kvbench.report.figures.panels import (
    MOST_LINES,
    Panel,
    Series,
    arms_for,
    finished,
    panels_of,
    refuse_crowd,
    series_of,
    tiled,
)
from kvbench.report.figures.pareto import front
from kvbench.runs.quantities import QUANTITIES

X_LABEL = "held (% of full attention's native bytes)"
WHAT = (
    "held: keys and values in both tiers, and the index; dotted: full attention's; dashed: the"
    " front of all methods of a task, the same in each of its panels"
)
# Of `kv`, in the order of `KINDS`, then of those that differ by tier.
KIND_COLOURS = (
    *(BLACK, *COLOURS[:-1], "#44AA99", "#AA4499", "#B59F00", "#661100", "#6699CC", "#117733"),
    *("#DDCC77", COLOURS[-1]),
)
MOST_PANELS = 12


class Measure(NamedTuple):
    """What the axes of one task show: all its arms, a measure, and the panels that share them."""

    whole: Panel
    name: str
    estimate_of: EstimateOf
    panels: list[tuple[Panel, list[Series]]]


def frontier(runs: Runs) -> Figure:
    """KL from full attention over bytes held; the score where there is no KL.

    There is a panel for each task and model, with a line a method. Where keys and values are held
    in several ways there is a panel for each method, with a line for each way.
    """
    arms = arms_for(runs, "frontier", probed=False, scored=True)
    arms = arms.assign(share=[share_of_full(runs[run]) for run in arms.index]).dropna(
        subset=["share"]
    )
    if not len(arms):
        raise ConfigError(
            "figure=frontier: no run with an audit that counts bytes, beside one of method=full on"
            " the same samples"
        )
    arms = arms.assign(kv=runs.settings.loc[arms.index, "kv"].map(str))
    coded = arms["kv"].nunique() > 1
    found = measured(runs, panels_of("frontier", runs, arms, lines="" if coded else "method"))
    near = {panel.title for panel, name, _ in found if name != "score"}
    styles = _styles(arms["kv"])
    drawn = [
        Measure(
            whole,
            name,
            estimate_of,
            [*_by_method(whole, name, styles)] if coded else [(whole, [*series_of(runs, whole)])],
        )
        for whole, name, estimate_of in found
        if name != "score" or whole.title not in near
    ]
    panels = [panel for measure in drawn for panel, _ in measure.panels]
    refuse_crowd("frontier", len(panels), "tasks, models and methods", MOST_PANELS)
    bars = intervals_of(runs, [(whole, name, of) for whole, name, of, _ in drawn])
    tall = height_for(max(len(lines) for measure in drawn for _, lines in measure.panels))
    figure, axes = tiled(
        len(panels), f"where a bit buys more than a token; with {bars}", tall + 0.6
    )
    remaining = iter(axes.flat)
    for measure in drawn:
        _draw(runs, measure, [next(remaining) for _ in measure.panels], tall)
    return finished(figure, axes, panels, named=True, notes=[WHAT])


def _styles(there: pd.Series) -> dict[str, Style]:
    """How each way to hold keys and values is drawn in all panels."""
    kinds = [kind for kind in KINDS["device"] if kind in set(there)]
    kinds += sorted(set(there) - set(kinds))
    looks = zip(kinds, KIND_COLOURS * len(kinds), MARKERS * len(kinds), strict=False)
    return {kind: Style(kind, colour, marker) for kind, colour, marker in looks}


def _by_method(
    whole: Panel, measure: str, styles: dict[str, Style]
) -> Iterator[tuple[Panel, list[Series]]]:
    """A panel for each method, with a line for each way to hold keys and values.

    Of more than a panel has room for those are taken that come nearest to the front.
    """
    for method, arms in whole.arms.groupby("method", sort=False):
        lines = {kind: group.sort_values("budget") for kind, group in arms.groupby("kv")}
        kinds = sorted(lines, key=list(styles).index)
        title = f"{style_of(str(method)).label}, {whole.title}"
        notes = whole.notes
        if len(kinds) > MOST_LINES:
            nearest = _nearest(arms, measure)
            kinds = [kind for kind in kinds if kind in nearest]
            words = f"{len(kinds)} of {len(lines)} ways to hold keys and values"
            notes = (*notes, f"{words}, those nearest to the front: --where kv=... chooses others")
        series = [Series(styles[kind], "", lines[kind]) for kind in kinds]
        shown = pd.concat([one.arms for one in series])
        yield whole._replace(title=title, arms=shown, notes=notes), series


def _nearest(arms: pd.DataFrame, measure: str) -> list[str]:
    """The ways to hold keys and values with arms on the front, then on what is the front without
    those, as many as a panel has room for.
    """
    nearest: list[str] = []
    while len(arms) and len(nearest) < MOST_LINES:
        shares, values = list(arms["share"]), list(arms[measure].astype(float))
        corners = set(front(shares, values, measure == "score"))
        places = zip(shares, values, strict=True)
        is_corner = pd.Series([place in corners for place in places], arms.index)
        nearest += [kind for kind in arms["kv"][is_corner].unique() if kind not in nearest]
        arms = arms[~is_corner]
    return nearest[:MOST_LINES]


def _draw(runs: Runs, measure: Measure, axes: Sequence[Any], tall: float) -> None:
    """The panels of a task, all of one extent and with one front."""
    whole, name, estimate_of, panels = measure
    drawn = [
        draw_curves(axis, runs, lines, whole.arms["share"], name, estimate_of)
        for axis, (_, lines) in zip(axes, panels, strict=True)
    ]
    every = [curve for curves in drawn for curve in curves]
    for axis in axes[1:]:
        axis.sharex(axes[0])
        axis.sharey(axes[0])
    for axis, (panel, _) in zip(axes, panels, strict=True):
        axis.set(title=panel.title, xlabel=X_LABEL, ylabel=QUANTITIES[name].axis)
        axis.axvline(100, color=BLACK, linestyle=":", linewidth=0.8)
    for axis, curves in zip(axes, drawn, strict=True):
        finish_curves(axis, curves, every, name, tall)
