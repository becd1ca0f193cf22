"""CAKE: what layers prefer, how the budget cascades over them, and what the steps keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from driver import Stream, drive, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.config import bind_methods
from kvbench.method import Prompt

bind_methods()

from methods.cake import CAKE, adjust_budgets, layer_budgets  # noqa: E402

quick = settings(deadline=None, derandomize=True)

# -- how the budget is shared out --------------------------------------------------------------------------------------


def test_budgets_are_adjusted_as_the_published_code_does() -> None:
    assert adjust_budgets([10.2, 20.7, 400], 300, 150) == [91, 102, 107]
    assert adjust_budgets([24.0, 48.0, 72.0], 144, 284) == [24, 48, 72]
    assert adjust_budgets([3.9, 3.9, 392.2], 400, 150) == [125, 125, 150]
    assert adjust_budgets([400.0], 400, 150) == [150], "nobody takes what is too much"


@given(
    preferences=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40),
    mean=st.integers(1, 500),
    more=st.integers(0, 500),
)
def test_layers_share_the_budget_out_and_none_gets_more_than_there_is(
    preferences: list[float], mean: int, more: int
) -> None:
    total = mean * len(preferences)
    budgets = layer_budgets(preferences, total, mean + more)
    assert all(0 <= budget <= mean + more for budget in budgets)
    assert sum(budgets) <= total
    shares = [total * preference / (sum(preferences) or 1) for preference in preferences]
    if sum(preferences) and max(shares) <= mean + more:
        assert sum(budgets) == total
        assert all(abs(budget - share) <= 2 for budget, share in zip(budgets, shares, strict=True))


class Preferring(CAKE):
    """Its layers prefer what they are told."""

    def __init__(self, *told: float) -> None:
        super().__init__(window=16)
        self.told = told

    def measure(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        importance, preference = super().measure(prompt)
        return importance, torch.full_like(preference, self.told[len(self.preferences)])

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        self.sizes: list[list[int]] = []

    def prefill(self, layer: int, prompt: Prompt) -> None:
        super().prefill(layer, prompt)
        self.sizes.append([int((self.view.resident(held)[0, 0] >= 0).sum()) for held in self.cached_ids])


def test_earlier_layers_shrink_again_as_later_ones_come() -> None:
    method = Preferring(1, 2, 3)
    driven = drive(stream(300, layers=3, steps=2), method, 64)
    assert method.sizes == [[160], [64, 112], [40, 64, 88]]
    assert [len(at.sets(0)[0]) for at in driven.seen] == [41, 65, 89] * 2, "and the current token"
    assert not driven.audit["over_rule"]
    assert driven.audit["attended_mean"] == 65


# -- an independent reading of the paper and its code, in numpy --------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def pooled(values: np.ndarray, kernel: int) -> np.ndarray:
    """Sums over neighbours along the last axis, nothing beyond its ends."""
    reach, ends = kernel // 2, values.shape[-1]
    return np.stack([values[..., max(0, at - reach) : at + reach + 1].sum(axis=-1) for at in range(ends)], axis=-1)


class Reading:
    """One row's generation, a list of tokens for each layer and KV head in the order of the cache."""

    def __init__(self, fixed: Stream, budget: int, counted: bool, options: dict[str, Any]) -> None:
        self.fixed, self.length, self.options = fixed, fixed.lengths[0], options
        self.queries, self.keys = (part[:, 0].double().numpy() for part in (fixed.queries, fixed.keys))
        self.layers, self.group = len(self.keys), self.queries.shape[1] // self.keys.shape[1]
        self.window = min(32, budget // 4) if counted else options["window"]
        mean = budget - self.window - counted
        self.caches = [[list(range(self.length)) for _ in heads] for heads in self.keys]
        self.sizes = [mean] * self.layers
        if self.length > (budget - 1 if counted else budget + self.window):
            self.compress(mean * self.layers)

    def compress(self, total: int) -> None:
        older, preferences, scores = self.length - self.window, [], []
        for layer in range(self.layers):
            dispersion = shift = 0.0
            layer_scores = []
            for head in range(len(self.keys[layer])):
                importance = []
                for query_head in range(head * self.group, (head + 1) * self.group):
                    asked = min(self.options["window"], self.length)
                    attention = np.array(
                        [
                            np.pad(
                                softmax(self.logits(layer, query_head, at, range(at + 1))), (0, self.length - at - 1)
                            )
                            for at in range(self.length - asked, self.length)
                        ]
                    )[:, :older]
                    dispersion -= (attention * np.log(attention + 1e-10)).sum()
                    variance = attention.var(axis=0, ddof=1)
                    shift += variance.sum()
                    importance.append(attention.mean(axis=0) + self.options["gamma"] * variance)
                layer_scores.append(pooled(np.mean(importance, axis=0), self.options["kernel"]))
            preferences.append(dispersion ** (1 / self.options["tau1"]) * shift ** (1 / self.options["tau2"]))
            scores.append(layer_scores)
            shares = [one / sum(preferences) * total for one in preferences]
            self.sizes[: layer + 1] = self.adjusted(shares, total)
            for seen in range(layer + 1):  # the cascade, again and again
                for head, cache in enumerate(self.caches[seen]):
                    rest = [token for token in cache if token < older]
                    best = sorted(rest, key=lambda token, own=scores[seen][head]: -own[token])[: self.sizes[seen]]
                    self.caches[seen][head] = best + list(range(older, self.length))

    def adjusted(self, shares: Sequence[float], total: int) -> list[int]:
        """The published code's steps, one token at a time."""
        most, layers = self.length - self.window, range(len(shares))
        sizes = [math.floor(share) for share in shares]
        excess, sizes = sum(max(size - most, 0) for size in sizes), [min(size, most) for size in sizes]
        for amount in (excess, None):
            amount = total - sum(sizes) if amount is None else amount
            open_layers = [layer for layer in layers if sizes[layer] < most]
            for turn in range(amount if open_layers else 0):
                sizes[open_layers[turn % len(open_layers)]] += 1
        return [min(size, most) for size in sizes]

    def logits(self, layer: int, query_head: int, at: int, tokens: Sequence[int]) -> np.ndarray:
        keys = self.keys[layer, query_head // self.group, list(tokens)]
        scaled: np.ndarray = keys @ self.queries[layer, query_head, at] * self.fixed.scaling
        return scaled

    def step(self, token: int) -> list[list[list[int]]]:
        """What each layer and KV head attends; then all but the best and the most recent goes."""
        attended = []
        for layer, heads in enumerate(self.caches):
            for head, cache in enumerate(heads):
                cache.append(token)
                group = range(head * self.group, (head + 1) * self.group)
                attention = np.mean([softmax(self.logits(layer, own, token, cache)) for own in group], axis=0)
                older = len(cache) - self.window
                if older > self.sizes[layer]:
                    smooth = pooled(attention[:older], self.options["kernel"])
                    best = sorted(range(older), key=lambda at, smooth=smooth: -smooth[at])[: self.sizes[layer]]
                    heads[head] = [cache[at] for at in best] + cache[older:]
                attended.append(cache)
        return attended


@settings(quick, max_examples=25)
@given(st.data())
def test_layers_hold_and_attend_what_the_paper_says(data: st.DataObject) -> None:
    """Any shape, groups, ragged rows, budgets and both accountings; through an eviction from memory."""
    accounting = data.draw(st.sampled_from(["paper", "unified"]), "accounting")
    group, kv_heads = data.draw(st.integers(1, 3), "group"), data.draw(st.integers(1, 2), "KV heads")
    layers, steps = data.draw(st.integers(1, 4), "layers"), data.draw(st.sampled_from([3, 34]), "steps")
    lengths = data.draw(st.lists(st.integers(2, 50), min_size=1, max_size=2), "lengths")
    window, budget = data.draw(st.integers(2, 8), "window"), data.draw(st.integers(9, 40), "budget")
    options = {"window": window, "kernel": data.draw(st.sampled_from([1, 5]), "kernel")}
    options |= {"tau1": data.draw(st.sampled_from([0.5, 1.6])), "tau2": data.draw(st.sampled_from([0.4, 2.0]))}
    options |= {"gamma": data.draw(st.sampled_from([0.0, 200.0]), "gamma")}
    sizes = {"query_heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 8, "layers": layers}
    fixed = stream(*lengths, steps=steps, seed=data.draw(st.integers(0, 99), "seed"), **sizes)
    driven = drive(fixed, CAKE(**options), budget, accounting=accounting)
    for row, length in enumerate(lengths):
        reading = Reading(fixed.row(row), budget, accounting == "unified", options)
        for step in range(steps):
            expected = reading.step(length + step)
            found = [ids for at in driven.seen if at.step == step + 1 for ids in at.sets(row)]
            assert found == [set(cache) for cache in expected], (row, step)
    assert not driven.audit["over_rule"]


# -- the budget, memory, and bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("accounting", "attended"), [("paper", 49), ("unified", 48)])
def test_layers_attend_the_budget_on_average_and_the_audit_finds_one_that_takes_more(
    accounting: str, attended: int
) -> None:
    class Swollen(CAKE):
        def cascade(self, row: int, length: int) -> list[int]:
            shrunk = super().cascade(row, length)
            self.scored[0][row] += 1
            return shrunk

    fixed = stream(200, layers=4, steps=40)
    driven = drive(fixed, CAKE(), 48, accounting=accounting)
    assert driven.audit["attended_mean"] == attended and not driven.audit["over_rule"]
    entry = 2 * fixed.keys.shape[4] * 4
    held = driven.audit["device_kv_bytes"] / entry / 2 / 4
    assert 48 <= held <= 48 + 33, "between two evictions from memory"
    assert drive(fixed, Swollen(), 48, accounting=accounting).audit["over_rule"]


def test_a_prompt_a_window_above_the_budget_is_left_to_the_first_step() -> None:
    """As the published code does; a token longer, and the layers compress it."""
    for length, first in ((64, 65), (65, 49)):
        driven = drive(stream(length, layers=2, steps=3), CAKE(window=16), 48)
        counts = [len(at.sets(0)[0]) for at in driven.seen]
        assert [sum(counts[at : at + 2]) / 2 for at in (0, 2, 4)] == [first, 49, 49]
        assert not driven.audit["over_rule"]


def test_attention_that_tells_layers_nothing_apart_shares_alike() -> None:
    """Keys that are all alike: no query differs from another, and no layer from the next."""
    fixed = stream(200, layers=3, steps=1)
    fixed.keys[:] = 1
    assert [len(at.sets(0)[0]) for at in drive(fixed, CAKE(), 48).seen] == [49, 49, 49]
