"""The claims with what was measured and the verdict on each, as text for the console, Markdown, CSV and HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import kvbench
from kvbench.report.claims.claim import Claim, Criterion, claims
from kvbench.report.claims.numbers import filed, printed
from kvbench.report.claims.power import lacks
from kvbench.report.claims.sampled import sampled
from kvbench.report.claims.verdict import Finding, Missing, Verdict, judge, of_all
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.html import STYLE
from kvbench.report.tables.formats import csv_lines, plain_markdown

SHIPPED = Path(kvbench.__file__).parents[1] / "results"
WIDTH = 120
OURS = "runs that kvbench ships"
DECIDING = ("claims.tar.xz", "quantised.tar.xz", "reference_qwen.tar.xz")  # the archives of them


Part = tuple[Criterion, Finding | Missing, Verdict]


class Judged(NamedTuple):
    """A claim with its verdict.

    Attributes:
        criteria: each with what was found, and its own verdict.
        superseded: the same of criteria that no longer decide.
        runs: that it was judged by.
    """

    claim: Claim
    verdict: Verdict
    criteria: list[Part]
    superseded: list[Part]
    runs: Runs | None

    @property
    def shown(self) -> str:
        """The verdict as a reader sees it; a stand-in's is said to be one, unless printed numbers alone decide."""
        deciding = {criterion.kind for criterion, _, verdict in self.criteria if verdict is self.verdict}
        if self.claim.original and deciding != {"printed"}:
            return f"not testable here; stand-in: {self.verdict.value}"
        return self.verdict.value

    @property
    def sentences(self) -> list[str]:
        """Of each criterion what was measured, or what is missing; superseded ones say so, with their verdict."""
        before = [f"superseded ({verdict.value}): {sentence(part, found)}" for part, found, verdict in self.superseded]
        now = [(sentence(part, found), lacks(part, found, self.runs)) for part, found, _ in self.criteria]
        return ["; ".join(filter(None, words)) for words in now] + before


def judged(runs: Runs | None, folders: Sequence[Path]) -> list[Judged]:
    """Every claim with its verdict, by these runs and the measurements' files in these folders or the shipped ones.

    If the runs that kvbench ships measure more of a claim, on as many samples as it needs, they decide it.
    """
    found = []
    for claim in claims():
        own = _judged(claim, runs, folders)
        theirs = (
            _judged(claim, shipped_runs(*(SHIPPED / name for name in DECIDING)), [], OURS)
            if any(_lacking(own))
            else own
        )
        found.append(theirs if _lacking(theirs) < _lacking(own) else own)
    return found


def _judged(claim: Claim, runs: Runs | None, folders: Sequence[Path], note: str = "") -> Judged:
    """A claim by these runs alone; a note says of each number whose runs they are."""
    criteria, before = (
        [_part(criterion, runs, folders, note) for criterion in some]
        for some in (claim.criteria, claim.superseded.criteria)
    )
    return Judged(claim, of_all([verdict for *_, verdict in criteria]), criteria, before, runs)


def _part(criterion: Criterion, runs: Runs | None, folders: Sequence[Path], note: str) -> Part:
    number = _found(criterion, runs, [*folders, SHIPPED])
    if note and criterion.kind == "runs" and isinstance(number, Finding):
        number = number._replace(note="; ".join(filter(None, [number.note, note])))
    return criterion, number, judge(criterion, number)


def _lacking(one: Judged) -> tuple[int, int]:
    """How many criteria ask for runs that are not there, and how many for more samples than these have."""
    own = [(criterion, number) for criterion, number, _ in one.criteria if criterion.kind == "runs"]
    found = [number.n < criterion.n for criterion, number in own if isinstance(number, Finding)]
    return len(own) - len(found), sum(found)


@cache
def shipped_runs(*archives: Path) -> Runs | None:
    """The runs that kvbench ships in these; None where it was installed without them."""
    there = [archive for archive in archives if archive.is_file()]
    return collect(there) if there else None


def _found(criterion: Criterion, runs: Runs | None, folders: Sequence[Path]) -> Finding | Missing:
    if criterion.kind == "runs":
        return sampled(runs, criterion.asked)
    if criterion.kind == "printed":
        return printed(criterion.asked)
    return filed(folders, criterion.asked)


