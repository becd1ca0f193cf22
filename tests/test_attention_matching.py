"""Attention Matching: keys that stand for all, their weights and values, and whose memory these are written to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from driver import RAGGED, SMALL, TEMPLATE, Stream, drive, each_accounting, repeated, run_loop, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from waves import wave_stream

from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.config import bind_methods
from kvbench.engine.replay import Template
from kvbench.memory.kinds import KV
from kvbench.memory.store import LayerStore
from kvbench.memory.view import StoreView
from kvbench.method import Method

bind_methods()

from methods.attention_matching import AttentionMatching, matched  # noqa: E402

quick = settings(deadline=None, derandomize=True)

# -- golden numbers, of the official code ------------------------------------------------------------------------------

OFFICIAL: list[dict[str, Any]] = [
    {
        "ids": [11, 36, 28, 19, 8, 3, 7, 26, 4, 15, 6, 21, 1, 29],
        "weights": [0.5931, 0.611, 0.6006, -0.1094, 0.8912, 0.8363],
        "values": [-1.0447, -0.8238, -0.5376, -0.5509],
        "error": 0.517,
        "evicting": 0.973,
    },
    {
        "ids": [36, 11, 38, 2, 9, 5, 39, 27, 34, 12, 8, 24, 25, 16],
        "weights": [0.2695, 0.3357, 0.2182],
        "values": [],
        "error": 0.519,
        "evicting": 0.796,
    },
]


@pytest.mark.parametrize("group", [0, 1])
def test_the_official_code_fits_the_same(group: int) -> None:
    fixed = wave_stream(steps=0)
    queries = fixed.queries[0, 0].unflatten(0, (2, 2))[group].flatten(0, 1)
    keys, values = fixed.keys[0, 0, group], fixed.values[0, 0, group]
    found, expected = matched(queries, keys, values, 14, fixed.scaling), OFFICIAL[group]
    assert found.ids.tolist() == expected["ids"]
    assert found.weights[: len(expected["weights"])].tolist() == pytest.approx(expected["weights"], abs=1e-4)
    assert found.values[0, : len(expected["values"])].tolist() == pytest.approx(expected["values"], abs=1e-4)
    logits = (queries @ keys.T * fixed.scaling).double()
    whole, few = logits.softmax(dim=1) @ values.double(), logits[:, found.ids]
    for name, output in (
        ("error", (few + found.weights).softmax(dim=1) @ found.values),
        ("evicting", few.softmax(dim=1) @ values[found.ids].double()),
    ):
        assert float((output - whole).norm() / whole.norm()) == pytest.approx(expected[name], abs=1e-3)


# -- an independent reading --------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def fitted(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, count: int, scaling: float) -> tuple[Any, ...]:
    """Places, logarithms of weights and values of the keys that stand for all."""
    logits = queries @ keys.T * scaling
    attention = softmax(logits)
    worth = [math.sqrt(float(np.mean(attention[:, key] ** 2))) for key in range(len(keys))]
    places = sorted(range(len(keys)), key=lambda key: -worth[key])[:count]
    sums = np.exp(logits - logits.max(axis=1, keepdims=True))
    target, sums = sums.sum(axis=1), sums[:, places]
    weights = np.clip(np.linalg.lstsq(sums, target, rcond=1e-8)[0], math.exp(-3), math.exp(3))
    direction = np.ones(count)
    for _ in range(3):
        direction = sums.T @ (sums @ direction)
        direction /= np.linalg.norm(direction)
    for _ in range(2):
        slope = sums.T @ (sums @ weights - target)
        weights = np.clip(weights - slope / np.linalg.norm(sums @ direction) ** 2, math.exp(-3), math.exp(3))
    shares = softmax(logits[:, places] + np.log(weights))
    return places, np.log(weights), np.linalg.lstsq(shares, attention @ values, rcond=1e-8)[0]


def kept(fixed: Stream, layer: int, before: int, budget: int, recent: int, asked: np.ndarray) -> list[dict[int, Any]]:
    """Of each KV head of a row: log weight and value of what stays of the prompt before the recent tokens."""
    length, found = fixed.lengths[0], []
    for head in range(fixed.keys.shape[2]):
        keys, values = (part[layer, 0, head].double().numpy() for part in (fixed.keys, fixed.values))
        rest = [*range(before, length - recent)]
        own = {token: (0.0, values[token]) for token in range(min(before, length - recent))}
        if length <= budget:
            own |= {token: (0.0, values[token]) for token in rest}
        else:
            count = budget - before - recent
            places, weights, other = fitted(asked[head], keys[rest], values[rest], count, fixed.scaling)
            own |= {rest[place]: (weights[at], other[at]) for at, place in enumerate(places)}
        found.append(own)
    return found


@pytest.mark.slow
@settings(quick, max_examples=25)
@given(st.data())
def test_outputs_are_those_of_the_fitted_keys(data: st.DataObject) -> None:
    """Any shape, groups, ragged rows, budgets, both accountings, both kinds of queries; until memory is freed."""
    accounting = data.draw(st.sampled_from(["paper", "unified"]), "accounting")
    group, kv_heads = data.draw(st.sampled_from([1, 2, 3, 7]), "group"), data.draw(st.integers(1, 2), "KV heads")
    before, kind = data.draw(st.integers(0, 3), "before"), data.draw(st.sampled_from(["context", "replay"]), "queries")
    lengths = data.draw(st.lists(st.integers(before + 1, 45), min_size=1, max_size=2), "lengths")
    budget = data.draw(st.integers(8, 24), "budget")
    method = AttentionMatching(queries=kind)
    sizes = {"query_heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 8, "layers": 2}
    fixed = stream(*lengths, steps=34, seed=data.draw(st.integers(0, 99), "seed"), **sizes)
    fixed.tokens[:, :before] = torch.arange(before)
    template = Template(TEMPLATE.encode, tuple(range(before)), (3, 4))
    driven = drive(fixed, method, budget, accounting=accounting, template=template)
    for (row, length), layer in itertools.product(enumerate(lengths), (0, 1)):
        one, recent = fixed.row(row), min(budget // 4, length) if accounting == "unified" else 0
        asked = one.queries[layer, 0, :, before:length]
        if kind == "replay":
            asked = repeated(one, driven.engine)[layer][0].queries
        own = kept(one, layer, before, budget, recent, asked.double().reshape(kv_heads, -1, 8).numpy())
        for last, head in itertools.product((length + 1, length + 34), range(group * kv_heads)):
            pushed = last - budget + min(budget, length) - recent if accounting == "unified" else length
            newest, chosen = range(max(length - recent, pushed), last), own[head // group]
            keys, values = (part[layer, 0, head // group].double().numpy() for part in (one.keys, one.values))
            query = one.queries[layer, 0, head, last - 1].double().numpy()
            weights = np.array([weight for weight, _ in chosen.values()] + [0.0] * len(newest))
            share = softmax(keys[[*chosen, *newest]] @ query * fixed.scaling + weights)
            expected = share @ np.array([value for _, value in chosen.values()] + [*values[newest]])
            found = driven.outputs[last - length - 1, layer, row, head]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    assert not driven.audit["over_rule"]


@pytest.mark.parametrize("seed", range(4))
def test_a_fit_of_nearly_dependent_columns_is_as_near_as_any(seed: int) -> None:
    """Queries that look at a few keys each, and nearly as many keys as queries."""
    rng = torch.Generator().manual_seed(seed)
    queries, keys, values = (scale * torch.randn(90, 20, generator=rng) for scale in (10, 1, 1))
    fit, scaling = matched(queries, keys, values, 80, 20**-0.5), 20**-0.5
    logits = (queries @ keys.T * scaling).double()
    whole, few = logits.softmax(dim=1) @ values.double(), (logits[:, fit.ids] + fit.weights).softmax(dim=1)
    best = torch.from_numpy(np.linalg.lstsq(few.numpy(), whole.numpy(), rcond=None)[0])
    assert (few @ fit.values - whole).norm() <= 1.01 * (few @ best - whole).norm() + 1e-6 * whole.norm()


def test_a_fit_to_equal_keys_is_small() -> None:
    rng = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(80, 16, generator=rng) for _ in range(3))
    fit = matched(queries, torch.cat([keys[:40]] * 2), values, 60, 0.25)
    assert fit.values.abs().max() < 100


# -- what is written, and where ----------------------------------------------------------------------------------------


@each_accounting
def test_queries_beyond_the_most_are_drawn_alike_in_any_batch(accounting: str) -> None:
    fixed = stream(60, 41, steps=2)
    batch = drive(fixed, AttentionMatching(most=30), 20, accounting=accounting)
    for row in range(2):
        alone = drive(fixed.row(row), AttentionMatching(most=30), 20, accounting=accounting)
        torch.testing.assert_close(batch.outputs[:, :, row], alone.outputs[:, :, 0], rtol=0, atol=1e-5)
    all_of_them = drive(fixed, AttentionMatching(), 20, accounting=accounting)
    assert (all_of_them.outputs - batch.outputs).abs().max() > 1e-3


def test_other_arms_of_a_shared_prefill_see_the_values_as_they_were(tiny: Loaded) -> None:
    method = method_named("attention_matching")
    shared = prefill_once(tiny.model, RAGGED, [method.needs], max_new_tokens=7, tokenizer=tiny.tokenizer)
    before, engine = run_loop(tiny, RAGGED, Method(), None, prefilled=shared)
    stored = [store.device.value.clone() for store in engine.stores.values()]
    _, engine = run_loop(tiny, RAGGED, method, SMALL, prefilled=shared)
    written = [store.device.resident()[1] for store in engine.stores.values()]
    after, engine = run_loop(tiny, RAGGED, Method(), None, prefilled=shared)
    assert after.tokens == before.tokens
    assert all(map(torch.equal, stored, [store.device.value for store in engine.stores.values()]))
    assert not any(bool(torch.isin(values, stored[layer]).all()) for layer, values in enumerate(written))


def test_weights_and_ids_are_the_index() -> None:
    """A logarithm of four bytes, and an id of eight, of each of C entries of a head."""
    assert drive(stream(90, steps=1), AttentionMatching(), 20).audit["index_bytes"] == 2 * 2 * 20 * (4 + 8)


def store(**options: Any) -> LayerStore:
    """One of two KV heads, with ten tokens of width 4."""
    made = LayerStore(1, 2, 4, 32, torch.float32, torch.device("cpu"), **options)
    made.write_prompt(torch.zeros(1, 2, 10, 4), torch.zeros(1, 2, 10, 4), 0, [0])
    made.seal_prompt([10])
    return made


def test_values_are_written_to_kept_tokens_alone() -> None:
    ids, values = torch.tensor([[[7, 2], [3, -1]]]), torch.arange(16.0).view(1, 2, 2, 4)
    fresh, kept = store(), store()
    view = StoreView({0: fresh, 1: kept}, lambda size: None)
    with pytest.raises(ValueError, match="keep has left"):
        view.write(0, ids, values)
    kept.keep(torch.tensor([[[1, 2, 7], [3, -1, -1]]]))
    view.write(1, ids, values)
    found = kept.gather(torch.tensor([[[1, 2, 7], [3, 3, 3]]]))[1]
    assert torch.equal(found[0, 0], torch.stack([torch.zeros(4), values[0, 0, 1], values[0, 0, 0]]))
    assert torch.equal(found[0, 1], values[0, 1, :1].expand(3, -1))
    with pytest.raises(LookupError):
        view.write(1, torch.tensor([[[5], [3]]]), values[:, :, :1])


@pytest.mark.parametrize("kind", ["int8", "kivi4"])
def test_coded_values_are_not_written(kind: str) -> None:
    coded = LayerStore(1, 1, 64, 256, torch.float32, torch.device("cpu"), kv=KV(kind, "native"))
    coded.write_prompt(torch.ones(1, 1, 200, 64), torch.ones(1, 1, 200, 64), 0, [0])
    coded.seal_prompt([200])
    coded.keep(torch.arange(190)[None, None])
    coded.encode()
    with pytest.raises(ValueError, match="coded"):
        StoreView({0: coded}, lambda size: None).write(0, torch.tensor([[[1]]]), torch.ones(1, 1, 1, 64))
