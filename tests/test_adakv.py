"""AdaKV: how heads share out a layer's budget, over SnapKV's votes and over any scorer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from driver import Driven, Stream, drive, each_accounting, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods
from kvbench.method import Method, Prompt

bind_methods()

from methods.blocks.head_budgets import HeadBudgets, rounded  # noqa: E402
from methods.blocks.scorer import Scorer  # noqa: E402
from methods.pyramidkv import PyramidKV, pyramid  # noqa: E402

quick = settings(deadline=None, derandomize=True)

# -- an independent reading of Algorithm 1, in plain Python ------------------------------------------------------------


def ranked(scores: Sequence[float]) -> list[int]:
    """Places by falling score; of equal ones the earlier first."""
    return sorted(range(len(scores)), key=lambda at: (-scores[at], at))


def heads_of_the_best(scores: Sequence[Sequence[float]], count: int) -> list[int]:
    """How many of the `count` best scores of all heads are each head's."""
    pairs = sorted((-score, head, at) for head, own in enumerate(scores) for at, score in enumerate(own))
    return [sum(head == own for _, own, _ in pairs[:count]) for head in range(len(scores))]


def shares(
    scores: Sequence[Sequence[float]], mean: int, alpha: Fraction, safeguard: str, window: int
) -> list[Fraction]:
    """Voted tokens of each head, not rounded: `mean` on average, beside a window of its own that is not in `scores`."""
    if safeguard == "share":
        among = heads_of_the_best(scores, len(scores) * mean)
        return [(1 - alpha) * count + alpha * mean for count in among]
    safe = max(math.floor(alpha * (mean + window)) - window, 0)  # the window fills it first
    rest = [sorted(own, reverse=True)[safe:] for own in scores]
    return [Fraction(safe + count) for count in heads_of_the_best(rest, len(scores) * (mean - safe))]


def whole_numbers(shares: Sequence[Fraction]) -> list[int]:
    """The nearest, with as few changed as it takes to keep the sum, and those by the least."""
    counts, heads = [round(share) for share in shares], range(len(shares))
    while missing := round(sum(shares)) - sum(counts):
        sign = 1 if missing > 0 else -1
        at = max(heads, key=lambda head: (sign * (shares[head] - counts[head]), -head))
        counts[at] += sign
    return counts


def official(shares_of_best: Sequence[int], mean: int, alpha: float) -> list[int]:
    """Its code's rounding: the nearest of the adaptive part and the floor of the safe one."""
    return [round((1 - alpha) * count + int(mean * alpha)) for count in shares_of_best]


class Given(Scorer):
    """Scores given beforehand, [H][N] for all rows and layers alike."""

    def __init__(self, scores: Sequence[Sequence[float]], window: int, heads: HeadBudgets, granularity: Any) -> None:
        self.scores, self.window, self.heads, self.granularity = torch.tensor(scores), window, heads, granularity

    def score(self, layer: int, prompt: Prompt) -> torch.Tensor:
        batch, longest = len(prompt.lengths), prompt.keys.shape[2]
        scores = self.scores[:, :longest].expand(batch, -1, -1).clone()
        for row, length in enumerate(prompt.lengths):
            scores[row, :, length:] = torch.nan
        return scores


@settings(quick, max_examples=40)
@given(st.data())
def test_heads_keep_what_the_algorithm_gives_them(data: st.DataObject) -> None:
    """Any scorer, ragged rows, ties, both safeguards and granularities, both accountings."""
    accounting = data.draw(st.sampled_from(["paper", "unified"]), "accounting")
    granularity = data.draw(st.sampled_from(["kv_head", "query_head"]), "granularity")
    safeguard = data.draw(st.sampled_from(["share", "top"]), "safeguard")
    alpha = Fraction(data.draw(st.integers(0, 10), "tenths of alpha"), 10)
    group, kv_heads = data.draw(st.integers(1, 3), "group"), data.draw(st.integers(1, 3), "KV heads")
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=1, max_size=3), "lengths")
    budget, window = data.draw(st.integers(8, 24), "budget"), data.draw(st.integers(0, 6), "window")
    heads = kv_heads if granularity == "kv_head" else kv_heads * group
    numbers = st.lists(st.integers(0, 12).map(float), min_size=30, max_size=30)
    scores = data.draw(st.lists(numbers, min_size=heads, max_size=heads), "scores")

    fixed = stream(*lengths, steps=34, layers=1, query_heads=kv_heads * group, kv_heads=kv_heads, head_dim=4)
    driven = drive(
        fixed,
        Given(scores, window, HeadBudgets(float(alpha), safeguard), granularity),  # type: ignore[arg-type]
        budget,
        accounting=accounting,
    )
    protected = window if accounting == "paper" else min(32, budget // 4)
    for row, length in enumerate(lengths):
        end, voted = max(length - protected, 0), min(budget, length) - protected
        own = [scores_of[:end] for scores_of in scores]
        counts = whole_numbers(shares(own, voted, alpha, safeguard, protected)) if voted > 0 else [0] * heads
        assert sum(counts) == heads * max(voted, 0)
        lists = [ranked(scores_of)[:count] for scores_of, count in zip(own, counts, strict=True)]
        if accounting == "unified" and granularity == "query_head":
            lists = joined(lists, group, protected)
        sets = [{*ids} for ids in lists]
        if len(sets) < len(driven.seen[0].sets(row)):
            sets = [ids for ids in sets for _ in range(group)]
        for at in driven.seen:
            last = length + at.step
            recent = range(end if accounting == "paper" else max(end, last - (budget - max(voted, 0))), last)
            assert at.sets(row) == [ids | {*recent} for ids in sets], (row, at.step)
    assert not driven.audit["over_rule"]
    if granularity == "kv_head" or accounting == "unified":
        assert driven.audit["attended_mean"] <= budget + (accounting == "paper") * 17.5


def joined(lists: Sequence[Sequence[int]], group: int, protected: int) -> list[list[int]]:
    """Lists of query heads joined by rank within each group, and cut to their mean with the protected tokens."""
    groups = [lists[first : first + group] for first in range(0, len(lists), group)]
    out = []
    for own in groups:
        count = sum(len(ids) + protected for ids in own) // group - protected
        ranks = [ids[rank] for rank in range(max(map(len, own))) for ids in own if rank < len(ids)]
        out.append(list(dict.fromkeys(ranks))[:count])
    return out


@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    tenths=st.integers(0, 10),
)
def test_budgets_are_the_official_ones_where_those_sum_to_the_budget(counts: list[int], tenths: int) -> None:
    """Where they do not, as few heads as can be have one token more or less."""
    counts[0] += -sum(counts) % len(counts)
    mean = sum(counts) // len(counts)
    alpha = tenths / 10
    real = [(1 - alpha) * count + alpha * mean for count in counts]
    ours = rounded(torch.tensor([real], dtype=torch.float64), torch.tensor([sum(counts)]))[0].tolist()
    assert sum(ours) == sum(counts)
    if mean * tenths % 10 == 0:
        theirs = official(counts, mean, alpha)
        assert sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) == abs(sum(theirs) - sum(counts))