def sentence(criterion: Criterion, found: Finding | Missing) -> str:
    """What was measured for a criterion, with its interval and what it should be."""
    if isinstance(found, Missing):
        return f"{criterion.about}: {found.why}"
    interval = "" if found.low is None or found.low == found.high else f" [{found.low:.3g}, {found.high:.3g}]"
    few = f", {found.n} of {criterion.n} samples" if found.n < criterion.n else ""
    note = f" ({found.note})" if found.note else ""
    return f"{criterion.about}: {found.value:.3g}{interval}{few}; wanted {criterion.wanted}{note}"


def _summary(found: Sequence[Judged]) -> str:
    counts = {verdict: sum(one.verdict is verdict for one in found) for verdict in Verdict}
    words = ", ".join(f"{count} {one.of(count)}" for one, count in counts.items())
    return " ".join(filter(None, [f"{len(found)} claims: {words}.", unmeasured(found)]))


def unmeasured(found: Sequence[Judged]) -> str:
    """Why claims are not measured where kvbench was installed without the runs that it ships, and the remedy, in words;
    "" where all are or these are there.
    """
    absent = [name for name in DECIDING if not (SHIPPED / name).is_file()]
    if not absent or not any(one.verdict is Verdict.NOT_MEASURED for one in found):
        return ""
    return (
        f"A claim has no verdict while one of its criteria is not measured: this kvbench was installed without "
        f"{', '.join(absent)}, which a checkout of its repository has in results/. Name them beside your own runs, or "
        "run kvbench in a checkout."
    )


def console(found: Sequence[Judged]) -> str:
    """A paragraph for each claim."""
    paragraphs = ["\n".join(_paragraph(one)) + "\n" for one in found]
    return "\n".join([*paragraphs, textwrap.fill(_summary(found), WIDTH)]) + "\n"


def _paragraph(one: Judged) -> Iterator[str]:
    yield from textwrap.wrap(f"{one.claim.id}  {one.shown.upper()}  {one.claim.claim} [{one.claim.source}]", WIDTH)
    for line in one.sentences:
        yield from textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="      ")
    whys = {"original": one.claim.original, "weaker": one.claim.weaker, "superseded": one.claim.superseded.why}
    for name, text in whys.items():
        if text:
            yield from textwrap.wrap(f"{name}: {text}", WIDTH, initial_indent="    ", subsequent_indent="      ")


HEADS = ("id", "claim", "source", "kind", "measured", "verdict", "original", "weaker", "superseded")


def _rows(found: Sequence[Judged]) -> Iterator[list[list[str]]]:
    """The cells of each claim's row, each the lines in it."""
    for one in found:
        claim = one.claim
        cells = [[claim.id], [claim.claim], [claim.source], [claim.kind], one.sentences, [one.shown]]
        yield [*cells, [claim.original], [claim.weaker], [claim.superseded.why]]


def markdown(found: Sequence[Judged]) -> str:
    """A table with a row for each claim."""
    rows = (["<br>".join(map(plain_markdown, cell)) for cell in row] for row in _rows(found))
    lines = [HEADS, ["---"] * len(HEADS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{_summary(found)}\n"


def csv_text(found: Sequence[Judged]) -> str:
    """A line for each criterion of each claim, numbers unrounded."""
    heads = ["id", "claim", "verdict", "part", "part_verdict", "value", "low", "high", "n", "wanted_n", "note"]
    rows: list[list[Any]] = [heads]
    for one in found:
        known = [(part, "") for part in one.criteria] + [(part, "superseded") for part in one.superseded]
        for (criterion, number, verdict), decides in known:
            start = [one.claim.id, one.claim.claim, one.shown, criterion.about, decides or verdict.value]
            numbers = (
                ["", "", "", "", criterion.n, number.why]
                if isinstance(number, Missing)
                else [*number[:4], criterion.n, number.note]
            )
            rows.append([*start, *numbers])
    return csv_lines(rows)


def html(found: Sequence[Judged]) -> str:
    """A page with one table; where a number is missing it has the command that measures it."""
    heads = "".join(f"<th class=label>{name}</th>" for name in HEADS)
    rows = []
    for row in _rows(found):
        rows.append("<tr>" + "".join(f"<td>{escape(chr(10).join(cell))}</td>" for cell in row) + "</tr>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>claims</title>'
        f"<style>{STYLE} td {{ max-width: 24rem; }}</style></head><body><h1>The papers' claims</h1>"
        f"<p>{escape(_summary(found))}</p><table class=outputs><thead><tr>{heads}</tr></thead>\n<tbody>"
        + "\n".join(rows)
        + "</tbody></table></body></html>\n"
    )


FORMATS = {"console": console, "markdown": markdown, "csv": csv_text, "html": html}
