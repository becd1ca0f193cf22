"""The front door: the two questions that bring a reader here, each answered in a table that leads on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape

from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.figures.all import draw
from kvbench.report.site.claimed import claims_on, counted, is_of
from kvbench.report.site.drawing import legible, picture
from kvbench.report.site.markup import File, ends_of, figure, linked, page, protocols, small, table_of
from kvbench.report.site.rows import Row, Site, dense_of, share_of
from kvbench.report.tables.formats import NONE
from kvbench.runs.quantities import QUANTITIES

SHARES = (2, 5, 10, 25, 50)  # per cent of full attention's device memory
ASKED = 5  # of them in the question
COUNTED = {False: "keys and values", True: "with the index"}


def front(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The page, and a picture of what nearness costs."""
    board = sections.get("Leaderboard", "")
    drawn = picture(partial(draw, "read", _largest(site)))
    if drawn:
        yield File("read.svg", drawn)
    shown = figure("read.svg", "How near each method stays for the keys and values that a decode step reads")
    body = f"""<section id="memory"><h2>Which method should I take at {ASKED}&nbsp;% of the memory?</h2>
{_best(site, board)}</section>
<section id="claims"><h2>Does Quest do what its paper says?</h2>
{_claimed(site, sections.get("Claims", ""))}</section>
{f"<section id=cost><h2>What does nearness cost?</h2>{shown}</section>" if drawn else ""}"""
    yield page("index.html", "KV-cache methods, measured alike", site, sections, body)


def _largest(site: Site) -> Runs:
    """The runs of the panel with the most arms."""
    ((panel, _),) = Counter(row.panel for row in site.rows).most_common(1)
    return legible(site.joined.only([row.run for row in site.rows if row.panel == panel]))


def _best(site: Site, board: str) -> str:
    """For each task the nearest to full attention, or with the best score, that holds no more than each share."""
    panels: dict[tuple[str, bool], list[tuple[float, Row]]] = {}
    for panel in dict.fromkeys(row.panel for row in site.rows):
        for indexed in (False, True):
            shares = [(share_of(row, indexed), row) for row in site.rows if row.panel == panel and row.is_choice]
            if known := [(share, row) for share, row in shares if share is not None]:
                panels[panel, indexed] = known
    if not panels:
        return "<p>No arm here has full attention on the same samples beside it, which its memory is a share of.</p>"
    alone = len({row.model for row in site.rows}) == 1
    heads = "".join(f'<th class=label><a href="{board}#share={share}">{share} %</a></th>' for share in SHARES)
    lines = []
    for (panel, indexed), own in panels.items():
        task, *words = panel.split(", ")
        samples = ", ".join(words[1:] if alone else words)
        cells = "".join(_cell([row for held, row in own if held <= share]) for share in SHARES)
        words_of = (
            COUNTED[indexed] if indexed else ": ".join(filter(None, [_of_full(own[0][1], samples), COUNTED[False]]))
        )
        lines.append(f'<tr><th scope="row">{"" if indexed else escape(task)}{small(words_of)}</th>{cells}</tr>')
    dense = {dense_of(row.run) for row in site.rows if row.is_choice}
    above = f" and hold {100 * max(dense):.1f} % of the whole besides" if len(dense) == 1 and max(dense) > 0 else ""
    return (
        "<p>For each limit the method with the lowest KL divergence from full attention or, where a task has none, "
        "with the highest score. The limit is on keys and values on the device, as a share of full attention's on the "
        f"same samples; layers that are left dense are not counted{above}. The second line of a task counts the "
        "index by which a method chooses, too, wherever it lies. A limit opens all that fit in the "
        f'<a href="{board}">leaderboard</a>; a dash: no run is this small.</p>'
        + protocols(site)
        + table_of(f"<th class=label>task</th>{heads}", lines, "best")
    )


def _of_full(row: Row, samples: str) -> str:
    """What a panel's samples are, with what full attention scores on them where the score decides."""
    if row.full is None or "kl_mean" in row.cell.numbers:
        return samples
    score = row.full.score().mean
    return ", ".join(filter(None, [samples, f"full attention {score:.1f}"]))


def _cell(fitting: Sequence[Row]) -> str:
    """The first of the arms that fit, and how many others its interval holds."""
    if not fitting:
        return '<td class="none label">-</td>'
    first, *others = fitting
    numbers = first.cell.numbers
    name = "kl_mean" if "kl_mean" in numbers else "score"
    low, high = (numbers.get(end, numbers[name]) for end in ends_of(name))
    alike = sum(low <= row.cell.numbers.get(name, math.nan) <= high for row in others)
    number = f"{'KL' if name == 'kl_mean' else name} {numbers[name]:.{QUANTITIES[name].digits}f}"
    arm = ", ".join(filter(None, ["" if first.budget == NONE else f" {first.budget}", first.variant]))
    return (
        f'<td class="label" data-method="{escape(first.method)}">{linked(first.method, "")}{escape(arm)}<br>'
        f"<small>{number}{f', {alike} more in its interval' if alike else ''}</small></td>"
    )


def _claimed(site: Site, pages: str) -> str:
    """The methods that the papers' claims held here are about, with how many of them hold."""
    lines = []
    for method in site.methods:
        if method != YARDSTICK and (found := claims_on(site, method)):
            own = [one for one in found if is_of(one.claim, method)]
            others = [one for one in found if one not in own]
            cells = "".join(f'<td class="label">{counted(some) or NONE}</td>' for some in (own, others))
            lines.append(f'<tr><th scope="row">{linked(method, "", "#claims")}</th>{cells}</tr>')
    heads = "".join(f"<th class=label>{name}</th>" for name in ("method", "its own paper's", "other papers', about it"))
    return (
        f'<p><a href="{pages}">{len(site.judged)} claims of the papers</a>: {counted(site.judged)}. '
        "A claim that needs a larger model or a GPU is judged by a smaller test, and marked as one that a stand-in "
        "decided. A method opens the claims about it, of which one may be about several methods; below them is what "
        "papers print of it.</p>" + table_of(heads, lines, "verdicts")
    )
