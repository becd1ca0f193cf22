"""PyramidKV: how the budget is shared out over layers, and that each layer keeps SnapKV's choice of its own size."""

from __future__ import annotations

import pytest
from driver import Driven, drive, each_accounting, stream
from hypothesis import given
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods

bind_methods()

from methods.pyramidkv import PyramidKV, pyramid  # noqa: E402

sizes = st.tuples(st.integers(0, 3000), st.integers(1, 80), st.integers(1, 60), st.integers(0, 20_000))


@given(sizes)
def test_layers_sum_to_the_budget_and_fall(drawn: tuple[int, int, int, int]) -> None:
    mean, layers, beta, more = drawn
    most = mean + more
    counts = pyramid(mean, layers, beta, most)
    assert len(counts) == layers
    assert sum(counts) == layers * mean
    assert counts == sorted(counts, reverse=True)
    assert all(0 <= count <= most for count in counts)


def published(mean: int, layers: int, beta: int, most: int) -> list[int]:
    """The official code's rule, whose step is rounded down."""
    low = mean // beta
    high = 2 * mean - low
    if high >= most:
        high, low = most, 2 * mean - most
    return [high - layer * ((high - low) // (layers - 1)) for layer in range(layers)]


@given(sizes.filter(lambda drawn: drawn[1] > 1))
def test_layers_are_the_published_ones_less_what_their_rounding_adds(drawn: tuple[int, int, int, int]) -> None:
    mean, layers, beta, more = drawn
    ours, theirs = pyramid(mean, layers, beta, mean + more), published(mean, layers, beta, mean + more)
    if (theirs[0] - (2 * mean - theirs[0])) % (layers - 1) == 0:
        assert ours == theirs
    for layer, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other - layer - 1 < own <= other


def test_the_published_rounding_is_the_one_of_the_record() -> None:
    """Four layers whose budget is 100 get 101 on average in the official code; ours get 100."""
    window = 8
    assert sum(published(92, 4, 20, 10_000)) / 4 + window == 101
    assert sum(pyramid(92, 4, 20, 10_000)) / 4 + window == 100


def kept_by_layer(driven: Driven, prompt: int) -> list[list[set[int]]]:
    """Prompt tokens that each layer's KV heads attend at the first step."""
    return [[{token for token in ids if token < prompt} for ids in at.sets(0)] for at in driven.seen if at.step == 1]


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("budget", [16, 40, 64])
def test_each_layer_keeps_snapkv_s_choice_of_its_size(budget: int, granularity: str) -> None:
    """The window is the same, and c_l tokens are the best votes: what SnapKV keeps with a budget of c_l + W."""
    fixed = stream(300, steps=1, layers=4)
    counts = pyramid(budget - 8, 4, 20, 300 - 8)
    assert len(set(counts)) == 4
    kept = kept_by_layer(drive(fixed, method_named("pyramidkv", granularity=granularity), budget), 300)
    for layer, count in enumerate(counts):
        alone = drive(fixed, method_named("snapkv", window=8, granularity=granularity), count + 8)
        assert kept[layer] == kept_by_layer(alone, 300)[layer]
        assert all(len(ids) == count + 8 for ids in kept[layer])


def test_a_small_budget_is_not_silently_uniform() -> None:
    """kvpress's is, where the last layer would get less than the window."""
    sizes = [len(layer[0]) for layer in kept_by_layer(drive(stream(400, layers=6), method_named("pyramidkv"), 48), 400)]
    assert len(set(sizes)) == 6 and sum(sizes) == 6 * 48


@pytest.mark.parametrize(("length", "uniform"), [(111, True), (112, False)])
def test_short_prompts_share_alike(length: int, uniform: bool) -> None:
    """Below 2 (C - W) tokens, as published; from there on the first layer may keep everything."""
    kept = kept_by_layer(drive(stream(length, layers=3), method_named("pyramidkv"), 64), length)
    counts = [len(layer[0]) for layer in kept]
    assert sum(counts) == 3 * 64
    assert counts == ([64] * 3 if uniform else [104 + 8, 56 + 8, 8 + 8])


def test_dense_layers_take_no_part() -> None:
    """The mean of the layers that compress is the budget."""
    driven = drive(stream(300, layers=5), method_named("pyramidkv"), 48, dense_layers=(0, 1))
    counts = [len(layer[0]) for layer in kept_by_layer(driven, 300)]
    assert counts == [8 + count for count in pyramid(40, 3, 20, 292)]


class Swollen(PyramidKV):
    """Gives a layer one token more than the layers' mean leaves it, and says so."""

    def layer_budgets(self, length: int) -> list[int]:
        first, *others = super().layer_budgets(length)
        return [first + 1, *others]


@each_accounting
@pytest.mark.parametrize("kind", [PyramidKV, Swollen])
def test_the_audit_holds_the_layers_to_their_mean(kind: type[PyramidKV], accounting: str) -> None:
    audit = drive(stream(300, layers=3), kind(), 48, accounting=accounting).engine.audit
    assert (audit.broken() is None) == (kind is PyramidKV)
    assert kind is PyramidKV or audit.broken().startswith("step 1: the KV heads attended")


@pytest.mark.parametrize("budget", [16, 50, 120])
def test_under_unified_accounting_the_layers_attend_the_budget_on_average(budget: int) -> None:
    """Through three evictions; the recent tokens roll in each layer."""
    fixed = stream(200, 14, steps=100, layers=4)
    recent = min(32, budget // 4)
    counts = pyramid(budget - recent, 4, 20, 200 - recent) if 2 * (budget - recent) <= 200 else [budget - recent] * 4
    driven = drive(fixed, method_named("pyramidkv"), budget, accounting="unified")
    for at in driven.seen:
        length = at.lengths[0]
        assert all(len(ids) == counts[at.layer] + recent for ids in at.sets(0))
        assert all(set(range(length - recent, length)) <= ids for ids in at.sets(0))
        assert all(len(ids) == min(at.lengths[1], budget) for ids in at.sets(1)), "a short row shares alike"
    assert not driven.audit["over_rule"]
    assert driven.audit["attended_mean"] <= budget
