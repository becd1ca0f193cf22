"""The papers' claims: which are about a method, and a page for each with what decides it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvbench.report.claims.claim import Claim, Criterion, beds
from kvbench.report.claims.page import Judged, Part, counted, unmeasured
from kvbench.report.claims.power import lacks
from kvbench.report.claims.sampled import arms_of, is_time, runs_of
from kvbench.report.claims.verdict import Finding, Missing, Setting, Verdict
from kvbench.report.site.pages import Page, PageNumber, begin, grouped, label
from kvbench.report.site.rows import Site

LOOKS = {Verdict.HOLDS: "ahead", Verdict.FAILS: "behind"}
TURNED = {"ahead": "behind", "behind": "ahead"}
ITS_PAPER, NEITHER = "its own paper's", "neither for nor against it"
AGAINST = "against it"
# of other papers' claims: the field that names the methods
SIDES = {"for it": "favours", AGAINST: "against"}


def by_side(site: Site, method: str) -> dict[str, list[Judged]]:
    """The claims about a method by side.

    These are its own paper's, and those of others for it, against it, and neither.
    """
    sides: dict[str, list[Judged]] = {side: [] for side in (ITS_PAPER, *SIDES, NEITHER)}
    for judged in site.judged:
        if concerns_method(judged.claim, method):
            sides[_side(judged.claim, method)].append(judged)
    return {side: some for side, some in sides.items() if some}


def _side(claim: Claim, method: str) -> str:
    if is_of(claim, method):
        return ITS_PAPER
    return next((side for side, key in SIDES.items() if method in getattr(claim, key)), NEITHER)


def concerns_method(claim: Claim, method: str) -> bool:
    """Whether a claim is about a method.

    It is of the method's own paper, says something for or against it, or is decided by its arms.
    """
    return (
        is_of(claim, method) or method in (*claim.favours, *claim.against) or _names(claim, method)
    )


def is_of(claim: Claim, method: str) -> bool:
    """Whether a claim is one of the method's own paper."""
    return claim.source.partition(",")[0] == label(method)


def _names(claim: Claim, method: str) -> bool:
    return any(
        re.search(rf"\bmethod=(\w+,)*{re.escape(method)}\b", str(criterion.spec))
        for criterion in claim.criteria
    )


def counts(claims: Sequence[Judged]) -> str:
    """How many claims have each verdict, in words; those that a stand-in decided are apart."""
    parts = []
    for setting, by_verdict in counted(claims).items():
        words = ", ".join(f"{count} {verdict.of(count)}" for verdict, count in by_verdict.items())
        parts.append(f"of a stand-in {words}" if words and setting is Setting.STAND_IN else words)
    return "; ".join(filter(None, parts))


def look(judged: Judged, side: str = "") -> str:
    """How a verdict looks; one for a claim against a method the other way round to it."""
    colour = LOOKS.get(judged.verdict, "open")
    return TURNED.get(colour, colour) if side == AGAINST else colour


class CriterionResult(NamedTuple):
    """A criterion as its page shows it.

    Attributes
    ----------
    criterion, verdict
        and what its own verdict is.
    look
        how that looks.
    missing
        why nothing was measured, or "".
    numbers
        the measured one, its ends, and the samples.
    source
        where they are from: ids of runs by role, a file, or a paper's tables.
    """

    criterion: Criterion
    verdict: Verdict
    look: str
    missing: str = ""
    numbers: tuple[PageNumber | None, ...] = ()
    source: dict[str, str] = {}


