"""What an undecided claim asks for: samples that would decide it, narrower intervals; and what ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import stored

from kvbench.report.claims.claim import Criterion, claims
from kvbench.report.claims.page import Judged
from kvbench.report.claims.power import lacks, required_samples
from kvbench.report.claims.verdict import Finding, Interval, Missing, Verdict, judge
from kvbench.report.data.frame import collect
from kvbench.report.data.stats import Z, difference, estimate, proportion, repeated
from kvbench.report.site.rows import Site
from kvbench.report.tables.runs import summary

AT_LEAST_0 = Criterion("a gain", "runs", {}, at_least=0, n=4)


def of_file(at_least: float, n: int = 4) -> Criterion:
    return Criterion("a number", "file", {}, at_least=at_least, n=n)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_paired_shares_have_tangos_interval(gained: int, lost: int, alike: int) -> None:
    """Its ends are where a score test just rejects, so the other way round they are the same."""
    if (n := gained + lost + alike) == 0:
        return
    values = np.repeat([100.0, -100.0, 0.0], [gained, lost, alike])
    found, turned = difference([values]), difference([-values])
    assert found.low is not None and found.high is not None and turned.low is not None
    assert found.low <= found.mean <= found.high and found.low < found.high
    assert (found.low, found.high) == pytest.approx((-turned.high, -turned.low), abs=1e-6)
    if gained == lost == 0:
        assert found.high == pytest.approx(100 * Z**2 / (n + Z**2))
    if min(gained, lost, alike) >= 5:  # the normal approximation is not far
        share = (gained + lost) / n - (found.mean / 100) ** 2
        assert (found.high - found.low) / 2 == pytest.approx(100 * Z * np.sqrt(share / n), rel=0.25)


def test_tangos_interval_is_as_he_printed_it() -> None:
    """Tango 1998: of 44 pairs one is lost."""
    found = difference([np.repeat([-100.0, 0.0], [1, 43])])
    assert (found.low, found.high) == (pytest.approx(-11.8, abs=0.05), pytest.approx(5.9, abs=0.05))


def test_scores_that_are_all_as_far_apart_may_differ_in_samples_that_were_not_seen() -> None:
    alike, graded = difference([np.zeros(480)]), difference([np.full(480, 25.0)])
    assert alike.high == pytest.approx(0.79, abs=0.005) and alike.low == -alike.high
    assert graded.low is not None and graded.low < graded.mean == 25 < graded.high < 26  # type: ignore[operator]
    values = np.arange(20.0)
    assert difference([values]) == estimate([values])


@given(st.lists(st.floats(0.5, 2), min_size=4, max_size=8))
def test_an_interval_of_repeats_narrows_with_more_of_them(values: list[float]) -> None:
    if np.ptp(values) < 1e-3:
        return
    few, many = repeated(np.array(values)), repeated(np.array(values * 4))
    assert few.low < many.low <= many.mean <= many.high < few.high  # type: ignore[operator]


def test_of_the_mean_of_repeats_it_is_students() -> None:
    """Five numbers of mean 3 and standard deviation sqrt(2.5): 2.776 standard errors."""
    found = repeated(np.arange(1.0, 6.0))
    assert (found.mean, found.high) == (3, pytest.approx(3 + 2.776 * np.sqrt(2.5 / 5)))
    assert repeated(np.ones(1)).low is None
    wide = repeated(np.tile([0.0, 1.0], 15))  # 29 degrees of freedom: 2.045
    assert wide.high == pytest.approx(0.5 + 2.045 * np.sqrt(0.25 / 29), abs=1e-3)


@pytest.mark.parametrize("factor", [2, 4])
def test_the_samples_that_are_asked_for_decide_if_mean_and_spread_stay(factor: int) -> None:
    shares, times = np.repeat([100.0, 0.0], [98, 2]), np.array([0.9, 1.1, 1.3, 1.2])
    for made, interval, bound in (
        (proportion([shares]), Interval.WILSON, 98 - 3 / factor),
        (repeated(times), Interval.STUDENT, times.mean() - 0.2 / factor),
        (estimate([np.arange(40.0)]), Interval.BOOTSTRAP, 19.5 - 3 / factor),
    ):
        found = Finding(*made[:4], "", interval)
        criterion = of_file(float(bound))
        assert judge(criterion, found) is Verdict.UNDECIDED
        wanted = required_samples(criterion, found)
        assert wanted is not None and wanted > found.n
    wanted = required_samples(of_file(96.5), Finding(*proportion([shares])[:4], "", Interval.WILSON))
    assert wanted == next(n for n in range(100, 2000) if _low(n) >= 96.5)


def test_samples_that_are_dropped_or_choose_a_rival_are_asked_for_too() -> None:
    shares = proportion([np.repeat([100.0, 0.0], [39, 1])])[:3]
    of_40, of_100 = (Finding(*shares, n, "", Interval.WILSON, 40 / n) for n in (40, 100))
    whole, part = (required_samples(of_file(93), found) for found in (of_40, of_100))
    assert whole is not None and part is not None and part == pytest.approx(2.5 * whole, abs=2)
    half = Finding(1.0, -1.0, 3.0, 40, "", Interval.BOOTSTRAP, taken=2.0)  # 160 of them would end at 0
    told = lacks(of_file(0), half, None)
    assert told.startswith("320 samples, 160 of them") and "240 more" in told


def _low(n: int) -> float:
    """The lower end of Wilson's interval of 98 % of n."""
    share = 0.98
    return 100 * (share + Z**2 / (2 * n) - Z * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))) / (1 + Z**2 / n)


def test_what_more_samples_would_not_decide_says_so() -> None:
    assert lacks(AT_LEAST_0, Finding(1, 0.5, 2, 4), None) == "" == lacks(AT_LEAST_0, Missing("no run"), None)
    assert "would not decide" in lacks(AT_LEAST_0, Finding(1, -1, 2, 4), None)  # a range
    assert "would not decide" in lacks(AT_LEAST_0, Finding(0, -1, 2, 4, "", Interval.BOOTSTRAP), None)
    assert "stay undecided" in lacks(AT_LEAST_0, Finding(0.1, -1, 2, 9, "", Interval.BOOTSTRAP), None)
    few = lacks(of_file(0, n=6), Finding(0.5, -1, 2, 2, "", Interval.STUDENT), None)
    assert few.startswith("6 samples") and "4 more" in few


def test_superseded_criteria_are_judged_and_decide_nothing(shipped_verdicts: list[Judged]) -> None:
    before = {one.id: one.superseded for one in claims() if one.superseded.criteria}
    assert {"ice-1", "par-3", "quest-1", "base-6"} <= before.keys() and all(one.why for one in before.values())
    for one in shipped_verdicts:
        assert [part for part, *_ in one.superseded] == list(one.claim.superseded.criteria)
        assert sum(line.startswith("superseded") for line in one.sentences) == len(one.superseded)


def test_the_page_counts_the_claims_as_they_are() -> None:
    page = Path(__file__).parents[1] / "kvbench/report/README.md"
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