# -- golden values of the official code --------------------------------------------------------------------------------


def golden(kv_heads: int = 2, scaled: bool = True) -> Stream:
    """Keys and queries by a formula: 40 tokens, 4 query heads, head dim 8."""

    def waves(heads: int, phase: float) -> torch.Tensor:
        h, t, d = (torch.arange(n, dtype=torch.float64) for n in (heads, 41, 8))
        h, t = h[:, None, None], t[:, None]
        wave = phase + 1.7 * h + 0.9 * t + 2.3 * d + 0.37 * t * d + 0.11 * h * t
        return (2 * torch.sin(wave)).float()[None, None]

    factor = (torch.arange(4)[:, None, None] + 1) / 2 if scaled else torch.ones(4, 1, 1)
    keys = waves(kv_heads, 1)
    return Stream((40,), 1, waves(4, 0.5) * factor, keys, keys, torch.zeros(1, 41, dtype=torch.int64))


def voted(driven: Driven) -> list[set[int]]:
    """Tokens that each head keeps for their votes; the window of 4 begins with 36."""
    return [{token for token in ids if token < 36} for ids in driven.seen[0].sets(0)]


@pytest.mark.parametrize("safeguard", ["share", "top"])
def test_kv_heads_keep_what_the_official_codes_keep(safeguard: str) -> None:
    """AdaKV's own and kvpress's agree on these."""
    method = method_named("adakv_snapkv", window=4, kernel=3, pooling="mean", safeguard=safeguard)
    assert voted(drive(golden(), method, 14)) == [
        {0, 1, 2, 20, 21, 22, 32, 33, 34},
        {1, 2, 3, 4, 5, 15, 16, 17, 18, 34, 35},
    ]


@pytest.mark.parametrize(("alpha", "counts"), [(0.0, [7, 13]), (0.2, [8, 12]), (0.5, [8, 12]), (1.0, [10, 10])])
def test_the_safe_share_is_the_official_code_s(alpha: float, counts: list[int]) -> None:
    method = method_named("adakv_snapkv", window=4, kernel=3, alpha=alpha)
    assert [*map(len, voted(drive(golden(), method, 14)))] == counts


def test_query_heads_share_exactly_what_the_official_rounding_leaves_one_short_of() -> None:
    """It gives 10, 9, 8 and 12, which is 39 for 40."""
    method = method_named("adakv_snapkv", window=4, kernel=3, granularity="query_head")
    counts = [*map(len, voted(drive(golden(scaled=False), method, 14)))]
    assert sum(counts) == 40
    assert sorted(ours - theirs for ours, theirs in zip(counts, [10, 9, 8, 12], strict=True)) == [0, 0, 0, 1]


# -- with other methods, in memory, and bad input ----------------------------------------------------------------------


def test_layers_and_heads_may_both_share_the_budget() -> None:
    """The paper's Ada-Pyramid: a layer's heads share what PyramidKV gives the layer."""
    method = PyramidKV()
    method.heads = HeadBudgets()
    driven = drive(stream(300, layers=4, steps=1), method, 48)
    sizes = [[len(ids) - 1 for ids in at.sets(0)] for at in driven.seen]
    assert [sum(heads) / 2 for heads in sizes] == [8 + count for count in pyramid(40, 4, 20, 292)]
    assert any(one != other for one, other in sizes)
    assert not driven.audit["over_rule"]


class Uneven(HeadBudgets):
    """Gives one head a token that it takes from no other."""

    def counts(self, scores: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
        counts = super().counts(scores, capacity)
        counts[:, 0] += 1
        return counts


@each_accounting
def test_the_audit_finds_heads_that_keep_more_than_their_share(accounting: str) -> None:
    method: Method = method_named("adakv_snapkv", window=8)
    for heads in (HeadBudgets(), Uneven()):
        method.heads = heads  # type: ignore[attr-defined]
        driven = drive(stream(150, 97, steps=40), method, 48, accounting=accounting)
        assert driven.audit["over_rule"] == isinstance(heads, Uneven)
    assert "on average" in str(driven.engine.audit.broken())


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_a_share_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha={alpha}: "):
        HeadBudgets(alpha)
