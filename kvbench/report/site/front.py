"""The first page: which method at a share of the memory, is it significant, what does it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvbench.report.data.stats import COVERAGE, FEWEST, Estimate
from kvbench.report.data.table import NONE
from kvbench.report.site.board import SHARES, machine_of
from kvbench.report.site.claims import counts
from kvbench.report.site.pages import Page, PageNumber, grouped
from kvbench.report.site.paired import Verdict, verdicts
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


class Times(NamedTuple):
    """A time of an arm, and full attention's on the same machine."""

    own: PageNumber
    full: PageNumber | None


class Answer(NamedTuple):
    """The best of the arms that a share of full attention's memory has room for.

    Attributes
    ----------
    best
        the arm; None where none fits.
    share
        per cent, the limit.
    full
        full attention on the same samples.
    fitting
        how many fit.
    held
        per cent that the best holds, its index counted.
    difference
        to full attention, paired; None where nothing pairs.
    against_full
        what may be said of that.
    others
        how many of the others that fit it is better than, and so on, Holm-corrected.
    as_good
        names of those that it is not shown to beat, if they are few.
    times
        by column, of the machine that the table has times of.
    """

    best: Row | None
    share: int
    full: Row
    fitting: int
    held: float = 0.0
    difference: Estimate | None = None
    against_full: Verdict = "not tested"
    others: Counter[str] = Counter()
    as_good: tuple[str, ...] = ()
    times: dict[str, Times | None] = {}

    @property
    def panel(self) -> Row:
        """An arm that says what the samples are."""
        return self.best or self.full

    @property
    def recommended(self) -> bool:
        """Whether it names an arm: one that did not lose what there was to find."""
        return self.best is not None and not self.best.has_lost

    @property
    def keeps(self) -> bool:
        """Whether no loss is shown, by a test that could have shown one."""
        return self.recommended and self.against_full in ("not shown", "better")

    @property
    def protocol(self) -> str:
        """What else distinguishes its samples."""
        known = (self.panel.task, self.panel.model, f"protocol.question={self.panel.question}")
        parts = [part for part in self.panel.panel.split(", ") if part not in known]
        return ", ".join(part.removeprefix("protocol.") for part in parts)

    @property
    def memory(self) -> float:
        """MiB on the device, with the index."""
        numbers = self.panel.cell.numbers
        return numbers.get("device_kv_bytes", 0.0) + numbers.get("index_bytes", 0.0)


class AnswerGroup(NamedTuple):
    """Answers that stand together, and the machine that their times are of; "" without times."""

    heading: str
    machine: str
    answers: list[Answer]


def front(site: Site) -> Iterator[Page]:
    """The page, and the win matrices."""
    panels = [rows for rows in by_panel(site.alike).values() if _yardstick(rows) is not None]
    kinds = grouped(panels, lambda rows: _kind(rows[0]))
    machines = {
        kind: machine_of([row for rows in some for row, _ in _fitting(rows, SHARE)[:1]])
        for kind, some in kinds.items()
    }
    answers = [
        _answer(rows, share, machines[_kind(rows[0])])
        for rows in panels
        if _open(rows)
        for share in SHARES
    ]
    first = next((answer for answer in answers if answer.share == SHARE and answer.best), None)
    panel = [answer for answer in answers if first and answer.panel.panel == first.panel.panel]
    yield Page(
        "index.html",
        "KV-cache methods, measured alike",
        "front.html",
        {
            "first": first,
            "keeps": next((answer for answer in panel if answer.keeps), None),
            "machine": machines[_kind(first.panel)] if first else "",
            "groups": _groups(answers, machines),
            "share": SHARE,
            "shares": SHARES,
            "choices": _choices(answers),
            "unnamed": [rows[0] for rows in panels if not _open(rows)],
            "facts": site.facts,
            "on_cpu": any(row.run.settings["device"] == "cpu" for row in site.rows),
            "questions": _questions(site),
            "claims": counts(site.judged),
            "fewest": FEWEST,
            "coverage": COVERAGE,
        },
    )
    matrices = [matrix for rows in panels if (matrix := _matrix(rows))]
    yield Page(
        "wins.html", "Who beats whom", "wins.html", {"matrices": matrices, "coverage": COVERAGE}
    )


def _yardstick(rows: Sequence[Row]) -> Row | None:
    """Full attention on the samples of a panel."""
    return next((row for row in rows if row.run.is_full), None)


def _open(rows: Sequence[Row]) -> bool:
    """Whether any of these may be named the best."""
    return any(row.is_choice and row.share(True) is not None for row in rows)


def _fitting(rows: Sequence[Row], share: int) -> list[tuple[Row, float]]:
    """The arms that keep to a share with their index, and what they hold; the best first."""
    shares = [(row, row.share(True)) for row in rows if row.is_choice]
    return [(row, held) for row, held in shares if held is not None and held <= share]


