"""The first page: which method at a share of the memory, is it significant, what does it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from kvbench.report.data.stats import COVERAGE, FEWEST, LEAST
from kvbench.report.data.table import NONE
from kvbench.report.site.board import SHARES, machine_of
from kvbench.report.site.claims import counts
from kvbench.report.site.pages import Page, grouped, several
from kvbench.report.site.paired import verdicts, word_of
from kvbench.report.site.rows import Row, Site, by_panel

SHARE = 10  # of `SHARES`: the one that the page opens with
MOST_NAMED = 3  # of the arms that are not shown to be worse
MOST_ARMS = 40  # of a matrix
QUESTIONS = {
    "after": "The question comes after the context was compressed",
    "with": "The question is known while the context is compressed",
    "decode": "The question is read token by token, after the context was compressed",
}
NEAR = "Nearness to full attention on texts, without a question"
TURNED: dict[str, str] = {"better": "worse", "worse": "better"}


def front(site: Site) -> Iterator[Page]:
    """The page, and the win matrices."""
    panels = [
        rows for rows in by_panel(site.alike).values() if any(row.run.is_full for row in rows)
    ]
    kinds = grouped(panels, lambda rows: _kind(rows[0]))
    machines = {
        kind: machine_of([row for rows in some for row, _ in _fitting(rows, SHARE)[:1]])
        for kind, some in kinds.items()
    }
    # in which any may be named the best
    opened = [
        rows
        for rows in panels
        if any(row.is_choice and row.share(True) is not None for row in rows)
    ]
    answers = [
        answer_of(rows, share, machines[_kind(rows[0])]) for rows in opened for share in SHARES
    ]
    first = next((answer for answer in answers if answer.share == SHARE and answer.best), None)
    panel = [answer for answer in answers if first and answer.panel.panel == first.panel.panel]
    groups = grouped(answers, lambda answer: _kind(answer.panel))
    data = {
        "first": first,
        "keeps": next((answer for answer in panel if answer.keeps), None),
        "machine": machines[_kind(first.panel)] if first else "",
        "groups": [
            SimpleNamespace(heading=kind, machine=machines[kind], answers=some)
            for kind, some in groups.items()
        ],
        "share": SHARE,
        "shares": SHARES,
        "choices": several(
            {
                "question": ("Question", [answer.panel.question for answer in answers]),
                "model": ("Model", [answer.panel.model for answer in answers]),
                "task": ("Task", [answer.panel.task for answer in answers]),
                "protocol": (
                    "Protocol",
                    [answer.protocol for answer in answers if answer.protocol],
                ),
            }
        ),
        "unnamed": [rows[0] for rows in panels if rows not in opened],
        "facts": site.facts,
        "on_cpu": any(row.run.settings["device"] == "cpu" for row in site.rows),
        "questions": _questions(site),
        "claims": counts(site.judged),
        "fewest": FEWEST,
        "coverage": COVERAGE,
    }
    yield Page("index.html", "KV-cache methods, measured alike", "front.html", data)
    matrices = [matrix for rows in panels if (matrix := matrix_of(rows))]
    words = {"matrices": matrices, "coverage": COVERAGE}
    yield Page("wins.html", "Who beats whom", "wins.html", words)


def _kind(row: Row) -> str:
    """The group of the table that an arm stands in."""
    return NEAR if row.has_kl else QUESTIONS.get(row.question, row.question)


def _fitting(rows: Sequence[Row], share: int) -> list[tuple[Row, float]]:
    """The arms that keep to a share with their index, and what they hold; the best first."""
    shares = [(row, row.share(True)) for row in rows if row.is_choice]
    return [(row, held) for row, held in shares if held is not None and held <= share]


def answer_of(rows: Sequence[Row], share: int, machine: str) -> Any:
    """The best of the arms of a panel that a share of full attention's memory has room for.

    Returns
    -------
    Any
        `best`, the arm, None where none fits; `full`, full attention's; `panel`, one of both;
        `share`, per cent, the limit, and `held`, what the best holds, its index counted; `fitting`,
        how many fit; `difference` to full attention, paired, and the word for it; `others`, how
        many of the others that fit it is better than, and so on, Holm-corrected; `as_good`, names
        of those that it is not shown to beat, if they are few; `times` and full attention's, of one
        machine; whether it is `recommended`, and `keeps` the score: no loss is shown, by a test
        that could have shown one.
    """
    full = next(row for row in rows if row.run.is_full)
    fitting = _fitting(rows, share)
    best, held = fitting[0] if fitting else (None, 0.0)
    panel = best or full
    others = [row for row, _ in fitting[1:]]
    words = verdicts([(panel.run, row.run) for row in others], panel.has_kl)
    as_good = [row.name for row, word in zip(others, words, strict=True) if word == "not shown"]
    difference = best.run.against_full() if best and not best.has_kl else None
    against_full = word_of(difference)
    times = {name: panel.time(name, machine) for name in ("tpot_ms_p50", "own_ms")}
    known = (panel.task, panel.model, f"protocol.question={panel.question}")
    protocol = (part for part in panel.panel.split(", ") if part not in known)
    numbers = panel.cell.numbers
    # it did not lose what there was to find, of which KL does not say
    recommended = best is not None and (panel.has_kl or numbers["score"] >= LEAST)
    return SimpleNamespace(
        best=best,
        full=full,
        panel=panel,
        share=share,
        held=held,
        fitting=len(fitting),
        difference=difference,
        against_full=against_full,
        others=Counter(words),
        as_good=as_good if len(as_good) <= MOST_NAMED else [],
        times={
            name: time and SimpleNamespace(own=time, full=full.time(name, machine))
            for name, time in times.items()
        },
        recommended=recommended,
        keeps=recommended and against_full in ("not shown", "better"),
        protocol=", ".join(part.removeprefix("protocol.") for part in protocol),
        memory=numbers.get("device_kv_bytes", 0.0) + numbers.get("index_bytes", 0.0),
    )


def _questions(site: Site) -> tuple[list[Any], int]:
    """What is left of a score when the question comes after: arms on the same prompts.

    Also the number of arms that are left out, as their prompts are not the same.
    """
    arms: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in site.rows:
        kind = [word for word in row.run.kind[:-1] if not word.startswith("protocol.question=")]
        arms.setdefault((*kind, row.method, row.budget, row.variant), {})[row.question] = row
    both = [(by["with"], by["after"]) for by in arms.values() if {"with", "after"} <= by.keys()]
    pairs = [
        SimpleNamespace(row=after, before=known.number("score"), after=after.number("score"))
        for known, after in both
        if set(known.run.scores.ids) == set(after.run.scores.ids)
    ]
    return pairs, len(both) - len(pairs)


def matrix_of(rows: Sequence[Row]) -> Any:
    """Which of the arms of the budget that most have, and full attention, beat which.

    None for too few samples.

    Returns
    -------
    Any
        `panel`, an arm that says what the samples are; the `budget` of all but full attention; the
        `rows`, the best first; `words` [row][column], what may be said of the row's arm beside the
        column's, "" on the diagonal; how many `pairs` were tested.
    """
    sparse = [row for row in rows if row.is_choice and row.budget != NONE]
    if len(sparse) < 2 or min(row.cell.numbers["n"] for row in sparse) < FEWEST:
        return None
    budget = Counter(row.budget for row in sparse).most_common(1)[0][0]
    arms = [
        row
        for row in rows
        if (row.run.is_full and not row.has_kl) or (row.is_choice and row.budget == budget)
    ][:MOST_ARMS]
    places = [(i, j) for i in range(len(arms)) for j in range(i)]
    tested = verdicts([(arms[i].run, arms[j].run) for i, j in places], arms[0].has_kl)
    words = [[""] * len(arms) for _ in arms]
    for (i, j), word in zip(places, tested, strict=True):
        words[i][j], words[j][i] = word, TURNED.get(word, word)
    count = sum(word != "not tested" for word in tested)
    if len(arms) < 3 or not count:
        return None
    return SimpleNamespace(panel=arms[0], budget=budget, rows=arms, words=words, pairs=count)
