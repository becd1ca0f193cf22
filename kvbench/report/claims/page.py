"""The claims with their numbers and verdicts, for the console, Markdown, CSV and HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvbench.config import shipped_folder
from kvbench.report.claims.claim import Claim, Criterion, claims
from kvbench.report.claims.numbers import filed, printed
from kvbench.report.claims.power import lacks
from kvbench.report.claims.sampled import sampled
from kvbench.report.claims.verdict import Finding, Missing, Setting, Verdict, judge, of_all
from kvbench.report.data.frame import collect
from kvbench.report.data.run import Runs
from kvbench.report.data.table import csv_of
from kvbench.report.html import render
from kvbench.report.tables.formats import plain_markdown

SHIPPED = shipped_folder("results")
WIDTH = 120
OURS = "runs that kvbench ships"
DECIDING = tuple(  # the archives of them
    f"{name}.tar.xz" for name in ("claims", "quantised", "quantised_long", "reference_qwen")
)


Part = tuple[Criterion, Finding | Missing, Verdict]


class Judged(NamedTuple):
    """A claim with its verdict.

    Attributes
    ----------
    criteria
        each with what was found, and its own verdict.
    superseded
        the same of criteria that no longer decide.
    runs
        that it was judged by.
    """

    claim: Claim
    verdict: Verdict
    criteria: list[Part]
    superseded: list[Part]
    runs: Runs | None

    @property
    def setting(self) -> Setting:
        """Whether the verdict is on the claim itself or on a stand-in.

        Where printed numbers alone decide it is on the claim itself.
        """
        if self.verdict is Verdict.NOT_TESTABLE:
            return Setting.NOWHERE
        kinds = {
            criterion.kind
            for criterion, _, verdict in self.criteria
            if criterion.decides and verdict is self.verdict
        }
        is_own = not self.claim.original or kinds == {"printed"}
        return Setting.HERE if is_own else Setting.STAND_IN

    @property
    def shown(self) -> str:
        """The verdict as a reader sees it; a stand-in's is said to be one."""
        if self.setting is Setting.STAND_IN:
            return f"{Setting.STAND_IN.value}: {self.verdict.value}"
        return self.verdict.value

    @property
    def sentences(self) -> list[str]:
        """What was measured, or what is missing, of each criterion.

        Superseded criteria say so, with their verdict.
        """
        before = [
            f"superseded ({verdict.value}): {sentence(part, finding)}"
            for part, finding, verdict in self.superseded
        ]
        now = [
            (
                sentence(part, finding),
                lacks(part, finding, self.runs) if verdict is Verdict.UNDECIDED else "",
            )
            for part, finding, verdict in self.criteria
        ]
        return ["; ".join(filter(None, words)) for words in now] + before

    @property
    def lacking(self) -> tuple[int, int, int]:
        """How many criteria lack runs that decide, runs of any kind, and samples in those they
        have.
        """
        parts = [part for part in self.criteria if part[0].kind == "runs" and part[0].decides]
        measured = [(part, number.n) for part, number, _ in parts if isinstance(number, Finding)]
        open_verdicts = Verdict.NOT_MEASURED, Verdict.NOT_TESTABLE
        undecidable = sum(verdict in open_verdicts for *_, verdict in parts)
        too_few = sum(n < criterion.n for criterion, n in measured)
        return undecidable, len(parts) - len(measured), too_few

    @property
    def paragraph(self) -> str:
        """The claim, its verdict, and all that is known of both, in lines of a console."""
        claim = self.claim
        head = f"{claim.id}  {self.shown.upper()}  {claim.claim} [{claim.source}]"
        whys = {
            "original": claim.original,
            "design": claim.design,
            "weaker": claim.weaker,
            "superseded": claim.superseded.why,
        }
        inset = textwrap.TextWrapper(WIDTH, initial_indent="    ", subsequent_indent="      ")
        lines = [*self.sentences, *(f"{name}: {text}" for name, text in whys.items() if text)]
        wrapped = [line for text in lines for line in inset.wrap(text)]
        return "\n".join([*textwrap.wrap(head, WIDTH), *wrapped]) + "\n"


