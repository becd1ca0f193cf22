"""The control: random tokens as many as a method keeps, over which its score is a gain."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.report.data.run import OF_SPARSE, Run, missing

CONTROL = "random"


def control_of(run: Run, among: Iterable[Run]) -> Run | None:
    """The run of random tokens on the same samples with the same budget, counted alike, or None.

    Of several that which protects most of the prompt's ends, then without probes, with the most
    samples, the newest.
    """
    controls = (
        candidate
        for candidate in among
        if candidate.arm["method"] == CONTROL and candidate.kind == run.kind
    )
    matches = [candidate for candidate in controls if _counted(candidate) == _counted(run)]
    return max(
        matches,
        key=lambda candidate: (
            protected(candidate),
            not candidate.arm["probe_every"],
            candidate.arm["n"],
            candidate.arm["updated"],
        ),
        default=None,
    )


def protected(run: Run) -> float:
    """The share of C that a run keeps at each end of the prompt; 0 where its method does not."""
    share = run.settings.get("method.protect")
    return 0.0 if missing(share) else float(share)  # type: ignore[arg-type]


def _counted(run: Run) -> tuple[str, ...]:
    """The budget, and what else decides how much of a prompt it is."""
    return tuple(run.label(key) for key in ("budget", "kv", *OF_SPARSE))
