"""The first page: the questions that bring a reader here, each answered in a table."""

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
from kvbench.report.site.rows import Row, Site, by_panel, dense_of
from kvbench.report.tables.formats import NONE
from kvbench.runs.quantities import QUANTITIES

SHARES = (2, 5, 10, 25, 50)  # per cent of full attention's device memory
QUESTION_SHARE = 5  # of them in the question
JUST_OVER = 1.2  # times a limit: what is better and this near to it is named, too
MOST_NAMED = 3  # of the arms that are no different
BEST = (  # what its table is of
    "<p>For each limit the method with the lowest KL divergence from full attention or, where a"
    " task has none, with the highest score, on prompts of one length. The limit is on keys and"
    " values on the device, as a share of full attention's on the same samples; layers that are"
    " left dense are not counted{dense}. The second line of a task counts the index by which a"
    " method chooses, too, wherever it lies. A limit opens all that fit in the"
    ' <a href="{board}">leaderboard</a>; a dash: no run is this small.'
    f" Over {FEWEST} samples or more the named is tested against each other that fits, paired by"
    f" sample: {{tests}} tests, each at {COVERAGE} %. Of fewer samples another may be as good, and"
    f" more would say. Where the best scores under {LEAST} none is named.</p>"
)


def front(site: Site, sections: Mapping[str, str]) -> Iterator[File]:
    """The page, and a picture of what nearness costs."""
    board = sections.get("Leaderboard", "")
    drawn = picture(partial(draw, "read", _largest(site)))
    if drawn:
        yield File("read.svg", drawn)
    shown = figure(
        "read.svg", "How near each method stays for the keys and values that a decode step reads"
    )
    body = f"""<section id="memory">
<h2>Which method should I take at {QUESTION_SHARE}&nbsp;% of the memory?</h2>
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
    """For each task and length the best arm at each share of full attention's memory.

    The nearest to full attention, or else that with the highest score; score and bytes are of the
    same samples.
    """
    panels = [
        (indexed, shares)
        for rows in by_panel(site.alike).values()
        for indexed in (False, True)
        if (shares := _shares(rows, indexed))
    ]
    if not panels:
        return (
            "<p>No arm here has full attention on the same samples beside it, which its memory is a"
            " share of.</p>"
        )
    links = {share: f'href="{board}#share={share}{{index}}">{share} %</a>' for share in SHARES}
    heads = "".join(f"<th class=label><a {link.format(index='')}</th>" for link in links.values())
    lines, tests = [], 0
    for indexed, shares in panels:
        fitting = {most: [row for row, share in shares if share <= most] for most in SHARES}
        over = {most: _just_over(shares, most) for most in SHARES}
        phone = "&amp;index=on" if indexed else ""
        cells = "".join(
            _cell(site, fitting[share], over[share], f'<a class="phone" {link.format(index=phone)}')
            for share, link in links.items()
        )
        tests += sum(len(_tested(site, rows)) for rows in fitting.values())
        head = small("with the index") if indexed else _panel_head(site, shares[0][0])
        lines.append(f'<tr><th scope="row">{head}</th>{cells}</tr>')
    return (
        BEST.format(dense=_dense(site), board=board, tests=tests)
        + protocols(site)
        + table_of(f"<th class=label>task</th>{heads}", lines, "best")
    )


def _question_section(site: Site, pictures: str) -> str:
    """Scores with the question and after it, where runs differ in `protocol.question` alone."""
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
    lines = []
    for (panel, method, budget, variant), by_question in pairs.items():
        words = ", ".join(filter(None, [f"C = {budget}", variant, panel]))
        scores = "".join(cell_of(by_question[word], "score") for word in ("with", "after"))
        lines.append(f'<tr><th scope="row">{linked(method, "")}{small(words)}</th>{scores}</tr>')
    return (
        '<section id="question"><h2>Does SnapKV survive a question that comes after?</h2><p>Scores'
        " where a method compresses the context with the question at its end, and where the"
        f' question comes after it has compressed. <a href="{pictures}#question">The picture</a>'
        " has their intervals side by side.</p>"
        + table_of("<th></th><th>with the question</th><th>question after</th>", lines)
        + "</section>"
    )


def _tested(site: Site, fitting: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """How far the first of these arms is ahead of each other that shares enough samples with it."""
    pairs = ((row, site.ahead(fitting[0], row)) for row in fitting[1:])
    return [
        (row, estimate)
        for row, estimate in pairs
        if estimate is not None and ranks(estimate.n, estimate.low, estimate.high)
    ]


def _shares(rows: Sequence[Row], indexed: bool) -> list[tuple[Row, float]]:
    """The arms that may be named, each with its share of full attention's memory."""
    shares = [(row, row.share(indexed)) for row in rows if row.is_choice]
    return [(row, share) for row, share in shares if share is not None]