def judged(runs: Runs | None, folders: Sequence[Path]) -> list[Judged]:
    """Every claim with its verdict, by these runs and by files of measurements.

    Files are those in these folders, else the shipped ones. If the runs that kvbench ships measure
    more of a claim, on as many samples as it needs, they decide it.
    """
    judgements = []
    for claim in claims():
        judgement = _judged(claim, runs, folders)
        if any(judgement.lacking):
            shipped = shipped_runs(*(SHIPPED / name for name in DECIDING))
            theirs = _judged(claim, shipped, [], OURS)
            judgement = theirs if theirs.lacking < judgement.lacking else judgement
        judgements.append(judgement)
    return judgements


def _judged(claim: Claim, runs: Runs | None, folders: Sequence[Path], note: str = "") -> Judged:
    """A claim by these runs alone; a note says of each number whose runs they are."""
    criteria, before = (
        [_part(criterion, runs, folders, note) for criterion in some]
        for some in (claim.criteria, claim.superseded.criteria)
    )
    verdicts = [verdict for criterion, _, verdict in criteria if criterion.decides]
    return Judged(claim, of_all(verdicts), criteria, before, runs)


def _part(criterion: Criterion, runs: Runs | None, folders: Sequence[Path], note: str) -> Part:
    folders, notes = [*folders, SHIPPED], [note if criterion.kind == "runs" else ""]
    there = elsewhere = runs
    if runs is not None and criterion.device is not None:
        there = runs.only(run for run in runs if run.arm["device"] == criterion.device)
        elsewhere = runs.only(run for run in runs if run.arm["device"] != criterion.device)
    number = _measured(criterion, there, folders)
    verdict = judge(criterion, number)
    if criterion.device and (criterion.kind != "runs" or isinstance(number, Missing)):
        number, verdict = _measured(criterion, elsewhere, folders), Verdict.NOT_TESTABLE
        notes.append("on a CPU, whose times decide nothing here")
    if isinstance(number, Finding):
        number = number._replace(note="; ".join(filter(None, [number.note, *notes])))
    return criterion, number, verdict


@cache
def shipped_runs(*archives: Path) -> Runs | None:
    """The runs that kvbench ships in these; None where it was installed without them."""
    there = [archive for archive in archives if archive.is_file()]
    return collect(there) if there else None


def _measured(
    criterion: Criterion, runs: Runs | None, folders: Sequence[Path]
) -> Finding | Missing:
    if criterion.kind == "runs":
        return sampled(runs, criterion.spec, criterion.coverage)
    if criterion.kind == "printed":
        return printed(criterion.spec)
    return filed(folders, criterion.spec, criterion.coverage)


def sentence(criterion: Criterion, finding: Finding | Missing) -> str:
    """What was measured for a criterion, with its interval and what it should be."""
    if isinstance(finding, Missing):
        return f"{criterion.description}: {finding.why}"
    has_width = finding.low is not None and finding.low != finding.high
    interval = f" [{finding.low:.3g}, {finding.high:.3g}]" if has_width else ""
    few = f", {finding.n} of {criterion.n} samples" if finding.n < criterion.n else ""
    note = f" ({finding.note})" if finding.note else ""
    looked = f" at {criterion.coverage:.4g} %" if len(criterion.looks) > 1 and interval else ""
    wanted = f"wanted {criterion.bounds_text}" if criterion.decides else "decides nothing"
    return f"{criterion.description}: {finding.value:.3g}{interval}{looked}{few}; {wanted}{note}"


def counted(judgements: Sequence[Judged]) -> dict[Setting, dict[Verdict, int]]:
    """How many claims have each verdict, in each setting; what none has is left out."""
    return {
        setting: {
            verdict: count
            for verdict in Verdict
            if (
                count := sum(
                    judgement.setting is setting and judgement.verdict is verdict
                    for judgement in judgements
                )
            )
        }
        for setting in Setting
    }