def _answer(rows: Sequence[Row], share: int, machine: str) -> Answer:
    full = _yardstick(rows)
    assert full is not None
    fitting = _fitting(rows, share)
    if not fitting:
        return Answer(None, share, full, 0)
    best, held = fitting[0]
    others = [row for row, _ in fitting[1:]]
    words = verdicts([(best.run, row.run) for row in others], best.has_kl)
    open_pairs = [row.name for row, word in zip(others, words, strict=True) if word == "not shown"]
    difference = None if best.has_kl else best.run.against_full()
    return Answer(
        best=best,
        share=share,
        full=full,
        fitting=len(fitting),
        held=held,
        difference=difference,
        against_full=_against_full(difference),
        others=Counter(words),
        as_good=tuple(open_pairs) if len(open_pairs) <= MOST_NAMED else (),
        times={name: _times(best, full, name, machine) for name in ("tpot_ms_p50", "own_ms")},
    )


def _against_full(difference: Estimate | None) -> Verdict:
    if difference is None or difference.n < FEWEST:
        return "not tested"
    if not difference.differs:
        return "not shown"
    return "better" if difference.mean > 0 else "worse"


def _times(best: Row, full: Row, name: str, machine: str) -> Times | None:
    own = best.time(name, machine)
    return own and Times(own, full.time(name, machine))


def _kind(row: Row) -> str:
    """The group of the table that an arm stands in."""
    return NEAR if row.has_kl else QUESTIONS.get(row.question, row.question)


def _groups(answers: Sequence[Answer], machines: dict[str, str]) -> list[AnswerGroup]:
    groups = grouped(answers, lambda answer: _kind(answer.panel))
    return [AnswerGroup(kind, machines[kind], some) for kind, some in groups.items()]


def _choices(answers: Sequence[Answer]) -> dict[str, tuple[str, list[str]]]:
    """What the table is filtered by: a heading, and the values where there are several."""
    keys = {"question": "Question", "model": "Model", "task": "Task"}
    values = {
        key: list(dict.fromkeys(getattr(answer.panel, key) for answer in answers)) for key in keys
    }
    protocols = list(dict.fromkeys(answer.protocol for answer in answers if answer.protocol))
    found = {key: (keys[key], some) for key, some in values.items()}
    found["protocol"] = ("Protocol", protocols)
    return {key: both for key, both in found.items() if len(both[1]) > 1}


class Pair(NamedTuple):
    """An arm whose runs differ in when the question comes, on the same prompts."""

    row: Row
    before: PageNumber | None
    after: PageNumber | None


def _questions(site: Site) -> tuple[list[Pair], int]:
    """What is left of a score when the question comes after.

    Also the number of arms that are left out, as their prompts are not the same.
    """
    arms: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in site.rows:
        kind = tuple(
            word for word in row.run.kind[:-1] if not word.startswith("protocol.question=")
        )
        arms.setdefault((kind, row.method, row.budget, row.variant), {})[row.question] = row
    both = [by_time for by_time in arms.values() if {"with", "after"} <= by_time.keys()]
    same = [
        by_time
        for by_time in both
        if set(by_time["with"].run.scores.ids) == set(by_time["after"].run.scores.ids)
    ]
    pairs = [
        Pair(by_time["after"], by_time["with"].number("score"), by_time["after"].number("score"))
        for by_time in same
    ]
    return pairs, len(both) - len(same)


class Matrix(NamedTuple):
    """Which of the arms of one budget beat which.

    Attributes
    ----------
    panel
        an arm that says what the samples are.
    budget
        of all of them but full attention.
    rows
        the best first.
    words
        [row][column] what may be said of the row's arm beside the column's; "" on the diagonal.
    pairs
        how many were tested.
    """

    panel: Row
    budget: str
    rows: list[Row]
    words: list[list[str]]
    pairs: int

    def wins(self, place: int) -> int:
        """How many others an arm beats."""
        return self.words[place].count("better")


TURNED: dict[str, str] = {"better": "worse", "worse": "better"}


def _matrix(rows: Sequence[Row]) -> Matrix | None:
    """The arms of the budget that most have, and full attention; None for too few samples."""
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
    kl = arms[0].has_kl
    tested = verdicts([(arms[i].run, arms[j].run) for i, j in places], kl)
    words = [[""] * len(arms) for _ in arms]
    for (i, j), word in zip(places, tested, strict=True):
        words[i][j] = word
        words[j][i] = TURNED.get(word, word)
    count = sum(word != "not tested" for word in tested)
    return Matrix(arms[0], budget, arms, words, count) if len(arms) > 2 and count else None
