"""Models whose layers are not all alike: sliding windows, learned sinks, no rotary positions; against transformers."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from driver import CLOSE, SMALL, numbers, slow
from transformers import PreTrainedModel
from zoo import (
    FAMILIES,
    LENGTH,
    MIXED,
    NEW,
    OFFSET,
    SIZES,
    WINDOW,
    WINDOWED,
    config_of,
    generated,
    inputs,
    random_model,
)

from kvbench import KVCache
from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.model import engine_for, method_named, use_kvbench_attention
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.rotary import RotaryOf
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.batch import Generation, generate
from kvbench.engine.engine import Engine
from kvbench.measure.synthetic import Filled, SyntheticEngine
from kvbench.method import Method, Needs, Prompt, Selection, Shape
from kvbench.models.card import ModelCard
from kvbench.models.footprint import Footprint, Prompts
from methods.blocks.votes import window_probabilities

QUICK = ["gemma3_text", "gpt_oss"]
each_windowed = pytest.mark.parametrize("family", QUICK)
each_family = pytest.mark.parametrize("family", [*QUICK, *slow(*sorted(FAMILIES.keys() - set(QUICK)))])
QUICK_RUNS = [("gemma3_text", "quest"), ("gemma3_text", "icecache"), ("gpt_oss", "snapkv")]
RUNS = [(family, method) for family in FAMILIES for method in ("quest", "snapkv", "icecache")]
SLOW_RUNS = [run for run in RUNS if run not in QUICK_RUNS]
ENTRY = 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4  # bytes of a token in a layer
WHOLE = 500  # a budget of more than every prompt
RAGGED = [numbers(LENGTH, seed=1), numbers(61, seed=2), numbers(20, seed=3)]  # the last shorter than the window


class Pair:
    """A model that attends through kvbench, and what one with the same weights generates that it has never seen."""

    def __init__(self, family: str) -> None:
        theirs = random_model(family)
        self.ours = copy.deepcopy(theirs)
        use_kvbench_attention(self.ours)
        self.expected = {batch: scored(theirs, inputs(batch)) for batch in (1, 2)}
        self.alone = [
            generated(theirs, {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))})[0]
            for row in RAGGED
        ]


def scored(model: PreTrainedModel, given: dict[str, torch.Tensor], cache: Any = None) -> tuple[list, torch.Tensor]:
    """New tokens of each row, and the logits that chose them [NEW, B, V]."""
    out = model.generate(
        **given,
        **{} if cache is None else {"past_key_values": cache},
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, given["input_ids"].shape[1] :].tolist(), torch.stack(out.logits)


@pytest.fixture(scope="session")
def pair() -> Callable[[str], Pair]:
    return functools.cache(Pair)


def looped(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], name: str, budget: int | None, **options: Any
) -> Generation:
    """The measured loop."""
    making = {key: options.pop(key) for key in ("attention", "probe_every") if key in options}
    lengths = [len(prompt) for prompt in prompts]
    engine = engine_for(model, lengths, method_named(name), Budget(budget), (), new_tokens=NEW, **making)
    return generate(ModelRunner(model), prompts, engine, max_new_tokens=NEW, **options)


# -- inside generate() -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@each_family
def test_full_attention_generates_what_the_model_generates(pair: Any, family: str, batch: int) -> None:
    tokens, logits = pair(family).expected[batch]
    cache = KVCache(pair(family).ours, "full", None)
    ours, scores = scored(pair(family).ours, inputs(batch), cache)
    assert ours == tokens and any(len(set(row)) > 1 for row in tokens)
    torch.testing.assert_close(scores, logits, rtol=0, atol=CLOSE * float(logits.abs().max().clamp(min=1)))


@pytest.mark.parametrize(("family", "method"), [*QUICK_RUNS, *slow(*SLOW_RUNS)])
def test_a_method_runs_on_the_layers_with_full_attention(pair: Any, family: str, method: str) -> None:
    model, windowed = pair(family).ours, ModelCard.of_config(pair(family).ours.config).windows
    for batch, budget in ((1, WHOLE), (2, WHOLE), (2, SMALL)):
        cache = KVCache(model, method, budget, dense_layers=())
        tokens = generated(model, inputs(batch), cache)
        assert budget == SMALL or tokens == pair(family).expected[batch][0]
    audit = cache.audit()
    # a KV head attends what any of its query heads chooses, and a latent is one for all
    assert 0 < audit["attended_mean"] < LENGTH - OFFSET / 2 and not audit["over_rule"] and audit["dense_share"] == 0
    assert audit.get("windowed_share", 0) == len(windowed) / 4
    assert audit.get("windowed_kv_bytes", 0) == len(windowed) * 2 * (WINDOW - 1) * ENTRY


@each_windowed
def test_a_window_among_the_dense_layers_stays_a_window(pair: Any, family: str) -> None:
    cache = KVCache(pair(family).ours, "quest", SMALL, dense_layers=(0, 1))
    generated(pair(family).ours, inputs(1), cache)
    assert cache.audit()["dense_share"] == 0.25 and cache.audit()["windowed_share"] == 0.5, "one layer is sparse"


@each_windowed
def test_bytes_are_those_of_both_kinds_of_layers(pair: Any, family: str) -> None:
    """At the last of NEW - 1 steps two layers hold every token, two the last ones; a short prompt fills no window."""
    for length in (LENGTH, 10):
        given = {"input_ids": torch.tensor([numbers(length, seed=6)]), "attention_mask": torch.ones(1, length)}
        cache = KVCache(pair(family).ours, "full", None)
        generated(pair(family).ours, given, cache)
        audit, held = cache.audit(), length + NEW - 1
        assert audit["windowed_kv_bytes"] == 2 * min(held, WINDOW - 1) * ENTRY
        assert audit["device_kv_bytes"] == 2 * held * ENTRY + audit["windowed_kv_bytes"]
        assert audit["device_kv_allocated_bytes"] >= audit["device_kv_bytes"]
        assert audit["attended_max"] == held


def test_what_a_window_has_left_is_freed_with_the_prompt(pair: Any) -> None:
    cache = KVCache(pair("gemma3_text").ours, "full", None)
    generated(pair("gemma3_text").ours, inputs(1), cache, max_new_tokens=1)
    assert [layer.allocated_bytes() for layer in cache.engine.windowed.values()] == [(WINDOW - 1) * ENTRY] * 2


# -- in the measured loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, *slow(40)])
@each_windowed
def test_rows_of_a_batch_generate_what_each_generates_alone(pair: Any, family: str, chunk: int | None) -> None:
    generation = looped(pair(family).ours, RAGGED, "full", None, prefill_chunk=chunk)
    assert generation.tokens == pair(family).alone
    held = sum(map(len, RAGGED)) + len(RAGGED) * (NEW - 1)
    windowed = 2 * len(RAGGED) * (WINDOW - 1) * ENTRY  # a window counts columns, of padding too
    assert generation.audit["device_kv_bytes"] == 2 * held * ENTRY + windowed


@each_windowed
def test_methods_begin_from_one_prefill(pair: Any, family: str) -> None:
    model = pair(family).ours
    names = ["full", "snapkv", "quest", "full"]
    shared = prefill_once(model, RAGGED[:1], [method_named(name).needs for name in names], max_new_tokens=NEW, chunk=50)
    for name in names:
        own = looped(model, RAGGED[:1], name, None if name == "full" else SMALL, prefill_chunk=50)
        lent = looped(model, RAGGED[:1], name, None if name == "full" else SMALL, prefilled=shared)
        assert lent.tokens == own.tokens and lent.audit == own.audit, name


@pytest.mark.parametrize("name", ["full", "quest"])
@pytest.mark.parametrize("attention", ["reference", "torch", "cpu"])
def test_sinks_are_in_every_executor_and_in_the_probe(pair: Any, attention: str, name: str) -> None:
    options = {"attention": attention, "probe_every": 1}
    generation = looped(pair("gpt_oss").ours, RAGGED[:1], name, None if name == "full" else WHOLE, **options)
    assert generation.tokens == pair("gpt_oss").alone[:1]
    assert generation.probe["error"] < 1e-5 and 0.05 < generation.probe["mass"] < 0.95, "sinks hold the rest"


class Watching(Method):
    """Sees what full attention gives to each key."""

    needs = Needs(attention_sums=True, probabilities=True)

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.sums = prompt.attention_sums

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        self.probabilities = probabilities


def test_what_a_method_sees_of_attention_leaves_out_what_the_sinks_hold() -> None:
    rng = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 9, 16, generator=rng), torch.randn(1, 2, 9, 16, generator=rng)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0])
    method = Watching()
    engine = Engine(Shape(1, 4, 2, 16, (8,), torch.float32, torch.device("cpu"), 0.25, (0,)), method, Budget(None))
    engine.start_chunk(torch.zeros(1, 8, dtype=torch.int64))
    engine.attend(0, query[:, :, :8], key[:, :, :8], key[:, :, :8], sinks)
    engine.start_step(torch.zeros(1, dtype=torch.int64))
    out = engine.attend(0, query[:, :, 8:], key[:, :, 8:], key[:, :, 8:], sinks)
    for head in range(4):
        weights = torch.zeros(9, 9)
        for at in range(9):
            own = [math.exp(0.25 * float(query[0, head, at] @ key[0, head // 2, past])) for past in range(at + 1)]
            weights[at, : at + 1] = torch.tensor(own) / (sum(own) + math.exp(sinks[head]))
        torch.testing.assert_close(method.sums[0, head], weights[:8, :8].sum(dim=0), rtol=0, atol=CLOSE)
        torch.testing.assert_close(method.probabilities[0, head], weights[8], rtol=0, atol=CLOSE)
        torch.testing.assert_close(out[0, head, 0], weights[8] @ key[0, head // 2], rtol=0, atol=CLOSE)


def test_a_synthetic_prompt_fills_windows_too(pair: Any) -> None:
    model, rows = pair("gemma3_text").ours, [numbers(200, seed=1), numbers(200, seed=2)]
    settings: dict[str, Any] = {"kind": SyntheticEngine, "new_tokens": NEW}
    engine = engine_for(model, [200, 200], method_named("quest"), Budget(64), (), **settings)
    audit = generate(ModelRunner(model), rows, engine, max_new_tokens=NEW, prefilled=Filled(engine, rows)).audit
    assert audit["windowed_kv_bytes"] == 2 * 2 * (WINDOW - 1) * ENTRY
    assert audit["device_kv_bytes"] == 2 * 2 * (200 + NEW - 1) * ENTRY + audit["windowed_kv_bytes"]


# -- what a config tells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_that_transformers_sees(family: str) -> None:
    """But for those that no position of the model reaches past, which are none."""
    config = config_of(family, num_hidden_layers=12, layer_types=None) if family != "gpt2" else config_of(family)
    kinds = getattr(config, "layer_types", None) or []
    expected = {layer: WINDOW for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    assert bool(expected) == (family in WINDOWED)
    assert ModelCard.of_config(config).windows == ModelCard.of_class(config.to_dict()).windows == expected


def test_windows_that_positions_reach_past_are_some() -> None:
    assert len(ModelCard.of_config(config_of("phi3", sliding_window=500)).windows) == 4


def test_the_footprint_counts_windows_as_the_audit_does(pair: Any) -> None:
    generation = looped(pair("gemma3_text").ours, RAGGED[:1], "full", None)
    found = Footprint.of(ModelCard.of_config(config_of("gemma3_text")), torch.float32, Prompts(LENGTH + NEW - 1))
    assert found is not None and found.cache == generation.audit["device_kv_bytes"]


@pytest.mark.parametrize("family", QUICK)
def test_keys_turn_as_the_layers_with_full_attention_turn_them(pair: Any, family: str) -> None:
    """In Gemma 3 layers with a window have other angles."""
    model = pair(family).ours
    rotary = RotaryOf(model, [1, 2])
    vectors = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([[9, 40, 3]])

    def placed(at: torch.Tensor) -> torch.Tensor:
        angles = model.model.rotary_emb(vectors, at, *["full_attention"] * (family == "gemma3_text"))
        return sys.modules[type(model.model).__module__].apply_rotary_pos_emb(vectors, vectors, *angles)[0]

    turned = rotary.turn(placed(position), rotary.angles(torch.full((1, 1, 3), -2)))
    torch.testing.assert_close(turned, placed(position - 2), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("family", ["cohere2", "smollm3", "gpt2"])
def test_layers_without_rotary_positions_are_refused_where_keys_would_be_turned(family: str) -> None:
    model = random_model(family)
    with pytest.raises(ConfigError, match="positions=original"):
        generated(model, inputs(1), KVCache(model, "streaming_llm", SMALL, dense_layers=()))
    generated(model, inputs(1), KVCache(model, "streaming_llm", SMALL, positions="original", dense_layers=()))


def test_a_model_that_attends_other_values_than_it_stores_is_refused() -> None:
    model = random_model("diffllama")
    with pytest.raises(ConfigError, match="DiffLlamaAttention: "):
        generated(model, inputs(1), KVCache(model, "full", None))


# -- the scaling that a model asks for ---------------------------------------------------------------------------------

SCALED: dict[str, tuple[float, dict[str, Any]]] = {
    "opt": (1.0, {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}),  # scales its queries itself
    "granite": (0.1, {"attention_multiplier": 0.1}),
    "gemma3_text": (0.1, {"query_pre_attn_scalar": 100}),
    "gemma2": (0.1, {"query_pre_attn_scalar": 100, "layer_types": MIXED, "attn_logit_softcapping": 1.5}),
}


class Scaled(Method):
    """Notes what attention every token of the prompt received, and the first step's own."""

    needs = Needs(attention_sums=True, query_window=4, probabilities=True)

    def prefill(self, layer: int, prompt: Prompt) -> None:
        self.prompt = prompt

    def select(self, layer: int, query: torch.Tensor) -> Selection:
        return Selection(self.view.resident(layer))

    def observe(self, layer: int, selection: Selection | None, probabilities: torch.Tensor) -> None:
        self.weights = probabilities


