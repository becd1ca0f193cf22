"""The front door: the questions that bring a reader here, each answered in a table that
leads on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape

from kvbench.report.data.run import YARDSTICK, Runs
from kvbench.report.data.stats import COVERAGE, FEWEST, LEAST, Estimate, ranks
from kvbench.report.figures.all import draw
from kvbench.report.site.claimed import ITS_PAPER, by_side, counted, incomplete
from kvbench.report.site.drawing import legible, picture
from kvbench.report.site.markup import (
    File,
    cell_of,
    figure,
    linked,
    page,
    protocols,
    small,
    table_of,
)
from kvbench.report.site.rows import Row, Site, dense_of, share_of
from kvbench.report.tables.formats import NONE
from kvbench.runs.quantities import QUANTITIES

SHARES = (2, 5, 10, 25, 50)  # per cent of full attention's device memory
QUESTION_SHARE = 5  # of them in the question
COUNTED = {False: "keys and values", True: "with the index"}


def front(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The page, and a picture of what nearness costs."""
    board = sections.get("Leaderboard", "")
    drawn = picture(partial(draw, "read", _largest(site)))
    if drawn:
        yield File("read.svg", drawn)
    shown = figure(
        "read.svg", "How near each method stays for the keys and values that a decode step reads"
    )
    body = f"""<section id="memory"><h2>Which method should I take at {QUESTION_SHARE}&nbsp;% of the memory?</h2>
{_best(site, board)}</section>
<section id="claims"><h2>Does Quest do what its paper says?</h2>
{_claimed(site, sections.get("Claims", ""))}</section>
{_question_section(site, sections.get("Pictures", ""))}
{f"<section id=cost><h2>What does nearness cost?</h2>{shown}</section>" if drawn else ""}"""
    yield page("index.html", "KV-cache methods, measured alike", site, sections, body)


def _largest(site: Site) -> Runs:
    """The runs of the panel with the most arms of sparse methods."""
    board_rows = [row for row in site.rows if row.of is None]
    sparse = [row for row in board_rows if row.method != YARDSTICK]
    ((panel, _),) = Counter(row.panel for row in sparse or board_rows).most_common(1)
    return legible(site.joined.only([row.run for row in board_rows if row.panel == panel]))


def _best(site: Site, board: str) -> str:
    """For each task and length the nearest to full attention, or with the best score, that holds no
    more than each share, score and bytes of the same samples.
    """
    panels: dict[tuple[str, bool], list[tuple[float, Row]]] = {}
    for panel in dict.fromkeys(row.panel for row in site.by_length):
        for indexed in (False, True):
            shares = [
                (share_of(row, indexed), row)
                for row in site.by_length
                if row.panel == panel and row.is_choice
            ]
            if measured := [(share, row) for share, row in shares if share is not None]:
                panels[panel, indexed] = measured
    if not panels:
        return (
            "<p>No arm here has full attention on the same samples beside it, which its memory is a"
            " share of.</p>"
        )
    alone = len({row.model for row in site.rows}) == 1
    links = {share: f'href="{board}#share={share}{{index}}">{share} %</a>' for share in SHARES}
    heads = "".join(f"<th class=label><a {link.format(index='')}</th>" for link in links.values())
    lines, tests = [], 0
    for (panel, indexed), entries in panels.items():
        task, *words = panel.split(", ")
        samples = ", ".join(words[1:] if alone else words)
        cells = ""
        for share, link in links.items():
            fitting = [row for row_share, row in entries if row_share <= share]
            phone = f'<a class="phone" {link.format(index="&amp;index=on" if indexed else "")}'
            cells += _cell(site, fitting, phone)
            tests += len(_tested(site, fitting))
        words_of = (
            COUNTED[indexed] if indexed else f"{_of_full(entries[0][1], samples)}: {COUNTED[False]}"
        )
        lines.append(
            "<tr><th"
            f' scope="row">{"" if indexed else escape(task)}{small(words_of)}</th>{cells}</tr>'
        )
    dense = {dense_of(row.run) for row in site.rows if row.is_choice}
    above = (
        f" and hold {100 * max(dense):.1f} % of the whole besides"
        if len(dense) == 1 and max(dense) > 0
        else ""
    )
    return (
        "<p>For each limit the method with the lowest KL divergence from full attention or, where a"
        " task has none, "
        "with the highest score, on prompts of one length. The limit is on keys and values on the"
        " device, as a share "
        "of full attention's on the same samples; layers that are left dense are not"
        f" counted{above}. The second line "
        "of a task counts the index by which a method chooses, too, wherever it lies. A limit opens"
        " all that fit in "
        f'the <a href="{board}">leaderboard</a>; a dash: no run is this small. Over {FEWEST}'
        " samples or more the named "
        f"is tested against each other that fits, paired by sample: {tests} tests, each at"
        f" {COVERAGE} %. Of fewer "
        f"samples another may be as good, and more would say. Where the best scores under {LEAST}"
        " none is named.</p>"
        + protocols(site)
        + table_of(f"<th class=label>task</th>{heads}", lines, "best")
    )


