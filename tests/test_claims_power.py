"""What an undecided claim asks for: samples that would decide it, narrower intervals; and what ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from report_runs import stored

from kvbench.report.claims.claim import Criterion, claims
from kvbench.report.claims.page import Judged
from kvbench.report.claims.power import lacks, required_samples
from kvbench.report.claims.verdict import Finding, Missing, Verdict, estimated, judge
from kvbench.report.data.frame import collect
from kvbench.report.data.stats import estimate, mean_score
from kvbench.report.site.rows import Site
from kvbench.report.tables.runs import summary

AT_LEAST_0 = Criterion("a gain", "runs", {}, at_least=0, n=4)


def of_file(at_least: float, n: int = 4) -> Criterion:
    return Criterion("a number", "file", {}, at_least=at_least, n=n)


@pytest.mark.parametrize("factor", [2, 4])
def test_the_samples_that_are_asked_for_decide_if_mean_and_spread_stay(factor: int) -> None:
    shares, times = np.repeat([100.0, 0.0], [98, 2]), np.array([0.9, 1.1, 1.3, 1.2])
    for made, interval, bound in (
        (shares, mean_score, 98 - 3 / factor),
        (times, estimate, times.mean() - 0.2 / factor),
        (np.arange(40.0), estimate, 19.5 - 3 / factor),
    ):
        found = estimated(interval([made]))
        criterion = of_file(float(bound))
        assert judge(criterion, found) is Verdict.UNDECIDED
        wanted = required_samples(criterion, found)
        assert wanted is not None and wanted > found.n
        many = estimated(interval([np.tile(made, -(-wanted * 3 // 2 // len(made)))]))
        assert judge(criterion, many) is Verdict.HOLDS


def test_samples_that_are_dropped_or_choose_a_rival_are_asked_for_too() -> None:
    shares = mean_score([np.repeat([100.0, 0.0], [39, 1])])[:3]
    of_40, of_100 = (Finding(*shares, n, "", False, 40 / n) for n in (40, 100))
    whole, part = (required_samples(of_file(93), found) for found in (of_40, of_100))
    assert whole is not None and part is not None and part == pytest.approx(2.5 * whole, abs=2)
    half = Finding(1.0, -1.0, 3.0, 40, "", False, taken=2.0)  # some 160 of them would end at 0
    told = re.match(r"(\d+) samples, (\d+) of them", lacks(of_file(0), half, None))
    assert told is not None and int(told[1]) == pytest.approx(2 * int(told[2]), abs=10) and 150 <= int(told[2]) <= 165


@pytest.mark.parametrize("looks", [(), (24,), (24, 30), (26, 78, 104, 234)])
def test_every_look_at_the_samples_is_paid_for(looks: tuple[int, ...]) -> None:
    """So that under the truth at the bound one of all looks errs in 5 % at most."""
    criterion = Criterion("a gain", "runs", {}, at_least=0, looks=looks)
    assert max(1, len(looks)) * (100 - criterion.coverage) == pytest.approx(5)
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(300):
        values = rng.normal(0, 1, max(looks, default=30))
        seen = [estimated(estimate([values[:n]], criterion.coverage)) for n in looks or (30,)]
        wrong += any(judge(criterion, found) is not Verdict.UNDECIDED for found in seen)
    assert wrong <= 24  # 15, and two and a half of its own error


def test_what_more_samples_would_not_decide_says_so() -> None:
    assert lacks(AT_LEAST_0, Finding(1, 0.5, 2, 4), None) == "" == lacks(AT_LEAST_0, Missing("no run"), None)
    assert "would not decide" in lacks(AT_LEAST_0, Finding(1, -1, 2, 4), None)  # a range
    assert "would not decide" in lacks(AT_LEAST_0, Finding(0, -1, 2, 4, "", False), None)
    assert "stay undecided" in lacks(AT_LEAST_0, Finding(0.1, -1, 2, 9, "", False), None)
    few = lacks(of_file(0, n=6), Finding(0.9, -0.1, 2, 4, "", False), None)
    assert few.startswith("6 samples") and "2 more" in few


def test_superseded_criteria_are_judged_and_decide_nothing(shipped_verdicts: list[Judged]) -> None:
    before = {one.id: one.superseded for one in claims() if one.superseded.criteria}
    assert {"ice-1", "par-3", "quest-1", "base-6"} <= before.keys() and all(one.why for one in before.values())
    for one in shipped_verdicts:
        assert [part for part, *_ in one.superseded] == list(one.claim.superseded.criteria)
        assert sum(line.startswith("superseded") for line in one.sentences) == len(one.superseded)


def test_the_page_counts_the_claims_as_they_are() -> None:
    page = Path(__file__).parents[1] / "docs/guide/reports.md"
    counts = re.findall(r"(\d+) claims\b", page.read_text())
    assert counts and set(counts) == {str(len(claims()))}


@pytest.mark.parametrize(
    ("full", "quest", "why"),
    [
        ([1.0] * 40, [0.0] * 20 + [1.0] * 20, ""),
        ([1.0] * 7 + [0.0] * 33, [0.0] * 20 + [1.0] * 20, "under 20"),  # 17.5
        ([1.0] * 20 + [0.0] * 20, [1.0] * 22 + [0.0] * 18, "wider"),
    ],
)
def test_samples_that_full_attention_does_not_answer_rank_no_method(
    tmp_path: Path, full: list[float], quest: list[float], why: str
) -> None:
    stored(tmp_path, "full", None, full)
    stored(tmp_path, "quest", 64, quest)
    stored(tmp_path, "snapkv", 64, quest)
    runs = collect([tmp_path])
    assert all(why in run.ranks_none and bool(why) == bool(run.ranks_none) == ("w" in run.marks()) for run in runs)
    assert all(row.is_choice == (not why) for row in Site(runs, "").rows if row.method != "full")
    (table,) = summary(runs)
    assert any(note.startswith("w: ") for note in table.notes) == bool(why)
    assert any(cell.differs_from_full for cell in table.cells.values()) == (not why), "no star where nothing ranks"
