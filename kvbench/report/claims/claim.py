"""The claims of the papers, as `published/claims.yaml` has them. Nothing here reads a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from kvbench.report.data.papers import FOLDER

KINDS = ("runs", "printed", "file")  # where a criterion's number is from
ERROR = 5.0  # per cent: how often an interval may miss the truth, over all looks at its samples


class Bed(NamedTuple):
    """Runs of one kind, in which claims are measured.

    Attributes
    ----------
    words
        that its runs share, as on the command line.
    command
        that makes them.
    """

    words: tuple[str, ...]
    command: str


@dataclass(frozen=True)
class Criterion:
    """A number, and the bounds between which its whole interval must lie.

    One without bounds is information: it stands beside the others and decides nothing.

    Attributes
    ----------
    description
        the number, in words.
    kind
        of `KINDS`.
    spec
        how the number is made.
    at_least, at_most
        the bounds; None: none.
    n
        samples, at least.
    device
        whose runs alone decide, "cuda": a number of another device stands beside; None: any.
    looks
        after how many samples it was looked at, the last time among them, where more were taken
        after a look. Each look spends an equal part of `ERROR` (Bonferroni, the most cautious of
        group sequential designs).
    """

    description: str
    kind: str
    spec: Any
    at_least: float | None = None
    at_most: float | None = None
    n: int = 1
    device: str | None = None
    looks: tuple[int, ...] = ()

    @property
    def decides(self) -> bool:
        """Whether the claim stands or falls with it."""
        return self.at_least is not None or self.at_most is not None

    @property
    def coverage(self) -> float:
        """Of its interval, per cent, so that no look errs more often than `ERROR` in all."""
        return 100 - ERROR / max(1, len(self.looks))

    @property
    def bounds_text(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


class Superseded(NamedTuple):
    """Criteria that once decided a claim.

    Attributes
    ----------
    criteria
        as they were.
    why
        they no longer decide, in words.
    """

    criteria: tuple[Criterion, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what decides it here.

    Attributes
    ----------
    id
        "ice-1".
    claim
        in our words.
    source
        paper, sections and tables.
    kind
        "accuracy", "latency", ...
    original
        why the paper's own setting is not testable here, so that the verdict is its stand-in's; ""
        where it is the claim's own.
    criteria
        all that decide must hold; none: what the paper measured is not testable here.
    design
        how many samples of which seeds decide it, set before the first of them was taken.
    weaker
        what the evidence lacks.
    favours, against
        methods, beside its own paper's, that look better or worse if it holds.
    superseded
        criteria that decided it before these.
    """

    id: str
    claim: str
    source: str
    kind: str
    original: str
    criteria: tuple[Criterion, ...]
    weaker: str
    design: str = ""
    favours: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    superseded: Superseded = Superseded()


@functools.cache
def beds() -> dict[str, Bed]:
    """The beds by name."""
    return {
        name: Bed(tuple(bed["runs"].split()), bed["command"])
        for name, bed in _read()["beds"].items()
    }


@functools.cache
def claims() -> tuple[Claim, ...]:
    """All claims, paper after paper."""
    return tuple(_claim(id, entry) for id, entry in _read()["claims"].items())


@functools.cache
def _read() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / "claims.yaml").read_text(encoding="utf-8"))
    return document


def _claim(id: str, entry: Mapping[str, Any]) -> Claim:
    criteria, before = (
        tuple(
            criterion
            for criterion_entry in part.get("criteria", ())
            for criterion in _criteria(criterion_entry)
        )
        for part in (entry, entry.get("superseded", {}))
    )
    words: dict[str, Any] = {
        key: str(entry.get(key, ""))
        for key in ("claim", "source", "kind", "original", "weaker", "design")
    }
    words |= {key: tuple(entry.get(key, ())) for key in ("favours", "against")}
    superseded = Superseded(before, entry["superseded"]["why"]) if before else Superseded()
    return Claim(id, criteria=criteria, superseded=superseded, **words)


def _criteria(entry: Mapping[str, Any]) -> list[Criterion]:
    """The criteria of an entry: one, or one for each of its arms."""
    (kind,) = set(KINDS) & set(entry)
    description, spec = entry["about"], entry[kind]
    bounds = {key: entry[key] for key in ("at_least", "at_most", "n", "device") if key in entry}
    bounds["looks"] = tuple(entry.get("looks", ()))
    if "each" not in entry:
        return [Criterion(description, kind, spec, **bounds)]
    return [
        Criterion(description.format(arm=arm), kind, {**spec, "of": arm}, **bounds)
        for arm in entry["each"]
    ]
