"""SqueezeAttention: classes of layers, how they share the budget, and that they follow from the hidden states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CLOSE, Driven, Stream, drive, numbers, rotate, run_loop, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import random_model

from kvbench import KVCache
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.model import method_named
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.residuals import residuals_watched
from kvbench.cli.compose import composed
from kvbench.config import ConfigError, bind_methods
from kvbench.method import Method, Needs
from kvbench.models.card import ModelCard
from kvbench.runs.run import prepare

bind_methods()

from methods.squeeze import highest_class, shared_out  # noqa: E402

# -- classes and shares ------------------------------------------------------------------------------------------------


def spread(labels: Sequence[int], values: Sequence[float]) -> float:
    groups = [[value for value, label in zip(values, labels, strict=True) if label == one] for one in set(labels)]
    return sum((value - sum(group) / len(group)) ** 2 for group in groups for value in group)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_no_assignment_to_three_classes_is_better(drawn: list[int]) -> None:
    """Among all of them, not intervals alone; the highest class is the one with the largest mean."""
    values = [value / 50 for value in drawn]
    found = highest_class(values)
    if len({*values}) == 1:
        assert found == []
        return
    ways = itertools.product(range(3), repeat=len(values))
    labels = min(spread(one, values) for one in ways)
    lower = [value for index, value in enumerate(values) if index not in found]
    assert found and max(lower) < min(values[index] for index in found)
    own = [[2] * len(found) + list(one) for one in itertools.product(range(2), repeat=len(lower))]
    ordered = [values[index] for index in found] + lower
    assert min(spread(one, ordered) for one in own) == pytest.approx(labels, abs=1e-12)


@given(st.integers(14, 5000), st.integers(2, 80), st.integers(1, 79), st.sampled_from([0.08 / 0.21, 0.25 / 0.4, 1]))
def test_layers_share_the_budget_exactly(mean: int, layers: int, count: int, p: float) -> None:
    """Against the published formula, whose shares are rounded down."""
    squeezed = list(range(layers))[-min(count, layers - 1) :]
    counts = shared_out(mean, p, layers, squeezed)
    assert sum(counts) == layers * mean
    others = layers - len(squeezed)
    published = (layers * mean - len(squeezed) * p * mean) / others
    for layer, own in enumerate(counts):
        if layer in squeezed:
            assert own == int(p * mean + 1e-9)
        else:
            assert math.floor(published) <= own < published + len(squeezed) / others + 1


def test_the_authors_example() -> None:
    """21 % of a prompt of 1,000 tokens, 8 % in 16 of 32 layers: 34 % in the others."""
    assert shared_out(210, 0.08 / 0.21, 32, range(16, 32)) == [340] * 16 + [80] * 16


# -- what is attended --------------------------------------------------------------------------------------------------


def slow_similarity(fixed: Stream, row: int) -> list[float]:
    """As the driver makes hidden states: the keys of a layer, and its values over 1 + layer added."""
    found = []
    for layer in range(len(fixed.keys)):
        cosines = []
        for token in range(fixed.lengths[row]):
            before = fixed.keys[layer, row, :, token].flatten().tolist()
            added = (fixed.values[layer, row, :, token] / (1 + layer)).flatten().tolist()
            after = [one + two for one, two in zip(before, added, strict=True)]
            product = sum(one * two for one, two in zip(before, after, strict=True))
            cosines.append(product / math.hypot(*before) / math.hypot(*after))
        found.append(sum(cosines) / len(cosines))
    return found


def slow_shares(similarity: list[float], capacity: int, length: int, p: float) -> list[int]:
    """The best three classes of all assignments, and what Algorithm 1 gives to each layer."""
    layers = len(similarity)
    if length <= capacity or len({*similarity}) == 1:
        return [capacity] * layers
    ways = itertools.product(range(min(3, layers)), repeat=layers)
    labels = min(ways, key=lambda one: (-len({*one}), spread(one, similarity)))
    of = {label: [value for value, own in zip(similarity, labels, strict=True) if own == label] for label in labels}
    highest = max(of, key=lambda label: sum(of[label]) / len(of[label]))
    squeezed = [layer for layer in range(layers) if labels[layer] == highest]
    small = int(p * capacity + 1e-9)
    rest = layers * capacity - len(squeezed) * small
    shares, others = dict.fromkeys(squeezed, small), [layer for layer in range(layers) if layer not in squeezed]
    while others:  # an equal share of what is left, rounded up
        shares[others[0]] = -(-rest // len(others))
        rest -= shares[others.pop(0)]
    return [shares[layer] for layer in range(layers)]


def check(driven: Driven, fixed: Stream, budget: int, p: float, sinks: int) -> None:
    shares = [slow_shares(slow_similarity(fixed, row), budget, length, p) for row, length in enumerate(fixed.lengths)]
    assert all(sum(own) == budget * len(own) for own in shares)
    for at in driven.seen:
        for row, now in enumerate(at.lengths):
            share = shares[row][at.layer]
            recent = range(max(0, now - share + sinks), now)
            ids = {*range(now)} if now <= share else {*range(sinks), *recent}
            assert all(one == ids for one in at.sets(row))
    assert not driven.audit["over_rule"]


@settings(deadline=None, max_examples=15)
@given(
    budget=st.integers(20, 50),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    layers=st.integers(1, 4),
    p=st.sampled_from([0.25, 0.5, 1.0]),
    base=st.sampled_from(["streaming_llm", "window"]),
    chunk=st.sampled_from([None, 17]),
    accounting=st.sampled_from(["paper", "unified"]),
)
def test_every_layer_attends_what_a_plain_reading_says(
    budget: int, lengths: list[int], layers: int, p: float, base: str, chunk: int | None, accounting: str
) -> None:
    fixed = stream(*lengths, steps=3, layers=layers)
    method = method_named("squeeze", p=p, base=base)
    driven = drive(fixed, method, budget, accounting=accounting, chunk=chunk)
    check(driven, fixed, budget, p, 4 if base == "streaming_llm" else 0)


def test_through_evictions_the_mean_over_layers_is_the_budget() -> None:
    """And memory holds no more than that and what 32 steps added."""
    fixed = stream(150, steps=70, layers=5)
    driven = drive(fixed, method_named("squeeze"), 40)
    check(driven, fixed, 40, 0.38, 4)
    audit = driven.audit
    assert audit["attended_mean"] == 40 and audit["squeezed_layers"] >= 1
    token = 2 * 16 * 4
    assert 5 * 2 * 40 * token < audit["device_kv_bytes"] <= 5 * 2 * (40 + 32) * token
    assert audit["device_kv_allocated_bytes"] >= audit["device_kv_bytes"]


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_keys_keep_their_positions_or_have_those_of_each_layer_s_cache(positions: str) -> None:
    """By a plain reading: what a layer attends stands at 0, 1, ... there, as if it had never had RoPE before."""
    plain = stream(60, 25, steps=5, layers=4)
    places = torch.arange(plain.keys.shape[3]).expand(plain.queries.shape[:4])
    queries, keys = rotate(plain.queries, places), rotate(plain.keys, places[:, :, : plain.keys.shape[2]])
    fixed = replace(plain, queries=queries, keys=keys)
    outputs = drive(fixed, method_named("squeeze", positions=positions), 20).outputs
    for row, prompt in enumerate(fixed.lengths):
        shares = slow_shares(slow_similarity(fixed, row), 20, prompt, 0.38)
        assert len({*shares}) > 1
        for step, (layer, share) in itertools.product(range(fixed.steps), enumerate(shares)):
            now = prompt + step + 1
            kept = [*range(min(4, now)), *range(max(4, now - share + 4), now)]
            place = torch.arange(len(kept)) if positions == "cache" else torch.tensor(kept)
            for head in range(4):
                query = rotate(plain.queries[layer, row, head, kept[-1:]].double(), place[-1:])
                found = rotate(plain.keys[layer, row, head // 2, kept].double(), place)
                weights = (found @ query[0] * fixed.scaling).softmax(0)
                expected = weights @ plain.values[layer, row, head // 2, kept].double()
                torch.testing.assert_close(outputs[step, layer, row, head].double(), expected, rtol=0, atol=CLOSE)


def test_dense_layers_take_no_part() -> None:
    driven = drive(stream(150, layers=5), method_named("squeeze"), 40, dense_layers=(0, 1))
    assert {at.layer for at in driven.seen} == {2, 3, 4} and driven.audit["attended_mean"] == 40


# -- the hidden states -------------------------------------------------------------------------------------------------


class Noting(Method):
    """Remembers what it is told of the layers."""

    needs = Needs(layer_similarity=True)

    def observe_layers(self, similarity: torch.Tensor) -> None:
        self.similarity = similarity


def by_hand(model: Any, prompt: list[int], adds: str = "self_attn") -> torch.Tensor:
    """[layers] from transformers' own forward pass: what enters a layer, and what its attention adds."""
    added: list[torch.Tensor] = []
    parts = [getattr(layer, adds) for layer in model.model.layers]
    hooks = [part.register_forward_hook(lambda _, __, out: added.append(out[0])) for part in parts]
    try:
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    finally:
        for hook in hooks:
            hook.remove()
    pairs = zip(states[:-1], added, strict=True)
    return torch.stack([torch.cosine_similarity(one[0], (one + more)[0], dim=1).mean() for one, more in pairs])