@pytest.mark.parametrize("family", SCALED)
def test_attention_is_scaled_as_the_models_own_call_asks(family: str) -> None:
    scaling, changes = SCALED[family]
    model, row = random_model(family, "eager", **changes), numbers(40, seed=3)
    ids, last = torch.tensor([row]), model.config.num_hidden_layers - 2
    with torch.no_grad():
        told = model(ids, output_attentions=True)
        after = model(torch.tensor([[*row, 5]]), output_attentions=True)
    ours, watching = copy.deepcopy(model), Scaled()
    cache = KVCache(ours, "full", None)
    assert shape_of(ours, [40], (), torch.float32, ours.device).scaling == pytest.approx(scaling)
    torch.testing.assert_close(ours(ids, past_key_values=cache).logits, told.logits, rtol=0, atol=CLOSE * 10)
    use_kvbench_attention(ours)
    engine = engine_for(ours, [40], watching, Budget(None), [layer for layer in range(4) if layer != last])
    logits: list[torch.Tensor] = []
    generate(ModelRunner(ours), [row], engine, max_new_tokens=2, forced_tokens=[[5, 5]], watch=logits.append)
    torch.testing.assert_close(logits[0][0], after.logits[0, -1], rtol=0, atol=CLOSE * 10)
    received = told.attentions[last].sum(dim=2)
    torch.testing.assert_close(watching.prompt.attention_sums, received, rtol=0, atol=CLOSE)
    torch.testing.assert_close(watching.weights[..., :41], after.attentions[last][:, :, -1], rtol=0, atol=CLOSE)
    votes = torch.cat(list(window_probabilities(watching.prompt, 4, watching.shape)), dim=1)
    torch.testing.assert_close(votes, told.attentions[last][:, :, -4:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("attention", ["torch", "reference", "cpu"])
def test_every_executor_scales_so(attention: str) -> None:
    model = random_model("opt", **SCALED["opt"][1])
    ids = torch.tensor([numbers(50, seed=1)])
    tokens, logits = scored(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for method in ("full", "h2o"):
        ours = copy.deepcopy(model)
        cache = KVCache(ours, method, None if method == "full" else WHOLE, attention=attention)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found, noted = scored(ours, given, cache)
        assert found == tokens
        torch.testing.assert_close(noted, logits, rtol=0, atol=CLOSE * 10)


def test_a_model_whose_scaling_changes_is_refused() -> None:
    model = random_model("llama")
    cache = KVCache(model, "full", None)
    model.model.layers[2].self_attn.scaling = 0.5
    with pytest.raises(ConfigError, match="0.5 in layer 2, .*0.25"):
        generated(model, inputs(1), cache)
    with pytest.raises(ConfigError, match="LlamaForCausalLM: .*scaling"):
        KVCache(copy.deepcopy(model))
