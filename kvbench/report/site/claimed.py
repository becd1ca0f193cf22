"""The claims on a page: those about a method, and lists of claims, each with its verdict and a link to its page."""

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
OWN, FOR, AGAINST, NEITHER = "its own paper's", "for it", "against it", "neither for nor against it"
SIDES = {FOR: "favours", AGAINST: "against", NEITHER: ""}  # of other papers' claims: the field that names the methods


def by_side(site: Site, method: str) -> dict[str, list[Judged]]:
    """The claims about a method: its own paper's, and those of others for it, against it, and neither."""
    found: dict[str, list[Judged]] = {side: [] for side in (OWN, *SIDES)}
    for one in site.judged:
        if is_about(one.claim, method):
            found[_side(one.claim, method)].append(one)
    return {side: some for side, some in found.items() if some}


def _side(claim: Claim, method: str) -> str:
    if is_of(claim, method):
        return OWN
    return next((side for side in (FOR, AGAINST) if method in getattr(claim, SIDES[side])), NEITHER)


def is_about(claim: Claim, method: str) -> bool:
    """Whether a claim is one of the method's own paper, says something for or against it, or is decided by its arms."""
    return is_of(claim, method) or method in (*claim.favours, *claim.against) or _names(claim, method)


def is_of(claim: Claim, method: str) -> bool:
    """Whether a claim is one of the method's own paper."""
    return claim.source.partition(",")[0] == label_of(method)


def _names(claim: Claim, method: str) -> bool:
    return any(re.search(rf"\bmethod=(\w+,)*{re.escape(method)}\b", str(one.asked)) for one in claim.criteria)


def counted(found: Sequence[Judged]) -> str:
    """How many claims have each verdict, in words; those that a stand-in decided count like all others."""
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.of(count)}" for verdict, count in counts.items() if count)


def incomplete(site: Site) -> str:
    """What is missing for claims that are not measured, as a paragraph; "" where nothing is."""
    why = unmeasured(site.judged)
    return f"<p><b>{escape(why)}</b></p>" if why else ""


def shown(one: Judged, turned: bool = False) -> str:
    """A verdict as HTML, coloured; turned: as it looks to a method that the claim is against."""
    look = LOOKS.get(one.verdict, "open")
    return f'<b class="{TURNED.get(look, look) if turned else look}">{escape(one.shown)}</b>'


def listed(found: Iterable[Judged], root: str, turned: bool = False) -> str:
    """Claims under one another, each with its verdict; a claim leads to its page."""
    lines = (
        f'<li>{shown(one, turned)} <a href="{root}claims/{one.claim.id}.html">{escape(one.claim.claim)}</a>'
        f"{small(one.claim.source)}</li>"
        for one in found
    )
    return f'<ul class="claims">{"".join(lines)}</ul>'


def claims_section(site: Site, method: str) -> str:
    """Every claim on a method, its own paper's first."""
    found = by_side(site, method)
    if not found:
        return "<p>No claim that kvbench holds is about it.</p>"
    counts = "; ".join(f"{side}: {counted(some)}" for side, some in found.items())
    none = "" if OWN in found else " None is of its own paper."
    lists = [f"<p>{counts}. A claim opens what was measured of it, and its runs.{none}</p>"]
    for side, some in found.items():
        title = f"Of {label_of(method)}'s own paper" if side == OWN else f"Of other papers, {side}"
        lists.append(f"<h3>{escape(title)}</h3>{listed(some, '../', turned=side == AGAINST)}")
    return "".join(lists)