PROMPTS = [numbers(90, seed=1), numbers(41, seed=2)]


def test_similarity_is_that_of_the_model_s_hidden_states(
    dummies: Callable[[str], Loaded], sdpa: Callable[[Loaded], Any]
) -> None:
    """In one forward pass, in chunks, in ragged batches of either padding, in a shared prefill."""
    loaded = dummies("dummy-qwen3")
    right = torch.stack([by_hand(sdpa(loaded), prompt) for prompt in PROMPTS], dim=1)
    assert right.std() > 0.01
    for chunk in (None, 32):
        method = Noting()
        run_loop(loaded, PROMPTS, method, None, steps=1, prefill_chunk=chunk, dense_layers=(1,))
        torch.testing.assert_close(method.similarity, right[[0, 2, 3]], rtol=0, atol=CLOSE)
    shared = prefill_once(loaded.model, PROMPTS, [Needs(), Noting.needs], max_new_tokens=2)
    method = Noting()
    run_loop(loaded, PROMPTS, method, None, steps=1, prefilled=shared, dense_layers=(0,))
    torch.testing.assert_close(method.similarity, right[1:], rtol=0, atol=CLOSE)
    method, cache_mask = Noting(), torch.ones(2, 90, dtype=torch.int64)
    cache_mask[1, :49] = 0
    ids = torch.tensor([PROMPTS[0], [258] * 49 + PROMPTS[1]])
    cache = KVCache(loaded.model, method, None, dense_layers=())
    options = {"attention_mask": cache_mask, "max_new_tokens": 3, "eos_token_id": None}
    for _ in range(2):  # and again after a reset
        loaded.model.generate(ids, past_key_values=cache, **options)
        torch.testing.assert_close(method.similarity, right, rtol=0, atol=CLOSE)
        method.similarity = right * 0
        cache.reset()
    loaded.model.generate(ids, past_key_values=cache, **options)
    assert not any(layer._forward_pre_hooks for layer in loaded.model.model.layers), "nothing watches the decode steps"


