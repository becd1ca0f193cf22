"""Twilight: keys in four bits, and the fewest tokens that hold a share of the attention."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from driver import drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.backends.hf.model import method_named
from kvbench.config import bind_methods
from kvbench.method import Shape

bind_methods()

from methods.twilight.estimate import FourBitKeys, quantised, restored  # noqa: E402


def wave(heads: int, phase: float) -> torch.Tensor:
    """[1, heads, 40, 8], 2 sin(phase + 1.7 h + .9 t + 2.3 d + .37 t d + .11 h t)."""
    h, t, d = torch.meshgrid(*(torch.arange(size).double() for size in (heads, 40, 8)), indexing="ij")
    return (2 * torch.sin(phase + 1.7 * h + 0.9 * t + 2.3 * d + 0.37 * t * d + 0.11 * h * t))[None].float()


def shape_of(scaling: float, softcap: float | None = None) -> Shape:
    return Shape(1, 1, 1, 8, (1,), torch.float32, torch.device("cpu"), scaling, (0,), softcap=softcap)


def test_four_bits_are_those_of_the_published_code() -> None:
    """Numbers that its quantiser gave for the same keys."""
    keys = restored(*quantised(wave(2, 1.0)))
    expected = torch.tensor([1.733482, -0.381725, -1.174927, 1.997882])
    torch.testing.assert_close(keys[0, 0, 0, :4], expected, rtol=0, atol=1e-6)


def test_what_is_kept_of_everything_is_what_an_exact_sort_keeps() -> None:
    query = wave(4, 0.5)[:, :, 39:] * (torch.arange(4)[:, None, None] + 1) / 2
    everything = torch.arange(40).expand(1, 1, 40)
    kept = FourBitKeys(wave(2, 1.0), 0).top_p(query, everything, shape_of(8**-0.5), [0.85])[0].tolist()
    sets = [{token for token in head if token >= 0} for head in kept]
    assert len(sets[0]) == 20
    assert sets[1:] == [{4, 17, 23, 33, 39}, {16, 21, 34, 39}, {16, 34}]


def coded_as(key: list[float]) -> list[float]:
    """A key as four bits tell it."""
    low, high = min(key), max(key)
    step = max((high - low) / 15, 1e-9)
    return [low + step * min(max(round((number - low) / step), 0), 15) for number in key]


def reference(
    query: list[float],
    keys: list[list[float]],
    tokens: list[int],
    scaling: float,
    p: float,
    softcap: float | None = None,
) -> list[int]:
    """One query head's tokens, from the paper: estimated weights from the largest on, until they hold p of all."""
    weights = {}
    for token in tokens:
        logit = scaling * sum(q * k for q, k in zip(query, coded_as(keys[token]), strict=True))
        weights[token] = math.exp(logit if softcap is None else softcap * math.tanh(logit / softcap))
    total, held, kept = sum(weights.values()), 0.0, []
    for token in sorted(tokens, key=lambda token: -weights[token]):
        if held >= p * total:
            break
        held += weights[token]
        kept.append(token)
    return kept


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    lists=st.sampled_from(["one", "kv_head", "query_head"]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    p=st.sampled_from([0.1, 0.5, 0.85, 0.999, 1.0]),
    softcap=st.sampled_from([None, 1.2]),
)
def test_both_ways_keep_what_the_paper_keeps(
    seed: int, kv_heads: int, group: int, lists: str, lengths: list[int], p: float, softcap: float | None
) -> None:
    rng = torch.Generator().manual_seed(seed)
    batch, head_dim, longest = len(lengths), 8, max(lengths)
    keys = torch.randn(batch, kv_heads, longest + 3, head_dim, generator=rng)
    query = torch.randn(batch, kv_heads * group, 1, head_dim, generator=rng)
    heads = {"one": 1, "kv_head": kv_heads, "query_head": kv_heads * group}[lists]
    index = torch.full((batch, heads, longest), -1)
    for row, length in enumerate(lengths):
        for head in range(heads):
            chosen = torch.randperm(length, generator=rng)[: 1 + seed % length]
            index[row, head, : len(chosen)] = chosen
    coded = FourBitKeys(keys[:, :, :longest], None)
    for token in range(longest, longest + 3):
        coded.write([token] * batch, keys[:, :, token : token + 1])
    shape = shape_of(0.7, softcap)
    found = [way(query, index, shape, [p] * batch) for way in (coded.top_p_compiled, coded.top_p_in_torch)]
    for row in range(batch):
        for head in range(kv_heads * group):
            own = index[row, head * heads // (kv_heads * group)]
            expected = reference(
                query[row, head, 0].tolist(), keys[row, head // group].tolist(), own[own >= 0].tolist(), 0.7, p, softcap
            )
            for kept in found:
                ids = kept[row, head].tolist()
                assert ids[: len(expected)] == expected and set(ids[len(expected) :]) <= {-1}


@pytest.mark.parametrize("selector", ["quest", "topk"])
@pytest.mark.parametrize("accounting", ["paper", "unified"])
def test_less_is_attended_than_the_selector_proposes(selector: str, accounting: str) -> None:
    fixed = stream(150, 90, steps=4)
    alone = drive(fixed, method_named(selector), 64, accounting=accounting)
    pruned = {}
    for p in (0.3, 0.9, 1.0):
        driven = drive(fixed, method_named(f"twilight_{selector}", p=p), 64, accounting=accounting)
        assert not driven.audit["over_rule"]
        for at, whole in zip(driven.seen, alone.seen, strict=True):
            for row in range(2):
                per = len(at.sets(row)) // len(whole.sets(row))
                assert all(own <= whole.sets(row)[head // per] for head, own in enumerate(at.sets(row)))
        pruned[p] = driven.audit["attended_mean"]
    assert pruned[0.3] < pruned[0.9] < pruned[1.0] == alone.audit["attended_mean"]


def proposed(queries: torch.Tensor, keys: torch.Tensor, pages: int) -> set[int]:
    """Tokens of the pages of 16 keys with the largest bounds, by a plain reading of Quest's equation 2."""
    bounds = {}
    for first in range(0, len(keys), 16):
        page = keys[first : first + 16].tolist()
        sides = zip(*page, strict=True)
        bounds[first] = sum(max(q * min(side), q * max(side)) for q, side in zip(queries.tolist(), sides, strict=True))
    best = sorted(bounds, key=lambda first: -bounds[first])[:pages]
    return {token for first in best for token in range(first, min(first + 16, len(keys)))}


@pytest.mark.parametrize("budget", [48, 49, 63, 64, 100, 0.4])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 3), (2, 2)])
def test_what_no_page_holds_of_a_budget_is_a_page_too(budget: int | float, kv_heads: int, group: int) -> None:
    """The published code takes C / 16 pages, rounded up, and Quest's own rounds down; unified, C is the most."""
    fixed = stream(143, 119, steps=3, layers=1, kv_heads=kv_heads, query_heads=kv_heads * group)
    driven = drive(fixed, method_named("twilight_quest", p=1), budget)
    for at in driven.seen:
        for row, length in enumerate(at.lengths):
            capacity = budget if isinstance(budget, int) else math.ceil(round(budget * fixed.lengths[row], 9))
            pages = (capacity + 15) // 16
            for head, own in enumerate(at.sets(row)):
                keys = fixed.keys[0, row, head // group, :length]
                assert own == proposed(fixed.queries[0, row, head, length - 1], keys, pages)
            assert driven.engine.method.rule(0, fixed.lengths[row], at.step) == group * pages * 16
    assert not driven.audit["over_rule"]
    whole = drive(fixed, method_named("twilight_quest", p=1), budget, accounting="unified")
    assert not whole.audit["over_rule"]


def test_memory_that_grows_changes_nothing() -> None:
    keys = torch.randn(2, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    coded = FourBitKeys(keys[:, :, :10], 0)
    for token in range(10, 300):
        coded.write([token] * 2, keys[:, :, token : token + 1])
    codes, steps = quantised(keys)
    assert torch.equal(coded.codes[:, :, :300], codes) and torch.equal(coded.steps[:, :, :300], steps)


def test_calibrated_the_prompts_last_queries_keep_the_budget_on_average() -> None:
    """By a plain reading: the largest of a thousand p with which their best 4 C tokens are pruned to C or fewer."""
    length, budget = 120, 12
    fixed = stream(length, seed=3, steps=6)
    method = method_named("twilight_topk", calibrated=True)
    driven = drive(fixed, method, budget)
    asked = []  # of each layer, query head and query the weights of its best tokens
    for layer, head, back in itertools.product(range(2), range(4), range(8)):
        query = fixed.queries[layer, 0, head, length - 8 + back].tolist()
        keys = [coded_as(key) for key in fixed.keys[layer, 0, head // 2, : length - 7 + back].tolist()]
        weights = [math.exp(0.25 * sum(q * k for q, k in zip(query, key, strict=True))) for key in keys]
        asked.append(sorted(weights, reverse=True)[: 4 * budget])

    def kept(p: float) -> float:
        counts = []
        for weights in asked:
            held = list(itertools.accumulate(weights, initial=0.0))
            counts.append(sum(before < p * held[-1] for before in held[:-1]))
        return statistics.mean(counts)

    (p,) = method.shares
    assert method.shape.scaling == 0.25
    assert kept(p) <= budget < kept(p + 0.001)
    assert budget / 2 < driven.audit["attended_mean"] and driven.audit["attended_max"] > budget
    whole = drive(fixed, method, budget, accounting="unified")
    assert method.shares == [1.0] and whole.audit["attended_max"] <= budget
