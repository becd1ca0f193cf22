"""The claims on a page: those about a method, and lists of claims, each with its verdict and a link to its page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from kvbench.report.claims.claim import Claim
from kvbench.report.claims.page import Judged
from kvbench.report.claims.verdict import Verdict
from kvbench.report.site.markup import label_of, small
from kvbench.report.site.rows import Site

LOOKS = {Verdict.HOLDS: "ahead", Verdict.FAILS: "behind"}


def claims_on(site: Site, method: str) -> list[Judged]:
    """The claims of a method's own paper, and those of others that one of its arms decides."""
    return [one for one in site.judged if is_about(one.claim, method)]


def is_about(claim: Claim, method: str) -> bool:
    """Whether a claim is one of the method's own paper, or one of its arms decides it."""
    return is_of(claim, method) or _names(claim, method)


def is_of(claim: Claim, method: str) -> bool:
    """Whether a claim is one of the method's own paper."""
    return claim.source.partition(",")[0] == label_of(method)


def _names(claim: Claim, method: str) -> bool:
    return any(re.search(rf"\bmethod=(\w+,)*{re.escape(method)}\b", str(one.asked)) for one in claim.criteria)


def counted(found: Sequence[Judged]) -> str:
    """How many claims have each verdict, in words; those that a stand-in decided count like all others."""
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    return ", ".join(f"{count} {verdict.of(count)}" for verdict, count in counts.items() if count)


def shown(one: Judged) -> str:
    """A verdict as HTML, coloured."""
    return f'<b class="{LOOKS.get(one.verdict, "open")}">{escape(one.shown)}</b>'


def listed(found: Iterable[Judged], root: str) -> str:
    """Claims under one another, each with its verdict; a claim leads to its page."""
    lines = (
        f'<li>{shown(one)} <a href="{root}claims/{one.claim.id}.html">{escape(one.claim.claim)}</a>'
        f"{small(one.claim.source)}</li>"
        for one in found
    )
    return f'<ul class="claims">{"".join(lines)}</ul>'


def claims_section(site: Site, method: str) -> str:
    """Every claim on a method, its own paper's first."""
    found = claims_on(site, method)
    if not found:
        return "<p>No claim that kvbench holds is about it.</p>"
    own = [one for one in found if is_of(one.claim, method)]
    others = [one for one in found if one not in own]
    none = "" if own else " None is of its own paper."
    lists = [f"<p>{counted(found)}. A claim opens what was measured of it, and its runs.{none}</p>"]
    for title, some in ((f"Of {label_of(method)}'s own paper", own), ("Of other papers, about it", others)):
        if some:
            lists.append(f"<h3>{escape(title)}</h3>{listed(some, '../')}")
    return "".join(lists)