def _question_section(site: Site, pictures: str) -> str:
    """Where runs differ in `protocol.question` alone the score of each method with the question and
    after it.
    """
    when: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in site.rows:
        question = str(row.run.settings["protocol.question"])
        panel = row.panel.replace(f", protocol.question={question}", "")
        when.setdefault((panel, row.method, row.budget, row.variant), {})[question] = row
    pairs = {
        arm: by_question
        for arm, by_question in when.items()
        if {"with", "after"} <= by_question.keys()
    }
    if not pairs:
        return ""
    lines = [
        "<tr><th"
        f' scope="row">{linked(method, "")}{small(", ".join(filter(None, [f"C = {budget}", variant, panel])))}'
        f"</th>{cell_of(by_question['with'], 'score')}{cell_of(by_question['after'], 'score')}</tr>"
        for (panel, method, budget, variant), by_question in pairs.items()
    ]
    return (
        '<section id="question"><h2>Does SnapKV survive a question that comes after?</h2><p>Scores'
        " where a method compresses the context with the question at its end, and where the"
        f' question comes after it has compressed. <a href="{pictures}#question">The picture</a>'
        " has their intervals side by side.</p>"
        + table_of("<th></th><th>with the question</th><th>question after</th>", lines)
        + "</section>"
    )


def _tested(site: Site, fitting: Sequence[Row]) -> list[Estimate]:
    """How far the first of these arms is ahead of each other that shares samples enough with it to
    be tested.
    """
    pairs = (site.ahead(fitting[0], row) for row in fitting[1:])
    return [
        estimate
        for estimate in pairs
        if estimate is not None and ranks(estimate.n, estimate.low, estimate.high)
    ]


def _of_full(row: Row, samples: str) -> str:
    """What a panel's samples are and how many, with full attention's score on them where the score
    decides.
    """
    count = int(row.cell.numbers["n"])
    few = "too few to rank" if count < FEWEST else ""
    full = row.full is not None and "kl_mean" not in row.cell.numbers
    score = f"full attention {row.full.score().mean:.1f}" if full and row.full else ""
    counted = f"{count} sample{'s' * (count > 1)}"
    return ", ".join(filter(None, [samples, counted, few, score]))


def _cell(site: Site, fitting: Sequence[Row], limit: str) -> str:
    """The first of the arms that fit, and from how many of those that it can be tested against it
    does not differ; none is named where the best has lost what there was to find.
    """
    if not fitting:
        return f'<td class="none label">{limit}-</td>'
    first, *others = fitting
    numbers = first.cell.numbers
    name = "kl_mean" if "kl_mean" in numbers else "score"
    number = f"{'KL' if name == 'kl_mean' else name} {numbers[name]:.{QUANTITIES[name].digits}f}"
    if first.has_lost:
        return (
            f'<td class="none label">{limit}-<br><small>the best, of {len(fitting)}:'
            f" {number}</small></td>"
        )
    tests = _tested(site, fitting)
    ties, untested = sum(not estimate.differs for estimate in tests), len(others) - len(tests)
    remarks = f", {ties} of {len(tests)} others no different" if tests else ""
    remarks += f", {untested} untested" if untested and numbers["n"] >= FEWEST else ""
    arm = f"{'' if first.budget == NONE else f' {first.budget}'}{f', {first.variant}' if first.variant else ''}"
    return (
        '<td class="label"'
        f' data-method="{escape(first.method)}">{limit}{linked(first.method, "")}{escape(arm)}<br>'
        f"<small>{number}{remarks}</small></td>"
    )


def _claimed(site: Site, pages: str) -> str:
    """The methods that the papers' claims held here are about, with how many of them hold."""
    lines = []
    for method in site.methods:
        if method != YARDSTICK and (sides := by_side(site, method)):
            theirs = [
                f"{side}: {counted(some)}" for side, some in sides.items() if side != ITS_PAPER
            ]
            cells = (counted(sides.get(ITS_PAPER, [])) or NONE, "<br>".join(theirs) or NONE)
            labels = "".join(f'<td class="label">{cell}</td>' for cell in cells)
            lines.append(f'<tr><th scope="row">{linked(method, "", "#claims")}</th>{labels}</tr>')
    heads = "".join(
        f"<th class=label>{name}</th>" for name in ("method", "its own paper's", "other papers'")
    )
    return (
        f'<p><a href="{pages}">{len(site.judged)} claims of the papers</a>: {counted(site.judged)}.'
        " A claim that needs a larger model or a GPU is judged by a smaller test, and marked as"
        " one that a stand-in decided. A method opens the claims about it, of which one may be"
        " about several methods; that one against it holds is not in its favour. Below them is"
        " what papers print of it.</p>" + incomplete(site) + table_of(heads, lines, "verdicts")
    )
