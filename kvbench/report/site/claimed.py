"""What the papers claim of a method, with the verdicts by a site's runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from kvbench.report.claims.claim import Claim
from kvbench.report.claims.page import Judged
from kvbench.report.claims.verdict import Verdict
from kvbench.report.site.parts import Site, label_of, small

LOOKS = {Verdict.HOLDS: "ahead", Verdict.FAILS: "behind"}


def claims_on(site: Site, method: str) -> list[Judged]:
    """The claims of a method's own paper, and those of others that one of its arms decides."""
    return [one for one in site.judged if _is_of(one.claim, method) or _names(one.claim, method)]


def _is_of(claim: Claim, method: str) -> bool:
    return claim.source.partition(",")[0] == label_of(method)


def _names(claim: Claim, method: str) -> bool:
    return any(re.search(rf"\bmethod=(\w+,)*{method}\b", str(part.asked)) for part in claim.parts)


def counted(found: Sequence[Judged]) -> dict[str, int]:
    """How many claims have each verdict, by its name; those that a stand-in decided count like all others."""
    return {verdict.value: sum(one.verdict is verdict for one in found) for verdict in Verdict}


def claims_section(site: Site, method: str) -> str:
    """Every claim on a method: its own paper's first, each with its verdict and what was measured."""
    found = claims_on(site, method)
    if not found:
        return "<p>No claim that kvbench holds is about it.</p>"
    own = [one for one in found if _is_of(one.claim, method)]
    others = [one for one in found if one not in own]
    parts = [f"<p>{', '.join(f'{count} {verdict}' for verdict, count in counted(found).items() if count)}.</p>"]
    for title, some in ((f"Of {label_of(method)}'s own paper", own), ("Of other papers, about it", others)):
        if some:
            parts.append(f"<h3>{escape(title)}</h3>{''.join(map(_claim, some))}")
    return "".join(parts) + "<p><code>python -m kvbench.report --claims</code></p>"


def _claim(one: Judged) -> str:
    told = [*one.measured, *filter(None, (one.claim.original, one.claim.weaker))]
    lines = "".join(f"<li>{escape(words)}</li>" for words in told)
    look = LOOKS.get(one.verdict, "open")
    return (
        f'<details id="{escape(one.claim.id)}"><summary><b class="{look}">{escape(one.shown)}</b> '
        f"{escape(one.claim.claim)}{small(one.claim.source)}</summary><ul class=notes>{lines}</ul></details>"
    )
