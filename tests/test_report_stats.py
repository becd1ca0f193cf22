"""Intervals: what they must hold for any scores, and what they are close to."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from report_runs import record, stored

from kvbench.report.data.frame import collect
from kvbench.report.data.stats import FEWEST, SCORES, Estimate, Z, estimate, intervals, proportion

scores = st.lists(st.floats(0, 100), min_size=2, max_size=40).map(np.array)


@given(st.lists(scores, min_size=1, max_size=4))
@example([np.array([1.72027579, 1.72027579])] * 3)
def test_an_interval_lies_within_the_scores_and_its_mean_is_the_mean_over_strata(strata):
    found = estimate(strata)
    assert found.mean == pytest.approx(np.mean([values.mean() for values in strata]))
    assert found.n == sum(map(len, strata))
    lowest, highest = np.concatenate(strata).min(), np.concatenate(strata).max()
    assert lowest - 1e-9 <= found.low <= found.mean <= found.high <= highest + 1e-9


@given(scores, st.floats(-50, 50))
def test_an_interval_moves_with_its_scores(values, by):
    here, there = estimate([values]), estimate([values + by])
    assert (there.low, there.high) == pytest.approx((here.low + by, here.high + by), abs=1e-6)


def test_of_many_samples_it_is_close_to_the_normal_interval():
    values = np.repeat([0.0, 100.0], [300, 700])
    found = estimate([values])
    error = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    # Resamples put 2,000 points on the curve: their own noise at the 2.5th percentile is some 5 % of the half width.
    assert (found.low, found.high) == pytest.approx((70 - error, 70 + error), abs=0.1 * error)


@pytest.mark.parametrize("strata, size", [(13, 2), (13, 4), (1, 12)])
def test_it_is_as_wide_as_the_spread_within_strata_says(strata, size):
    """By the unbiased variance of a stratified mean, which small strata would halve if they were drawn n of n."""
    values = [np.random.default_rng((7, stratum)).normal(50, 10, size) for stratum in range(strata)]
    found = estimate(values)
    variance = sum(own.var(ddof=1) / size for own in values) / strata**2
    assert found.high - found.low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.12)


@pytest.mark.parametrize("beta", [0.1, 0.3, 2.0])
def test_it_covers_the_mean_of_tasks_that_are_mostly_answered_always_or_never(beta):
    """13 tasks of two prompts, of which some have several parts: of two that are alike no spread is seen."""
    rng, covered = np.random.default_rng(5), 0
    for _ in range(200):
        shares, parts = rng.beta(beta, beta, 13), rng.choice([1, 2, 4], 13)
        found = estimate([100 * rng.binomial(of, share, 2) / of for share, of in zip(shares, parts, strict=True)])
        covered += found.low <= 100 * shares.mean() <= found.high
    assert covered >= 190  # 95 %; a plain bootstrap has 119, 151 and 166, and drawing n - 1 of n alone 123, 167 and 186


def test_strata_of_one_size_are_resampled_apart():
    values = np.repeat([0.0, 100.0], [50, 50])
    one, both = estimate([values]), estimate([values, values])
    # Two independent halves have a standard error smaller by the root of two; the same weights would keep it.
    assert (both.high - both.low) / (one.high - one.low) == pytest.approx(2**-0.5, rel=0.1)


@pytest.mark.parametrize("sizes", [[13], [1] * 13, [2] * 13, [1, 12], [4, 9]])
@pytest.mark.parametrize("value", [0.0, 35.0, 100.0])
def test_scores_that_are_all_alike_have_wilson_s_width(sizes, value):
    strata = [np.full(size, value) for size in sizes]
    found, n = estimate(strata, SCORES), sum(sizes)
    share = Z**2 / (n + Z**2)
    assert found.mean == value and found.n == n and not found.is_range
    assert found.low == pytest.approx((1 - share) * value)
    assert found.high == pytest.approx(value + share * (100 - value))
    whole = proportion([np.full(13, 0.0)])
    assert estimate([np.zeros(13)], SCORES)[:3] == pytest.approx(whole[:3])


def test_groups_of_one_sample_that_are_all_alike_hide_as_much_as_one_group():
    varied = np.array([0.0, 50.0, 100.0, 100.0])
    found = estimate([varied, *[np.array([0.0])] * 13], SCORES)
    alone = estimate([varied])
    assert found.high - found.mean > (alone.high - alone.mean) / 14 + 10


@pytest.mark.parametrize("strata", [[[70.0]], [[70.0], [0.0, 100.0]]])
def test_one_sample_has_no_interval(strata):
    found = estimate([np.array(values) for values in strata])
    assert found.low is None and found.high is None


@given(scores)
def test_strata_of_one_sample_each_are_resampled_as_one(values):
    found, pooled = estimate([values[i : i + 1] for i in range(len(values))]), estimate([values])
    assert (found.low, found.high) == pytest.approx((pooled.low, pooled.high))


def test_strata_of_one_sample_weigh_as_many_as_they_are():
    """Beside a stratum without spread, three of one sample are three quarters of the mean and all of its spread."""
    single = [np.array([value]) for value in (0.0, 60.0, 90.0)]
    pooled, found = estimate([np.concatenate(single)]), estimate([np.full(4, 80.0), *single])
    assert found.mean == pytest.approx((80 + 3 * 50) / 4)
    assert found.high - found.low == pytest.approx(0.75 * (pooled.high - pooled.low), rel=0.1)


def test_another_process_finds_the_same_interval():
    code = (
        "import numpy as np; from kvbench.report.data.stats import estimate; "
        "print(estimate([np.arange(30.0), np.arange(7.0) ** 2]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(estimate([np.arange(30.0), np.arange(7.0) ** 2]))


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0, 16.11), (1, 29, 0.61, 17.18)],
)
def test_of_0_1_scores_it_is_wilsons_interval(hits, n, low, high):
    """Newcombe 1998, Table I, method 3."""
    found = proportion([np.repeat([100.0, 0.0], [hits, n - hits])])
    assert (found.mean, found.low, found.high) == pytest.approx((100 * hits / n, low, high), abs=0.005)


@given(st.integers(1, 300), st.integers(0, 300))
def test_its_ends_are_as_far_from_the_share_as_their_own_spread_allows(n, hits):
    """What defines it: |share - end| = z sqrt(end (1 - end) / n)."""
    share = min(hits, n) / n
    found = proportion([np.repeat([100.0, 0.0], [min(hits, n), n - min(hits, n)])])
    for end in (found.low / 100, found.high / 100):
        if 1e-6 < end < 1 - 1e-6:
            assert abs(share - end) == pytest.approx(Z * np.sqrt(end * (1 - end) / n), rel=1e-6)
    assert found.low < found.high and found.low <= found.mean <= found.high


@pytest.mark.parametrize("sizes", [[40], [20, 20], [10, 10, 10, 10]])
def test_that_all_samples_are_right_is_no_certainty_however_they_are_grouped(sizes):
    found = proportion([np.full(size, 100.0) for size in sizes])
    assert (found.low, found.high) == (pytest.approx(91.24, abs=0.005), 100)


def test_groups_of_unequal_size_weigh_as_the_small_one():
    found = proportion([np.full(1000, 100.0), np.full(4, 100.0)])
    assert found.low == pytest.approx(proportion([np.full(16, 100.0)]).low, abs=0.1)


@pytest.mark.parametrize(
    ("values", "differs"),
    [([5.0] * 20, False), ([5.0, 4.0] * 2, False), ([5.0, 4.0] * 4, True), ([5.0, -5.0] * 4, False)],
)
def test_a_difference_is_more_than_chance_only_over_enough_samples_that_are_not_all_alike(values, differs):
    assert estimate([np.array(values)]).differs == differs and FEWEST == 8


def test_three_samples_have_a_range_and_it_is_called_one():
    three, four = estimate([np.array([1.0, 2.0, 6.0])]), estimate([np.array([1.0, 2.0, 3.0, 6.0])])
    assert three[1:3] == (1, 6) and three.is_range and not four.is_range
    assert not proportion([np.array([0.0, 100.0])]).is_range
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