def _summary(judgements: Sequence[Judged]) -> str:
    parts = [
        f"{sum(counts.values())} {setting.value}"
        + (
            f" ({', '.join(f'{count} {verdict.of(count)}' for verdict, count in counts.items())})"
            if setting is not Setting.NOWHERE
            else ""
        )
        for setting, counts in counted(judgements).items()
    ]
    claimed = f"{len(judgements)} claims: {', '.join(parts)}."
    return " ".join(filter(None, [claimed, unmeasured(judgements)]))


def unmeasured(judgements: Sequence[Judged]) -> str:
    """Why claims are not measured in an installation without the shipped runs, and the remedy.

    "" where all are measured, or the shipped runs are there.
    """
    absent = [name for name in DECIDING if not (SHIPPED / name).is_file()]
    if not absent or not any(judgement.verdict is Verdict.NOT_MEASURED for judgement in judgements):
        return ""
    return (
        "A claim has no verdict while one of its criteria is not measured: this kvbench was"
        f" installed without {', '.join(absent)}, which a checkout of its repository has in"
        " results/. Name them beside your own runs, or run kvbench in a checkout."
    )


def console(judgements: Sequence[Judged]) -> str:
    """A paragraph for each claim."""
    paragraphs = [judgement.paragraph for judgement in judgements]
    return "\n".join([*paragraphs, textwrap.fill(_summary(judgements), WIDTH)]) + "\n"


def _rows(judgements: Sequence[Judged]) -> list[dict[str, list[str]]]:
    """The cells of each claim's row by their heads, each the lines in it."""
    return [
        {
            **{name: [getattr(one.claim, name)] for name in ("id", "claim", "source", "kind")},
            "measured": one.sentences,
            "verdict": [one.shown],
            **{name: [getattr(one.claim, name)] for name in ("original", "design", "weaker")},
            "superseded": [one.claim.superseded.why],
        }
        for one in judgements
    ]


def markdown(judgements: Sequence[Judged]) -> str:
    """A table with a row for each claim."""
    rows = _rows(judgements)
    lines = [[*rows[0]], ["---"] * len(rows[0])]
    lines += [["<br>".join(map(plain_markdown, cell)) for cell in row.values()] for row in rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{_summary(judgements)}\n"


OF_CRITERIA = ("id", "claim", "setting", "verdict", "part", "part_verdict")
NUMBERS = ("value", "low", "high", "n", "wanted_n", "note")


def csv_text(judgements: Sequence[Judged]) -> str:
    """A line for each criterion of each claim, numbers unrounded."""
    rows: list[dict[str, Any]] = []
    for one in judgements:
        claim: dict[str, Any] = dict.fromkeys((*OF_CRITERIA, *NUMBERS), "")
        claim |= {"id": one.claim.id, "claim": one.claim.claim}
        claim |= {"setting": one.setting.value, "verdict": one.verdict.value}
        parts = [
            (*part, part[2].value if part[0].decides else "information") for part in one.criteria
        ]
        parts += [(*part, "superseded") for part in one.superseded]
        for criterion, number, _, decides in parts:
            measured = number._asdict() if isinstance(number, Finding) else {"note": number.why}
            words = {"part": criterion.description, "part_verdict": decides}
            rows.append({**claim, **words, **measured, "wanted_n": criterion.n})
        if not parts:
            rows.append({**claim, "note": one.claim.original})
    return csv_of(pd.DataFrame(rows, columns=[*OF_CRITERIA, *NUMBERS], dtype=object))


def html(judgements: Sequence[Judged]) -> str:
    """A page with one table; where a number is missing it has the command that measures it."""
    return render("claims.html", rows=_rows(judgements), summary=_summary(judgements))


FORMATS = {"console": console, "markdown": markdown, "csv": csv_text, "html": html}
