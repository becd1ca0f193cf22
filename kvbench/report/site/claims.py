"""The papers' claims: which are about a method, and a page for each with what decides it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

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
        claim = judged.claim
        if concerns_method(claim, method):
            named = (side for side, key in SIDES.items() if method in getattr(claim, key))
            sides[ITS_PAPER if is_of(claim, method) else next(named, NEITHER)].append(judged)
    return {side: some for side, some in sides.items() if some}


def concerns_method(claim: Claim, method: str) -> bool:
    """Whether a claim is about a method.

    It is of the method's own paper, says something for or against it, or is decided by its arms.
    """
    decided_by = rf"\bmethod=(\w+,)*{re.escape(method)}\b"
    return (
        is_of(claim, method)
        or method in (*claim.favours, *claim.against)
        or any(re.search(decided_by, str(criterion.spec)) for criterion in claim.criteria)
    )


def is_of(claim: Claim, method: str) -> bool:
    """Whether a claim is one of the method's own paper."""
    return claim.source.partition(",")[0] == label(method)


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


def claim_pages(site: Site) -> Iterator[Page]:
    """The pages, and one that leads to them by verdict."""
    by_verdict = grouped(site.judged, lambda judged: judged.verdict)
    claims = {verdict.value: by_verdict[verdict] for verdict in Verdict if verdict in by_verdict}
    index = {"claims": claims, "count": len(site.judged), "counts": counts(site.judged)}
    index |= {"unmeasured": unmeasured(site.judged), "look": look}
    yield Page("claims/index.html", "Do the papers' claims hold?", "claims_index.html", index)
    for judged in site.judged:
        claim = judged.claim
        undecided = judged.criteria if judged.verdict is Verdict.UNDECIDED else []
        lacking = {
            part.description: lacks(part, found, judged.runs) for part, found, _ in undecided
        }
        commands = [*(_command(part) for part, *_ in judged.criteria), "kvbench report --claims"]
        data = {
            "judged": judged,
            "look": look,
            "results": list(_results(judged, judged.criteria)),
            "notes": _notes(judged.criteria),
            "superseded": list(_results(judged, judged.superseded)),
            "superseded_notes": _notes(judged.superseded),
            "lacking": {name: why for name, why in lacking.items() if why},
            "arms": {
                (" ".join(beds()[part.spec["bed"]].words), arm): {"why": why, "runs": runs}
                for part, *_ in judged.criteria
                for _, arm, runs, why in _arms(judged, part)
            },
            "commands": dict.fromkeys(commands),
            "methods": [name for name in site.methods if concerns_method(claim, name)],
        }
        yield Page(f"claims/{claim.id}.html", begin(claim.claim), "claim.html", data)


def _results(judged: Judged, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """Each criterion with its own verdict, how that looks, and what was measured, or why nothing.

    `numbers` are the measured one, its ends, and the samples; `source` says where they are from:
    ids of runs by role, a file, or a paper's tables.
    """
    decides = parts is judged.criteria
    for place, (criterion, finding, verdict) in enumerate(parts):
        colour = LOOKS.get(verdict, "open") if decides else "open"
        result = {"criterion": criterion, "verdict": verdict, "look": colour, "source": {}}
        if isinstance(finding, Missing):
            yield {**result, "missing": finding.why.partition("; ")[0]}
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
        yield {**result, "missing": "", "numbers": shown, "source": source}


def _notes(parts: Sequence[Part]) -> list[str]:
    notes = [part[1].note for part in parts if isinstance(part[1], Finding)]
    return list(dict.fromkeys(filter(None, notes)))


def _source(judged: Judged, criterion: Criterion) -> dict[str, str]:
    if criterion.kind == "file":
        return {"file": criterion.spec["file"]}
    if criterion.kind == "printed":
        return {"paper": " ".join(_printed_tables(criterion))}
    by_role = grouped(_arms(judged, criterion), lambda arm: arm[0])
    return {role: " ".join(run for arm in arms for run in arm[2]) for role, arms in by_role.items()}


def _arms(judged: Judged, criterion: Criterion) -> Iterator[tuple[str, str, list[str], str]]:
    """The role and the words of each arm of runs, the ids of its runs, and why it has none."""
    spec = criterion.spec
    for role, arms in arms_of(spec).items() if criterion.kind == "runs" else ():
        for arm in arms:
            runs = runs_of(judged.runs, spec["bed"], arm, times=is_time(spec["value"]))
            if isinstance(runs, Missing):
                yield role, arm, [], runs.why.partition("; ")[0]
            else:
                yield role, arm, [run.arm["path"].name for run in runs], ""


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
