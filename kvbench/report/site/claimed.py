"""Claims on a page: lists of them, each with its verdict and a link to its page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from kvbench.report.claims.claim import Claim
from kvbench.report.claims.page import Judged, unmeasured
from kvbench.report.claims.verdict import Verdict
from kvbench.report.site.markup import label_of, small
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
    return claim.source.partition(",")[0] == label_of(method)


def _names(claim: Claim, method: str) -> bool:
    return any(
        re.search(rf"\bmethod=(\w+,)*{re.escape(method)}\b", str(criterion.spec))
        for criterion in claim.criteria
    )


def counted(claims: Sequence[Judged]) -> str:
    """How many claims have each verdict, in words, with those that a stand-in decided."""
    counts = {verdict: sum(judged.verdict is verdict for judged in claims) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.of(count)}" for verdict, count in counts.items() if count)


def incomplete(site: Site) -> str:
    """What is missing for claims that are not measured, as a paragraph; "" where nothing is."""
    why = unmeasured(site.judged)
    return f"<p><b>{escape(why)}</b></p>" if why else ""


def shown(judged: Judged, turned: bool = False) -> str:
    """A verdict as HTML, coloured; turned: as it looks to a method that the claim is against."""
    look = LOOKS.get(judged.verdict, "open")
    return f'<b class="{TURNED.get(look, look) if turned else look}">{escape(judged.shown)}</b>'


def listed(claims: Iterable[Judged], root: str, turned: bool = False) -> str:
    """Claims under one another, each with its verdict; a claim leads to its page."""
    lines = (
        f"<li>{shown(judged, turned)} <a"
        f' href="{root}claims/{judged.claim.id}.html">{escape(judged.claim.claim)}</a>'
        f"{small(judged.claim.source)}</li>"
        for judged in claims
    )
    return f'<ul class="claims">{"".join(lines)}</ul>'


def claims_section(site: Site, method: str) -> str:
    """Every claim on a method, its own paper's first."""
    sides = by_side(site, method)
    if not sides:
        return "<p>No claim that kvbench holds is about it.</p>"
    counts = "; ".join(f"{side}: {counted(some)}" for side, some in sides.items())
    none = "" if ITS_PAPER in sides else " None is of its own paper."
    lists = [f"<p>{counts}. A claim opens what was measured of it, and its runs.{none}</p>"]
    for side, some in sides.items():
        title = (
            f"Of {label_of(method)}'s own paper"
            if side == ITS_PAPER
            else f"Of other papers, {side}"
        )
        lists.append(f"<h3>{escape(title)}</h3>{listed(some, '../', turned=side == AGAINST)}")
    return "".join(lists)