def _dense(site: Site) -> str:
    """What dense layers hold, where all arms leave as many dense."""
    dense = {dense_of(row.run) for row in site.rows if row.is_choice}
    if len(dense) != 1 or max(dense) == 0:
        return ""
    return f" and hold {100 * max(dense):.1f} % of the whole besides"


def _panel_head(site: Site, row: Row) -> str:
    """The task of a row's panel, and what its samples are and how many.

    Where the score decides, with full attention's.
    """
    task, *words = row.panel.split(", ")
    several_models = len({row.model for row in site.rows}) > 1
    n = int(row.cell.numbers["n"])
    facts = [*(words if several_models else words[1:]), f"{n} sample{'s' * (n > 1)}"]
    if n < FEWEST:
        facts.append("too few to rank")
    if row.full is not None and "kl_mean" not in row.cell.numbers:
        facts.append(f"full attention {row.full.score().mean:.1f}")
    facts += filter(None, [str(row.run.arm["sample_note"])])
    return escape(task) + small(f"{', '.join(facts)}: keys and values")


def _just_over(shares: Sequence[tuple[Row, float]], limit: float) -> str:
    """The arm that just misses a limit and is better than all that keep it, in words; or ""."""
    fits = [row for row, share in shares if share <= limit]
    near = [(row, share) for row, share in shares if limit < share <= JUST_OVER * limit]
    if not near or near[0][0].has_lost or (fits and fits[0].rank < near[0][0].rank):
        return ""
    row, share = near[0]
    return f"<br><small>just over: {escape(row.name)}, {share:.1f} %</small>"


def _cell(site: Site, fitting: Sequence[Row], over: str, limit: str) -> str:
    """The first of the arms that fit, and the others from which a paired test does not tell it.

    None is named where the best has lost what there was to find.
    """
    if not fitting:
        return f'<td class="none label">{limit}-{over}</td>'
    first, *others = fitting
    numbers = first.cell.numbers
    name = "kl_mean" if "kl_mean" in numbers else "score"
    number = f"{'KL' if name == 'kl_mean' else name} {numbers[name]:.{QUANTITIES[name].digits}f}"
    if first.has_lost:
        return (
            f'<td class="none label">{limit}-<br><small>the best, of {len(fitting)}:'
            f" {number}</small>{over}</td>"
        )
    tests = _tested(site, fitting)
    ties = [escape(row.name) for row, estimate in tests if not estimate.differs]
    untested = len(others) - len(tests)
    remarks = f", {len(ties)} of {len(tests)} others no different" if tests else ""
    remarks += f" ({', '.join(ties)})" if 0 < len(ties) <= MOST_NAMED else ""
    remarks += f", {untested} untested" if untested and numbers["n"] >= FEWEST else ""
    arm = "" if first.budget == NONE else f" {first.budget}"
    arm += f", {first.variant}" if first.variant else ""
    return (
        '<td class="label"'
        f' data-method="{escape(first.method)}">{limit}{linked(first.method, "")}{escape(arm)}<br>'
        f"<small>{number}{remarks}</small>{over}</td>"
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
