"""The figure `stability`: how much of a selection a store could keep from earlier steps."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.report.data.run import Runs
from kvbench.report.figures.steps import probes_over_steps


def stability(runs: Runs) -> Figure:
    """How much of a selection was selected before, over decode steps (LycheeCluster, Fig. 9)."""
    return probes_over_steps(runs, "stability", ["jaccard", "seen"])
