"""`KVCache` inside plain `model.generate()`, on the model classes of the zoo, against transformers' own sdpa."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import CLOSE, METHODS, SMALL, Case, each_method, each_method_in_turn, numbers, slow
from zoo import LENGTH, NEW, OFFSET, generated, inputs, random_model
from zoo import PLAIN as FAMILIES

from kvbench import KVCache
from kvbench.backends.hf.loading import Loaded
from kvbench.config import ConfigError


class Pair:
    """A model that a KVCache was made of and one that kvbench has never seen, with the same weights."""

    def __init__(self, family: str) -> None:
        # of a Llama the shape of the heads is that of HEADS, which some methods need
        self.sdpa = random_model(family, **({"head_dim": 32} if family == "llama" else {}))
        self.ours = copy.deepcopy(self.sdpa)
        KVCache(self.ours)
        self.expected = {batch: generated(self.sdpa, inputs(batch)) for batch in (1, 2)}


@pytest.fixture(scope="session")
def tokenizer(dummies: Callable[[str], Loaded]) -> Any:
    """For methods that read the text of tokens."""
    return dummies("dummy-tiny").tokenizer


@pytest.fixture(scope="session")
def pairs() -> Callable[[str], Pair]:
    return functools.cache(Pair)


# -- the same tokens as sdpa -------------------------------------------------------------------------------------------


def test_expected_tokens_vary(pairs: Any) -> None:
    """A model that repeats one token would agree with anything."""
    for family in FAMILIES:
        for rows in pairs(family).expected.values():
            assert all(len(set(row)) > 2 for row in rows), family


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", ["quest", "snapkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_large_budget_generates_what_sdpa_generates(pairs: Any, family: str, method: str, batch: int) -> None:
    pair = pairs(family)
    assert generated(pair.ours, inputs(batch), KVCache(pair.ours, method, 500)) == pair.expected[batch]


@pytest.mark.parametrize(("method", "accounting"), [("icecache", "paper"), ("pariskv", "unified")])
def test_a_store_that_grows_inside_generate_keeps_to_a_small_budget(tiny: Loaded, method: str, accounting: str) -> None:
    cache = KVCache(tiny.model, method, 64, accounting=accounting, dense_layers=())
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    tiny.model.generate(torch.tensor([numbers(100)]), past_key_values=cache, **options)
    assert cache.audit()["attended_max"] <= 64


@pytest.mark.parametrize("batch", [1, 2])
@each_method_in_turn
def test_every_method_with_a_large_budget_generates_what_sdpa_generates(
    pairs: Any, tokenizer: Any, case: Case, batch: int, accounting: str
) -> None:
    pair = pairs("llama")
    cache = KVCache(pair.ours, case.build(), 500, accounting=accounting, dense_layers=(), tokenizer=tokenizer)
    assert generated(pair.ours, inputs(batch), cache) == pair.expected[batch]


@pytest.mark.parametrize("family", FAMILIES)
def test_row_of_a_padded_batch_generates_what_it_generates_alone(pairs: Any, family: str) -> None:
    """With a small budget: the budget and the selection of a row do not see its neighbour or its padding."""
    model, both = pairs(family).ours, inputs(2)
    together = generated(model, both, KVCache(model, "quest", SMALL, dense_layers=()))
    for row, offset in enumerate((0, OFFSET)):
        alone = {"input_ids": both["input_ids"][row : row + 1, offset:]}
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        assert generated(model, alone, KVCache(model, "quest", SMALL, dense_layers=())) == [together[row]]


@pytest.mark.parametrize(("chunk", "batch"), [(1, 1), (40, 2), (50, 1), (119, 2), *slow((40, 1), (50, 2), (119, 1))])
@pytest.mark.parametrize("method", ["quest", "snapkv"])
def test_chunked_prefill_of_transformers_changes_nothing(pairs: Any, chunk: int, method: str, batch: int) -> None:
    """50 leaves a last chunk of 20; 119 one of a single token, which is no decode step."""
    model = pairs("llama").ours
    whole = generated(model, inputs(batch), KVCache(model, method, SMALL))
    cache = KVCache(model, method, SMALL, prompt_length=LENGTH)
    assert generated(model, inputs(batch), cache, prefill_chunk_size=chunk) == whole


def test_first_chunk_that_is_all_padding_is_refused(pairs: Any) -> None:
    """It does not tell where its row starts."""
    model = pairs("llama").ours
    with pytest.raises(ValueError, match="raise prefill_chunk_size"):
        generated(model, inputs(2), KVCache(model, "quest", SMALL, prompt_length=LENGTH), prefill_chunk_size=30)


@pytest.mark.parametrize("name", ["streaming_llm", "snapkv", "icecache"])
def test_what_is_read_in_inference_mode_goes_on_outside_of_it(pairs: Any, name: str) -> None:
    model, prompt = pairs("llama").ours, inputs(1)["input_ids"]
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = KVCache(model, name, SMALL)
        with mode():
            model(prompt[:, :-1], past_key_values=cache, logits_to_keep=1)
        found.append(model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False).tolist())
    assert found[0] == found[1]


@each_method
def test_method_by_name_takes_its_options(case: Case, pairs: Any, tokenizer: Any) -> None:
    model = pairs("llama").ours
    named = KVCache(model, case.name, 64, tokenizer=tokenizer, **case.options)
    built = KVCache(model, case.build(), 64, tokenizer=tokenizer)
    assert generated(model, inputs(1), named) == generated(model, inputs(1), built)


def test_options_that_no_method_or_another_takes_are_refused(pairs: Any) -> None:
    model = pairs("llama").ours
    with pytest.raises(ConfigError, match="page"):
        KVCache(model, "quest", 256, page=8)
    with pytest.raises(ConfigError, match="page_size: no such argument"):
        KVCache(model, METHODS[0].build(), 256, page_size=8)


# -- what the model does without a KVCache -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_model_without_our_cache_computes_sdpa(pairs: Any, family: str, batch: int) -> None:
    pair, given = pairs(family), inputs(batch)
    real = given["attention_mask"].bool()
    for use_cache in (False, True):  # True: transformers makes its own DynamicCache
        ours, theirs = (model(**given, use_cache=use_cache).logits for model in (pair.ours, pair.sdpa))
        torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=CLOSE)
    assert generated(pair.ours, given) == pair.expected[batch]


def test_generation_with_our_cache_leaves_nothing_behind(pairs: Any) -> None:
    pair = pairs("llama")
    cache = KVCache(pair.ours, "quest", SMALL)
    generated(pair.ours, inputs(2), cache)
    assert generated(pair.ours, inputs(2)) == pair.expected[2]
    with pytest.raises(ValueError, match="attention_mask"):
        pair.ours(torch.tensor([[1, 2]] * 2), attention_mask=torch.ones(2, 2), past_key_values=cache)
    assert generated(pair.ours, inputs(2)) == pair.expected[2]


# -- reuse and refusals ------------------------------------------------------------------------------------------------


def test_used_cache_is_refused_and_serves_again_after_reset(pairs: Any) -> None:
    pair = pairs("llama")
    cache = KVCache(pair.ours, "quest", 500)
    generated(pair.ours, inputs(1), cache)
    longer = {"input_ids": torch.tensor([numbers(200)]), "attention_mask": torch.ones(1, 200, dtype=torch.int64)}
    with pytest.raises(ValueError, match="new KVCache"):
        generated(pair.ours, longer, cache)
    cache.reset()
    assert generated(pair.ours, inputs(2), cache) == pair.expected[2]


def test_right_padding_is_refused(pairs: Any) -> None:
    model, given = pairs("llama").ours, inputs(2)
    flipped = {name: tensor.flip(1) for name, tensor in given.items()}
    with pytest.raises(ValueError, match="padding_side = 'left'"):
        model(**flipped, past_key_values=KVCache(model, "quest", SMALL))


def test_beam_search_is_refused(pairs: Any) -> None:
    model = pairs("llama").ours
    with pytest.raises(ValueError, match="beam search"):
        generated(model, inputs(1), KVCache(model, "quest", SMALL), num_beams=2)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 64}, r"no layer with full attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("bloom", {}, "attention in a way of its own"),
    ],
)
def test_model_that_would_run_wrong_is_refused_by_name(family: str, changes: dict[str, Any], reason: str) -> None:
    model = random_model(family, "eager", **changes)
    with pytest.raises(ConfigError, match=reason) as refusal:
        KVCache(model)
    assert type(model).__name__ in str(refusal.value)
    assert model.config._attn_implementation == "eager", "a refused model stays as it was"


def test_model_with_layers_off_its_devices_is_refused(pairs: Any) -> None:
    model = copy.copy(pairs("llama").sdpa)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": "disk"}
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM: .*hf_device_map"):
        KVCache(model)


@pytest.mark.parametrize("name", ["quets", "snap"])
def test_unknown_method_is_refused_with_the_nearest(pairs: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="quest" if name == "quets" else "snapkv"):
        KVCache(pairs("llama").ours, name)


# -- the audit ---------------------------------------------------------------------------------------------------------


@each_method_in_turn
def test_audit_of_a_cache_shows_what_was_attended(pairs: Any, tokenizer: Any, case: Case, accounting: str) -> None:
    model = pairs("llama").ours
    cache = KVCache(model, case.build(), SMALL, accounting=accounting, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no prompt"):
        cache.audit()
    generated(model, inputs(2), cache)
    audit = cache.audit()
    assert audit["over_rule"] is False
    assert audit["dense_share"] == 0.5
    assert audit["budget"] == SMALL
    if case.name == "full":
        assert audit["attended_max"] == LENGTH + NEW - 1
        # the last step of each row; rows of 120 and 83
        assert audit["attended_mean"] == (LENGTH + LENGTH - OFFSET) / 2 + NEW / 2
    elif case.name == "omnikv":  # its filter attends everything, and the layer after it no more than its rule
        assert audit["attended_max"] == LENGTH + NEW - 1 and audit["attended_mean"] < (LENGTH + SMALL + NEW) / 2
    elif accounting == "unified":
        method = cache.engine.method
        most = max(
            method.rule(layer, length, generated)
            for layer in method.shape.sparse_layers
            for length in (LENGTH, LENGTH - OFFSET)
            for generated in range(1, NEW + 1)
        )
        assert 0 < audit["attended_mean"] <= SMALL and audit["attended_max"] <= most
    else:
        # some heads attend everything; the prompt stays whole, for good or until the first cut
        whole = case.name in ("razor", "duo", "raas") or case.name.endswith("_decode")
        assert 0 < audit["attended_mean"] <= audit["attended_max"] < LENGTH + whole * NEW


@pytest.mark.parametrize("budget", [0.5, 1.0])
def test_fraction_is_of_each_rows_own_prompt(pairs: Any, budget: float) -> None:
    model = pairs("llama").ours
    cache = KVCache(model, "topk", budget, granularity="kv_head", dense_layers=())
    generated(model, inputs(2), cache)
    rows = [LENGTH, LENGTH - OFFSET]
    expected = sum(-(-int(2 * budget * length) // 2) for length in rows) / 2
    assert cache.audit()["attended_mean"] == expected
