"""Intervals: what they must hold for any scores, and what they are close to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import record, stored

from kvbench.report.data.frame import collect
from kvbench.report.data.stats import (
    FEWEST,
    Estimate,
    difference,
    estimate,
    intervals,
    mean_score,
    ratio,
    student,
)

Z = student(np.inf)

scores = st.lists(st.sampled_from(np.linspace(0, 100, 17)), min_size=2, max_size=40).map(np.array)
INTERVALS_OF = {"scores": mean_score, "differences": difference, "numbers": estimate}


@pytest.mark.parametrize("kind", INTERVALS_OF)
@given(strata=st.lists(scores, min_size=1, max_size=4), seed=st.integers(0, 9))
def test_an_interval_has_the_mean_over_strata_and_depends_on_no_order(kind, strata, seed):
    found = INTERVALS_OF[kind](strata)
    assert found.mean == pytest.approx(np.mean([values.mean() for values in strata]))
    assert found.n == sum(map(len, strata))
    assert found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high
    if kind == "scores":
        assert found.low >= 0 and found.high <= 100
    rng = np.random.default_rng(seed)
    mixed = [rng.permutation(values) for values in strata]
    again = INTERVALS_OF[kind]([mixed[place] for place in rng.permutation(len(mixed))])
    assert again[:3] == pytest.approx(found[:3], abs=1e-6)


@pytest.mark.parametrize("kind", INTERVALS_OF)
@given(strata=st.lists(scores, min_size=1, max_size=4))
def test_a_wider_coverage_is_a_wider_interval(kind, strata):
    narrow, wide = (INTERVALS_OF[kind](strata, coverage) for coverage in (90, 99))
    assert wide.low <= narrow.low and narrow.high <= wide.high


@given(st.lists(scores, min_size=1, max_size=3))
def test_a_difference_turned_round_is_the_same(strata):
    found, turned = difference(strata), difference([-values for values in strata])
    assert found.turned[:4] == pytest.approx(turned[:4])


@pytest.mark.parametrize("kind, rel", [("scores", 0.2), ("numbers", 0.05)])
@pytest.mark.parametrize("strata, size", [(13, 8), (1, 40)])
def test_of_many_samples_far_from_a_bound_it_is_students_of_the_spread_within_strata(kind, rel, strata, size):
    values = [np.random.default_rng((7, stratum)).normal(50, 4, size) for stratum in range(strata)]
    found = INTERVALS_OF[kind](values)
    variance = sum(own.var(ddof=1) / size for own in values) / strata**2
    assert found.high - found.low == pytest.approx(2 * 1.98 * variance**0.5, rel=rel)


def test_of_a_number_that_may_be_negative_it_is_students():
    """Five numbers of mean 1 and standard deviation sqrt(2.5): 2.776 standard errors."""
    found = estimate([np.arange(-1.0, 4.0)])
    assert found[:2] == (1, pytest.approx(1 - 2.776 * np.sqrt(2.5 / 5), abs=1e-3))
    never = estimate([np.arange(1.0, 6.0)])  # on a logarithmic scale
    assert never.low * never.high == pytest.approx(never.mean**2)


@given(scores)
def test_strata_of_one_sample_each_are_taken_as_one(values):
    singles = [values[i : i + 1] for i in range(len(values))]
    for interval in (mean_score, estimate):
        found, pooled = interval(singles), interval([values])
        if np.isin(values, (0, 100)).all() and interval is mean_score:
            continue  # of which one stratum is Wilson's
        assert found[:3] == pytest.approx(pooled[:3])


@pytest.mark.parametrize("strata", [[[70.0]], [[70.0], [0.0, 100.0]]])
def test_one_number_has_no_interval(strata):
    found = estimate([np.array(values) for values in strata])
    assert found.low is None and found.high is None


def test_a_ratio_is_that_of_the_means_and_its_parts_are_paired():
    below = np.random.default_rng(1).uniform(1, 5, 20)
    found = ratio([2 * below], [below])
    assert found[:3] == pytest.approx((2, 2, 2))
    apart = ratio([2 * below[::-1]], [below])
    assert apart.mean == pytest.approx(2) and apart.low < 1.9 and apart.high > 2.1


def test_scores_that_are_all_alike_hide_others():
    assert mean_score([np.zeros(13)])[1:3] == (0, pytest.approx(22.8, abs=0.05))
    assert mean_score([np.zeros(1)] * 13)[1:3] == (0, pytest.approx(22.8, abs=0.05))
    interior = mean_score([np.full(13, 35.0)])
    assert interior.low < 30 and interior.high > 40
    assert difference([np.zeros(480)])[1:3] == (pytest.approx(-0.794, abs=1e-3), pytest.approx(0.794, abs=1e-3))


def test_what_differences_hide_is_no_larger_than_what_was_seen():
    """All of eight lost some 12 points: the others may have gained as many, and not 100."""
    found = difference([np.array([-11.0, -12, -13, -12, -11, -12, -13, -12])])
    assert -15 < found.low < -12 < found.high < -6


def test_of_44_pairs_one_is_lost():
    """Tango 1998 has -11.8 to 5.9, by another way."""
    found = difference([np.repeat([-100.0, 0.0], [1, 43])])
    assert found[1:3] == (pytest.approx(-11.8, abs=0.3), pytest.approx(5.9, abs=0.3))


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0, 16.11), (1, 29, 0.61, 17.18)],
)
def test_of_0_1_scores_it_is_wilsons_interval(hits, n, low, high):
    """Newcombe 1998, Table I, method 3."""
    found = mean_score([np.repeat([100.0, 0.0], [hits, n - hits])])
    assert (found.mean, found.low, found.high) == pytest.approx((100 * hits / n, low, high), abs=0.005)


@given(st.integers(1, 300), st.integers(0, 300))
def test_its_ends_are_as_far_from_the_share_as_their_own_spread_allows(n, hits):
    """What defines it: |share - end| = z sqrt(end (1 - end) / n)."""
    share = min(hits, n) / n
    found = mean_score([np.repeat([100.0, 0.0], [min(hits, n), n - min(hits, n)])])
    for end in (found.low / 100, found.high / 100):
        if 1e-6 < end < 1 - 1e-6:
            assert abs(share - end) == pytest.approx(Z * np.sqrt(end * (1 - end) / n), rel=1e-6)
    assert found.low < found.high and found.low <= found.mean <= found.high


@pytest.mark.parametrize("sizes", [[40], [20, 20], [10, 10, 10, 10]])
def test_that_all_samples_are_right_is_no_certainty_however_they_are_grouped(sizes):
    found = mean_score([np.full(size, 100.0) for size in sizes])
    assert (found.low, found.high) == (pytest.approx(91.24, abs=0.005), 100)


@pytest.mark.parametrize(
    ("values", "differs"),
    [([5.0] * 20, False), ([5.0, 4.0] * 2, False), ([5.0, 4.0] * 4, True), ([5.0, -5.0] * 4, False)],
)
def test_a_difference_is_more_than_chance_only_over_enough_samples_that_are_not_all_alike(values, differs):
    assert estimate([np.array(values)]).differs == differs and FEWEST == 8


def test_three_samples_have_a_range_and_it_is_called_one():
    three, four = estimate([np.array([1.0, 2.0, 6.0])]), estimate([np.array([1.0, 2.0, 3.0, 6.0])])
    assert three[1:3] == (1, 6) and three.is_range and not four.is_range
    assert not mean_score([np.array([0.0, 100.0])]).is_range
    assert intervals([three, Estimate(1, None, None, 1)]) == "ranges" and intervals([four]) == "95 % intervals"
    assert "ranges" in intervals([three, four]) and "95 %" in intervals([three, four])


def test_no_score_of_samples_that_are_all_alike_has_an_interval_without_width(tmp_path):
    """Where another method's scores lie between 0 and 100 no 0/1 rule applies; agreement with itself has none."""
    stored(tmp_path, "full", None, {f"task{number}": [0.5] for number in range(13)}, task="ruler")
    stored(tmp_path, "quest", 64, {f"task{number}": [0.0] for number in range(13)}, task="ruler")
    lost = next(run for run in collect([tmp_path]) if run.arm["method"] == "quest").score()
    assert lost[:3] == (0.0, 0.0, pytest.approx(22.8, abs=0.05))
    near = [record(str(n), "", 1.0, fidelity={"kl_mean": 0.0, "nll": 1.0, "nll_full": 1.0}) for n in range(13)]
    stored(tmp_path / "texts", "quest", 64, [{**near[0], "scores": {"accuracy": 0.9}}, *near[1:]], task="fidelity")
    stored(tmp_path / "texts", "full", None, near, task="fidelity")
    full = next(run for run in collect([tmp_path / "texts"]) if run.is_full).score()
    assert full[:3] == (100.0, None, None)
