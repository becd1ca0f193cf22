"""How many samples an undecided criterion needs, judged by their spread, and how long they take."""

from __future__ import annotations

import bisect
import itertools
import math
from datetime import datetime

from kvbench.report.claims.claim import Criterion
from kvbench.report.claims.sampled import arms_of, is_time, runs_of
from kvbench.report.claims.verdict import Finding, Missing, Verdict, judge
from kvbench.report.data.run import Run, Runs
from kvbench.report.data.stats import student
from kvbench.runs.stored import json_in

HOPELESS = 10  # times as many samples as there are: nobody will take them


def lacks(criterion: Criterion, finding: Finding | Missing, runs: Runs | None) -> str:
    """What would decide an undecided criterion, in words; "" for others."""
    if isinstance(finding, Missing) or judge(criterion, finding) is not Verdict.UNDECIDED:
        return ""
    required = required_samples(criterion, finding)
    if required is None:
        return "more samples would not decide it"
    more = math.ceil(max(1, required - finding.n) * finding.taken)
    choosing = math.ceil(required * (finding.taken - 1))
    choose = f", {_rounded(choosing)} of them to choose the rival," if choosing else ""
    total = f"{_rounded(required + choosing)} samples{choose}"
    words = f"{total} would decide it, if mean and spread stay, {_rounded(more)} more"
    # of fewer than it asks for the spread is not known
    if required > HOPELESS * finding.n >= HOPELESS * criterion.n:
        return f"{words}: it will stay undecided"
    minutes = minutes_a_sample(criterion, runs)
    if minutes is None:
        return words
    return f"{words}, about {_rounded(math.ceil(more * minutes))} min as the others took"


def required_samples(criterion: Criterion, finding: Finding) -> int | None:
    """The samples with which the interval would just leave the bounds that lie in it.

    They are at least the criterion's n. None where an interval does not narrow with samples, or its
    middle lies on a bound.
    """
    if finding.low is None or finding.high is None:
        return criterion.n
    bounds = [bound for bound in (criterion.at_least, criterion.at_most) if bound is not None]
    crossed = [bound for bound in bounds if finding.low <= bound <= finding.high]
    if any(bound == finding.value for bound in crossed) or (crossed and finding.is_range):
        return None
    return max([criterion.n, *(_until(finding, bound) for bound in crossed)])


def _until(finding: Finding, bound: float) -> int:
    """The samples with which the interval would end at a bound, if mean and spread stay."""
    end = finding.low if bound < finding.value else finding.high
    assert end is not None
    n = finding.n * finding.used_share
    spread = abs(finding.value - end) * math.sqrt(n) / student(max(1.0, n - 1))
    distance = abs(finding.value - bound)
    least = math.ceil((student(math.inf) * spread / distance) ** 2)
    required = bisect.bisect_left(
        range(16 * least + 16),
        True,
        lo=max(2, least),
        key=lambda n: bool(student(n - 1) * spread <= distance * math.sqrt(n)),
    )
    return math.ceil(required / finding.used_share)


def minutes_a_sample(criterion: Criterion, runs: Runs | None) -> float | None:
    """What a sample of all arms took in these runs, in minutes.

    Arms of scores ran side by side, those of times one after another, and a repeat is a run. None
    where no run says it: of files, and of runs without the times at which they began and ended.
    """
    if criterion.kind != "runs":
        return None
    spec, minutes = criterion.spec, list[float]()
    timed = is_time(spec["value"])
    for words in itertools.chain(*arms_of(spec).values()):
        chosen = runs_of(runs, spec["bed"], words, timed)
        spans = [] if isinstance(chosen, Missing) else [_span(run) for run in chosen]
        count = len(spans) if timed else sum(samples for _, samples in spans)
        minutes.append(sum(span for span, _ in spans) / max(1, count))
    return (sum if timed else max)(minutes) if minutes and all(minutes) else None


def _span(run: Run) -> tuple[float, int]:
    """The minutes in which a run took its last samples, and their number; 0: it does not say."""
    status = json_in(run.arm["path"] / "status.json")
    try:
        began, ended = (datetime.fromisoformat(str(status[key])) for key in ("began", "updated"))
        return (ended - began).total_seconds() / 60, int(status["ran"])
    except (KeyError, ValueError, TypeError):
        return 0.0, 0


def _rounded(count: int) -> str:
    """Two digits of a number, as it is an estimate."""
    digits = max(0, len(str(count)) - 2)
    return f"{-(-count // 10**digits) * 10**digits:,}"
