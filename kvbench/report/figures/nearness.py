"""Score and KL from full attention as measures of one axis, for `read` and `frontier`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.report.data.run import Run, Runs
from kvbench.report.data.stats import Estimate, intervals
from kvbench.report.figures.panels import Panel, ranking
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


def intervals_of(runs: Runs, drawn: Sequence[Measured]) -> str:
    """What the intervals of these measures are called."""
    estimates = (of(runs[run]) for panel, _, of in drawn for run in panel.arms.index)
    return intervals(filter(None, estimates))
