"""The front door: the two questions that bring a reader here, each answered in a table that leads on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from kvbench.report.formats import NONE
from kvbench.report.frame import YARDSTICK
from kvbench.report.site.claimed import claims_on, counted, told
from kvbench.report.site.parts import File, Row, Site, ends_of, figure, linked, page, share_of, small, table_of
from kvbench.report.site.results import picture
from kvbench.runs.quantities import QUANTITIES

SHARES = (2, 5, 10, 25, 50)  # per cent of full attention's device memory
ASKED = 5  # of them in the question


def front(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The page, and a picture of every arm."""
    board = sections.get("Leaderboard", "")
    drawn = picture(site, "read", [row.run for row in site.rows])
    if drawn:
        yield File("read.svg", drawn)
    shown = figure("read.svg", "How near each method stays for the keys and values that a decode step reads")
    body = f"""<section id="memory"><h2>Which method should I take at {ASKED}&nbsp;% of the memory?</h2>
{_best(site, board)}</section>
<section id="claims"><h2>Does Quest do what its paper says?</h2>
{_claimed(site, sections.get("Claims", ""))}</section>
{f"<section id=cost><h2>What does nearness cost?</h2>{shown}</section>" if drawn else ""}"""
    yield page("index.html", "KV-cache methods, measured alike", site, sections, body)


def _best(site: Site, board: str) -> str:
    """For each task the nearest to full attention, or with the best score, that holds no more than each share."""
    panels: dict[str, list[tuple[float, Row]]] = {}
    for row in site.rows:
        share = share_of(site, row)
        if row.method != YARDSTICK and share is not None:
            panels.setdefault(row.panel, []).append((share, row))
    if not panels:
        return "<p>No arm here has full attention on the same samples beside it, which its memory is a share of.</p>"
    heads = "".join(f'<th class=label><a href="{board}#share={share}">{share} %</a></th>' for share in SHARES)
    lines = []
    for panel, own in panels.items():
        task, _, samples = panel.partition(", ")
        cells = "".join(_cell([row for held, row in own if held <= share]) for share in SHARES)
        lines.append(f'<tr><th scope="row">{escape(task)}{small(samples)}</th>{cells}</tr>')
    least = min(share for own in panels.values() for share, _ in own)
    return (
        "<p>The best that fits, by KL from full attention where there is some, else by score: keys and values on the "
        "device, as a share of full attention's on the same samples. A share opens all that fit in the "
        f'<a href="{board}">leaderboard</a>; a dash: nothing is as small. The smallest here holds {least:.1f} %, '
        "layers that are left dense included.</p>" + table_of(f"<th class=label>task</th>{heads}", lines, "best")
    )


def _cell(fitting: Sequence[Row]) -> str:
    """The first of the arms that fit, and how many others its interval holds."""
    if not fitting:
        return '<td class="none label">-</td>'
    first, *others = fitting
    numbers = first.cell.numbers
    name = "kl_mean" if "kl_mean" in numbers else "score"
    low, high = (numbers.get(end, numbers[name]) for end in ends_of(name))
    alike = sum(low <= row.cell.numbers.get(name, math.nan) <= high for row in others)
    told = f"{'KL' if name == 'kl_mean' else name} {numbers[name]:.{QUANTITIES[name].digits}f}"
    budget = "" if first.budget == NONE else f" {first.budget}"
    return (
        f'<td class="label" data-method="{escape(first.method)}">{linked(first.method, "")}{escape(budget)}<br>'
        f"<small>{told}{f', {alike} more in its interval' if alike else ''}</small></td>"
    )


def _claimed(site: Site, pages: str) -> str:
    """The methods that the papers' claims held here are about, with how many of them hold."""
    lines = []
    for method in site.methods:
        if method != YARDSTICK and (found := claims_on(site, method)):
            counts = "".join(f"<td class=label>{count or ''}</td>" for count in counted(found).values())
            lines.append(f'<tr><th scope="row">{linked(method, "", "#claims")}</th>{counts}</tr>')
    heads = "".join(f"<th class=label>{verdict}</th>" for verdict in counted([]))
    return (
        f'<p><a href="{pages}">{len(site.judged)} claims of the papers</a>: {told(site.judged)}. What only a stand-in '
        "can test here counts by that, and says so. A method opens the claims about it; below them is what papers "
        "print of it, with ours beside it.</p>" + table_of(f"<th class=label>method</th>{heads}", lines, "verdicts")
    )