def test_layers_with_a_window_come_before_a_prompt_begins() -> None:
    model, method = random_model("gemma3_text"), Noting()
    right = by_hand(model, PROMPTS[0], adds="post_attention_layernorm")
    assert ModelCard.of_config(model.config).windows.keys() == {0, 3}
    cache = KVCache(model, method, None, dense_layers=())
    model.generate(torch.tensor([PROMPTS[0]]), past_key_values=cache, max_new_tokens=2)
    torch.testing.assert_close(method.similarity[:, 0], right[1:3], rtol=0, atol=CLOSE)


def test_a_prefill_that_recorded_no_similarity_is_refused(tiny: Loaded) -> None:
    shared = prefill_once(tiny.model, PROMPTS, [Needs()], max_new_tokens=2)
    with pytest.raises(ValueError, match="recorded less"):
        run_loop(tiny, PROMPTS, Noting(), None, steps=1, prefilled=shared)


def test_layers_that_add_attention_and_mlp_at_once_are_refused() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = torch.nn.Identity()
            self.self_attn.layer_idx = 0  # type: ignore[assignment]

    watching = residuals_watched(torch.nn.ModuleList([Block()]), Noting.needs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^Block: "), watching:
        pass


def test_a_model_whose_attention_has_another_name_is_refused_and_not_dense() -> None:
    model = random_model("gpt_neox")
    with pytest.raises(ConfigError, match="^GPTNeoXForCausalLM: no decoder layers with self_attn"):
        KVCache(model, "squeeze", 32)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_nothing_reads_has_no_similarity(tmp_path: Path) -> None:
    """Synthetic fills are refused before a model loads."""
    words = ("task=latency", "model=dummy-tiny", "method=squeeze", f"results_dir={tmp_path}", "task.lengths=[300]")
    config = composed(*words, "task.keys=synthetic_attention", "task.prefill=false")
    with pytest.raises(ConfigError, match="^task.prefill=false: squeeze"):
        prepare(config, loaded=None)
