"""The figure `recall`: whether a method goes on finding the tokens with the most attention."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.report.data.run import Runs
from kvbench.report.figures.steps import probes_over_steps


def recall(runs: Runs) -> Figure:
    """Recall of the exact top tokens over decode steps (ParisKV, Fig. 1)."""
    return probes_over_steps(runs, "recall", ["recall"])
