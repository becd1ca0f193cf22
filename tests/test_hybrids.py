"""Models that hold states beside keys and values, or in the same layers: linear attention, convolutions, Mamba."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import random_model, small_config
from driver import CLOSE, SMALL, numbers, slow
from test_together import Rows
from transformers import AttentionInterface, PreTrainedModel

from kvbench import KVCache
from kvbench.backends.hf.layers import card_of
from kvbench.backends.hf.loading import byte_tokenizer
from kvbench.backends.hf.model import engine_for, method_named, use_kvbench_attention
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.batch import Generation, generate
from kvbench.method import Method, Needs

# Linear attention; convolutions; Mamba 2, and layers of experts alone; Mamba 2 and attention in every layer.
KINDS = ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1"]
METHODS = ["full", "snapkv", "quest", "h2o", "icecache", "pariskv", "kvzip"]
QUICK = [("qwen3_next", "snapkv"), ("falcon_h1", "quest")]
STEPS, LENGTH = 5, 130
RAGGED = [numbers(90, seed=1), numbers(61, seed=2), numbers(20, seed=3)]
each_kind = pytest.mark.parametrize("name", ["qwen3_next", *slow("lfm2", "nemotron_h", "falcon_h1")])


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return random_model(small_config(name))


def ready(name: str) -> PreTrainedModel:
    use_kvbench_attention(model := copy.deepcopy(model_of(name)))
    return model


# -- against a dense reference -----------------------------------------------------------------------------------------

attended: dict[int, torch.Tensor] = {}  # of a step, by layer: [B, Hkv or Hq or 1, M] ids, -1 = none


def reference(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Softmax over all keys, those that no list has left out; written apart from every executor."""
    length, heads = key.shape[2], query.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1).double() for part in (key, value))
    logits = scaling * query.double() @ key.transpose(2, 3)
    visible = torch.ones(query.shape[2], length, dtype=torch.bool).tril(length - query.shape[2]).expand_as(logits)
    if (ids := attended.get(module.layer_idx)) is not None:
        ids = ids.repeat_interleave(heads // ids.shape[1], dim=1)
        visible = (ids[..., None] == torch.arange(length)).any(dim=2)[:, :, None]
    out = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ value
    return out.transpose(1, 2).to(query.dtype), None


AttentionInterface.register("dense_reference", reference)


def noting(method: Method) -> Method:
    """The method, whose selections are noted."""
    select = method.select

    def noted(layer: int, query: torch.Tensor) -> Any:
        selection = select(layer, query)
        assert selection is None or (selection.log_weight is None and selection.extra is None)
        attended[layer] = method.view.resident(layer) if selection is None else selection.index
        return selection

    method.select = noted  # type: ignore[method-assign]
    return method


RUNS = [(name, method) for name in KINDS for method in METHODS]


@pytest.mark.parametrize(("name", "method"), [*QUICK, *slow(*(run for run in RUNS if run not in QUICK))])
def test_a_method_equals_a_dense_reference_with_the_same_kept_sets(name: str, method: str) -> None:
    ours, theirs = copy.deepcopy(model_of(name)), copy.deepcopy(model_of(name))
    theirs.set_attn_implementation("dense_reference")
    budget = None if method == "full" else SMALL
    cache = KVCache(ours, noting(method_named(method)), budget, dense_layers=(), tokenizer=byte_tokenizer())
    ids, tokens = torch.tensor([numbers(LENGTH, seed=4)]), numbers(STEPS, seed=5)
    attended.clear()
    plain = theirs(ids, use_cache=True)
    torch.testing.assert_close(ours(ids, past_key_values=cache).logits[:, -1], plain.logits[:, -1], rtol=0, atol=1e-3)
    for step, token in enumerate(tokens):
        at = {"input_ids": torch.tensor([[token]]), "position_ids": torch.tensor([[LENGTH + step]])}
        logits = ours(**at, past_key_values=cache).logits[:, -1]
        expected = theirs(**at, past_key_values=plain.past_key_values).logits[:, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=10 * CLOSE * float(expected.abs().max()))
    audit = cache.audit()
    if method != "full":
        assert 0 < audit["attended_mean"] < LENGTH and set(attended) == set(cache.engine.shape.full_layers)


# -- bytes -------------------------------------------------------------------------------------------------------------


def read(name: str, tokens: int) -> KVCache:
    """A cache of full attention after so many tokens, of which the last was a decode step."""
    cache, ids = KVCache(copy.deepcopy(model_of(name)), "full", None), torch.tensor([numbers(tokens)])
    for part in (ids[:, :-1], ids[:, -1:]):
        cache.model(part, past_key_values=cache)
    return cache


def test_states_are_counted_beside_keys_and_values() -> None:
    """Of three layers of linear attention the convolution's last four inputs and the recurrent state, of any length."""
    sizes = []
    for length in (20, 60):
        audit = read("qwen3_next", length).audit()
        channels = 2 * 4 * 16 + 4 * 16
        assert audit["state_bytes"] == 3 * 4 * (channels * 4 + 4 * 16 * 16)
        assert audit["device_kv_bytes"] == length * 2 * 2 * 16 * 4 and audit["windowed_kv_bytes"] == 0
        sizes.append(audit["state_bytes"])
    assert audit["windowed_share"] == 0.75 and sizes[0] == sizes[1]


def test_a_layer_with_both_has_a_budget_and_a_state() -> None:
    cache = read("falcon_h1", 30)
    audit = cache.audit()
    assert audit["windowed_share"] == 0 and audit["device_kv_bytes"] == 4 * 30 * 2 * 2 * 16 * 4
    assert audit["state_bytes"] == 4 * sum(
        part.numel() * 4 for layer in cache.layers[:1] for part in (layer.conv_states[0], layer.recurrent_states[0])
    )


# -- in the measured loop ----------------------------------------------------------------------------------------------


def looped(model: PreTrainedModel, prompts: list[list[int]], name: str, **options: Any) -> Generation:
    lengths, budget = [len(prompt) for prompt in prompts], Budget(None if name == "full" else SMALL)
    engine = engine_for(model, lengths, method_named(name), budget, (), new_tokens=STEPS)
    return generate(ModelRunner(model), prompts, engine, max_new_tokens=STEPS, **options)


@each_kind
def test_rows_of_a_batch_generate_what_each_generates_alone(name: str) -> None:
    """Also in chunks of which the first ones are padding alone to the shorter rows."""
    model = ready(name)
    alone = [looped(model, [row], "full").tokens[0] for row in RAGGED]
    for chunk in (None, 25):
        assert looped(model, RAGGED, "full", prefill_chunk=chunk).tokens == alone


@each_kind
def test_methods_begin_from_one_prefill_and_write_to_states_of_their_own(name: str) -> None:
    model = ready(name)
    names = ["full", "snapkv", "quest", "full"]
    needs = [method_named(each).needs for each in names]
    for copies in (False, True):
        shared = prefill_once(model, RAGGED[:1], needs, max_new_tokens=STEPS, copies=copies)
        for each in names:
            expected = looped(model, RAGGED[:1], each)
            lent = looped(model, RAGGED[:1], each, prefilled=shared)
            assert lent.tokens == expected.tokens and lent.audit == expected.audit, each


@each_kind
def test_generations_that_join_and_leave_a_pass_are_what_they_are_alone(name: str) -> None:
    model = ready(name)
    loaded: Any = SimpleNamespace(model=model, tokenizer=None)
    needs = [Needs(), method_named("snapkv").needs]
    prompts = [prefill_once(model, [row], needs, max_new_tokens=STEPS + 3, copies=True) for row in RAGGED]
    rows = Rows(loaded)
    for number, prompt in enumerate(prompts):
        rows.join(method_named("snapkv") if number == 1 else Method(), prompt, max_new_tokens=STEPS - (number == 0))
        rows.step()
    rows.finish()
    for number, row in enumerate(RAGGED):
        expected = looped(model, [row], "snapkv" if number == 1 else "full")
        assert rows.generated[number] == [expected.tokens[0][: STEPS - (number == 0)]]
        assert rows.audits[number]["state_bytes"] == expected.audit["state_bytes"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_model_that_forgets_its_states_reads_no_pieces() -> None:
    """Of Mamba 1 transformers reads several tokens as if none were before; single ones go on."""
    model = ready("jamba")
    ids = torch.tensor([numbers(40)])
    assert looped(model, RAGGED[:1], "snapkv").tokens
    with pytest.raises(ConfigError, match="does not go on from its states with several tokens at once"):
        looped(model, RAGGED[:1], "full", prefill_chunk=25)
    for question in ("after", "decode"):
        cache = KVCache(model, "full", None, question=question)
        model(ids[:, :30], past_key_values=cache)
        if question == "after":
            with pytest.raises(ConfigError, match="expected the whole prompt in one pass"):
                model(ids[:, 30:], past_key_values=cache)
        else:
            positions = torch.arange(30, 40)[None]
            logits = model(ids[:, 30:], position_ids=positions, past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, model_of("jamba")(ids).logits[:, -1], rtol=0, atol=1e-3)


def test_states_take_nothing_back() -> None:
    cache = read("falcon_h1", 30)
    with pytest.raises(ValueError, match="a state have forgotten"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="assisted decoding"):
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="beam search"):
        cache.reorder_cache(torch.tensor([0]))


def test_a_card_says_what_each_layer_is() -> None:
    assert [card_of(model_of(name)).layer_kinds for name in ("lfm2", "nemotron_h")] == [
        ("conv", "full_attention", "conv", "full_attention"),
        ("linear_attention", "dummy", "full_attention", "dummy"),
    ]
