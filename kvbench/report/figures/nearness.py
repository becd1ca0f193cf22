"""Score and KL from full attention over a cost, a line a method, for `read` and `frontier`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from kvbench.report.data.run import Run, Runs
from kvbench.report.data.stats import Estimate, intervals
from kvbench.report.figures.labels import End, name_ends
from kvbench.report.figures.panels import (
    Panel,
    Series,
    draw_intervals,
    fit_scores,
    log_y,
    mark_powers,
    ranking,
)
from kvbench.report.figures.pareto import draw_front
from kvbench.runs.quantities import QUANTITIES

KL = QUANTITIES["kl_mean"]
LEAST_KL = 1e-5  # nats; what is nearer is drawn there, and its name says so

EstimateOf = Callable[[Run], Estimate | None]
Measured = tuple[Panel, str, EstimateOf]  # a panel, and a measure of its arms by name


def at_least(kl: Estimate) -> Estimate:
    """A KL divergence as a log axis has room for it."""
    low, high = (None if end is None else max(end, LEAST_KL) for end in (kl.low, kl.high))
    return kl._replace(mean=max(kl.mean, LEAST_KL), low=low, high=high)


def measured(runs: Runs, panels: Sequence[Panel]) -> list[Measured]:
    """Each panel with each measure that says something there.

    These are scores that rank methods, and KL where it is known.
    """
    scores = {panel.title: panel for panel in ranking(runs, panels)}
    measures: list[Measured] = []
    for panel in panels:
        if panel.title in scores:
            measures.append((scores[panel.title], "score", Run.score))
        if any((kl := runs[run].kl()) and kl.mean > 0 for run in panel.arms.index):
            measures.append((panel, KL.name, Run.kl))
    return measures


class Curve(NamedTuple):
    """A line as it was drawn: cost and value of each of its arms, by run."""

    series: Series
    costs: pd.Series
    values: pd.Series


def draw_curves(
    axis: Any,
    runs: Runs,
    series: Sequence[Series],
    costs: pd.Series,
    measure: str,
    estimate_of: EstimateOf,
) -> list[Curve]:
    """Lines of a measure over a cost, with intervals.

    An arm that is at 0 of a measure which is best there has no place on its log axis.

    Parameters
    ----------
    costs
        of each arm, by run.
    """
    more, curves = measure == "score", []
    for line in series:
        estimates = {run: value for run in line.arms.index if (value := estimate_of(runs[run]))}
        if not more:
            estimates = {run: at_least(kl) for run, kl in estimates.items() if kl.mean > 0}
        if estimates:
            x = costs.loc[list(estimates)]
            draw_intervals(axis, line, x, list(estimates.values()))
            y = pd.Series({run: value.mean for run, value in estimates.items()})
            curves.append(Curve(line, x, y))
    return curves


def finish_curves(
    axis: Any, curves: Sequence[Curve], all_curves: Sequence[Curve], measure: str, tall: float
) -> None:
    """Scales of an axis of curves, the Pareto front of all curves of its task, and names.

    A name stands beside the end of its line where that cost most.

    Parameters
    ----------
    tall
        height of the axis in inches.
    """
    more = measure == "score"
    costs = [cost for curve in all_curves for cost in curve.costs]
    values = [value for curve in all_curves for value in curve.values]
    (fit_scores if more else log_y)(axis)
    right = axis.get_xlim()[1]
    octaves = range(math.floor(math.log2(min(costs))), math.ceil(math.log2(right)))
    mark_powers(axis, [2.0**octave for octave in octaves])
    draw_front(axis, costs, values, more_is_better=more)
    ends = []
    for series, x, y in curves:
        last = x.idxmax()
        below = f" (below {LEAST_KL:g})" if not more and y[last] == LEAST_KL else ""
        ends.append(End(f"{series.label()}{below}", series.style, x[last], y[last]))
    name_ends(axis, ends, tall)


def intervals_of(runs: Runs, drawn: Sequence[Measured]) -> str:
    """What the intervals of these measures are called."""
    estimates = (of(runs[run]) for panel, _, of in drawn for run in panel.arms.index)
    return intervals(filter(None, estimates))
