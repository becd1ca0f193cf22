"""Score and KL from full attention as two measures of one axis, of the figures `read` and `frontier`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.report.data.run import Run
from kvbench.report.data.stats import Estimate
from kvbench.runs.quantities import QUANTITIES

KL = QUANTITIES["kl_mean"]
LEAST_KL = 1e-5  # nats; what is nearer is drawn there, and its name says so

Found = Callable[[Run], Estimate | None]
MEASURES: Sequence[tuple[str, Found]] = (("score", Run.score), (KL.name, Run.kl))


def at_least(kl: Estimate) -> Estimate:
    """A KL divergence as a log axis has room for it."""
    low, high = (None if end is None else max(end, LEAST_KL) for end in (kl.low, kl.high))
    return kl._replace(mean=max(kl.mean, LEAST_KL), low=low, high=high)