def claim_pages(site: Site) -> Iterator[Page]:
    """The pages, and one that leads to them by verdict."""
    by_verdict = grouped(site.judged, lambda judged: judged.verdict)
    yield Page(
        "claims/index.html",
        "Do the papers' claims hold?",
        "claims_index.html",
        {
            "claims": {
                verdict.value: by_verdict[verdict] for verdict in Verdict if verdict in by_verdict
            },
            "count": len(site.judged),
            "counts": counts(site.judged),
            "unmeasured": unmeasured(site.judged),
            "look": look,
        },
    )
    for judged in site.judged:
        claim = judged.claim
        undecided = judged.criteria if judged.verdict is Verdict.UNDECIDED else []
        words = {
            criterion.description: lacks(criterion, finding, judged.runs)
            for criterion, finding, _ in undecided
        }
        yield Page(
            f"claims/{claim.id}.html",
            begin(claim.claim),
            "claim.html",
            {
                "judged": judged,
                "look": look,
                "results": _results(judged, judged.criteria),
                "notes": _notes(judged.criteria),
                "superseded": _results(judged, judged.superseded),
                "superseded_notes": _notes(judged.superseded),
                "lacking": {name: why for name, why in words.items() if why},
                "arms": _arms(judged),
                "commands": dict.fromkeys(
                    [*(_command(part[0]) for part in judged.criteria), "kvbench report --claims"]
                ),
                "methods": [name for name in site.methods if concerns_method(claim, name)],
            },
        )


def _results(judged: Judged, parts: Sequence[Part]) -> list[CriterionResult]:
    decides = parts is judged.criteria
    results = []
    for place, (criterion, finding, verdict) in enumerate(parts):
        colour = LOOKS.get(verdict, "open") if decides else "open"
        if isinstance(finding, Missing):
            results.append(
                CriterionResult(criterion, verdict, colour, finding.why.partition("; ")[0])
            )
            continue
        numbers = {"value": finding.value, "low": finding.low, "high": finding.high}
        shown = [
            None if number is None else PageNumber(name, number, f"{number:.3g}")
            for name, number in numbers.items()
        ]
        few = f"of {criterion.n}" if finding.n < criterion.n else ""
        shown.append(PageNumber("n", finding.n, f"{finding.n:.3g}", few))
        source = {"claim": judged.claim.id, "part" if decides else "superseded": str(place)}
        source |= _source(judged, criterion)
        results.append(CriterionResult(criterion, verdict, colour, "", tuple(shown), source))
    return results


def _notes(parts: Sequence[Part]) -> list[str]:
    notes = [part[1].note for part in parts if isinstance(part[1], Finding)]
    return list(dict.fromkeys(filter(None, notes)))


def _source(judged: Judged, criterion: Criterion) -> dict[str, str]:
    if criterion.kind == "file":
        return {"file": criterion.spec["file"]}
    if criterion.kind == "printed":
        return {"paper": " ".join(_printed_tables(criterion))}
    roles = {}
    for role, arms in arms_of(criterion.spec).items():
        folders = [_folder_names(judged, criterion, arm) for arm in arms]
        roles[role] = " ".join(
            name for some in folders if not isinstance(some, Missing) for name in some
        )
    return roles


def _folder_names(judged: Judged, criterion: Criterion, arm: str) -> list[str] | Missing:
    """The names of the folders of an arm's runs."""
    runs = runs_of(judged.runs, criterion.spec["bed"], arm, times=is_time(criterion.spec["value"]))
    return runs if isinstance(runs, Missing) else [run.arm["path"].name for run in runs]


def _arms(judged: Judged) -> dict[tuple[str, str], dict[str, Any]]:
    """The arms that its numbers are of, with their runs; what did not run says so."""
    lines = {}
    for criterion in (criterion for criterion, *_ in judged.criteria if criterion.kind == "runs"):
        shared = " ".join(beds()[criterion.spec["bed"]].words)
        for arm in (arm for arms in arms_of(criterion.spec).values() for arm in arms):
            folders = _folder_names(judged, criterion, arm)
            absent = isinstance(folders, Missing)
            lines[shared, arm] = {
                "why": folders.why.partition("; ")[0] if isinstance(folders, Missing) else "",
                "runs": [] if absent else folders,
            }
    return lines


def _command(criterion: Criterion) -> str:
    if criterion.kind == "runs":
        return beds()[criterion.spec["bed"]].command
    if criterion.kind == "file":
        return f"{criterion.spec['command']} | tail -1 > results/{criterion.spec['file']}"
    return "\n".join(f"kvbench report --paper {name}" for name in _printed_tables(criterion))


def _printed_tables(criterion: Criterion) -> Sequence[str]:
    (rule,) = criterion.spec.values()
    tables: Sequence[str] = rule.get("tables") or [rule["table"]]
    return tables
