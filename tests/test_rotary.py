"""Rotary positions: angles that follow the length, and keys of which a part is turned; against transformers alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from driver import CLOSE, numbers
from transformers import DynamicCache, PreTrainedModel
from zoo import PAD, random_model

from kvbench import KVCache
from kvbench.backends.hf.model import engine_for, method_named, use_kvbench_attention
from kvbench.backends.hf.prefilled import prefill_once
from kvbench.backends.hf.rotary import RotaryOf
from kvbench.backends.hf.runner import ModelRunner
from kvbench.budget import Budget
from kvbench.config import ConfigError
from kvbench.engine.batch import generate
from kvbench.engine.positions import ModelRotation
from kvbench.method import Needs

LIMIT, NEW = 64, 8
LONG, LONGER, SHORT = numbers(150, seed=1), numbers(200, seed=2), numbers(40, seed=3)
CROSSING = numbers(60, seed=4)
LOGITS = 1e-4  # through four layers of random weights, of logits up to 10
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
    "original_max_position_embeddings": LIMIT,
}
# Llama goes on with the keys that it has as it crosses the limit; Phi-3 computes all of them again.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "recomputed": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def model_of(kind: str) -> PreTrainedModel:
    """A model as it is made: what it was asked before would show."""
    family, changes = KINDS[kind]
    return random_model(family, **copy.deepcopy(changes))


def plain(kind: str, row: Sequence[int], new: int = NEW) -> tuple[list[int], torch.Tensor]:
    """New tokens of a prompt alone and their logits, by transformers and a fresh model."""
    ids = torch.tensor([row])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
    out = model_of(kind).generate(ids, **given, output_logits=True, return_dict_in_generate=True)
    return out.sequences[0, len(row) :].tolist(), torch.stack(out.logits)[:, 0]


def looped(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], new: int = NEW, **options: Any
) -> tuple[list[list[int]], torch.Tensor]:
    """New tokens and the logits of all but the first [NEW - 1, B, V], by kvbench's own loop."""
    use_kvbench_attention(model)
    noted: list[torch.Tensor] = []
    engine = engine_for(model, list(map(len, rows)), method_named("full"), Budget(None), (), new_tokens=new)
    watch = lambda logits: noted.append(logits.clone())  # noqa: E731
    return generate(ModelRunner(model), rows, engine, max_new_tokens=new, watch=watch, **options).tokens, torch.stack(
        noted
    )


def cached(model: PreTrainedModel, ids: torch.Tensor, cache: KVCache, **options: Any) -> list[list[int]]:
    given = {"attention_mask": (ids != PAD).long(), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, past_key_values=cache, **given, **options)[:, ids.shape[1] :].tolist()


# -- angles that follow the length -------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("chunk", [None, 40, 64, 100])
def test_chunks_of_a_prompt_have_the_angles_of_the_whole(kind: str, chunk: int | None) -> None:
    tokens, logits = plain(kind, LONG)
    found, noted = looped(model_of(kind), [LONG], prefill_chunk=chunk)
    assert found == [tokens] and len(set(tokens)) > 2
    torch.testing.assert_close(noted[:, 0], logits[1:], rtol=0, atol=LOGITS)


@each_kind
def test_what_a_model_read_before_changes_nothing(kind: str) -> None:
    """A longer sample, the same one under another arm, and a shared prefill that arms take turns to begin from."""
    model, (tokens, logits) = model_of(kind), plain(kind, LONG)
    looped(model, [LONGER])
    for _ in range(2):
        found, noted = looped(model, [LONG])
        assert found == [tokens]
        torch.testing.assert_close(noted[:, 0], logits[1:], rtol=0, atol=LOGITS)
    prefilled = prefill_once(model, [LONG], [Needs()], max_new_tokens=NEW, chunk=50)
    looped(model, [LONGER])
    assert [looped(model, [LONG], prefilled=prefilled)[0] for _ in range(2)] == [[tokens]] * 2


@each_kind
def test_transformers_own_generation_after_ours_is_that_of_a_fresh_model(kind: str) -> None:
    model, ids = model_of(kind), torch.tensor([LONG])
    looped(model, [LONGER])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    assert out[0, len(LONG) :].tolist() == plain(kind, LONG)[0]


@each_kind
def test_rows_of_a_batch_have_their_own_angles(kind: str) -> None:
    rows = [LONG, SHORT, LONGER]
    found, noted = looped(model_of(kind), rows, prefill_chunk=70)
    for row, prompt in enumerate(rows):
        tokens, logits = plain(kind, prompt)
        assert found[row] == tokens
        torch.testing.assert_close(noted[:, row], logits[1:], rtol=0, atol=LOGITS)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_generation_crosses_the_limit_as_transformers_does(kind: str) -> None:
    tokens, _ = plain(kind, CROSSING)
    assert looped(model_of(kind), [CROSSING])[0] == [tokens]
    model = model_of(kind)
    cached(model, torch.tensor([LONGER]), KVCache(model, "full", None))
    assert cached(model, torch.tensor([CROSSING]), KVCache(model, "full", None)) == [tokens]


def test_a_generation_that_computes_all_keys_again_is_refused_before_it_begins() -> None:
    model = model_of("recomputed")
    for refused in (
        lambda: looped(model, [LONG, CROSSING]),
        lambda: prefill_once(model, [CROSSING], [Needs()], max_new_tokens=NEW),
    ):
        use_kvbench_attention(model)
        with pytest.raises(ConfigError, match=f"Phi3ForCausalLM: .*60 .*longrope.*_embeddings={LIMIT}") as refusal:
            refused()
        assert "\n" not in str(refusal.value)
    tokens, _ = plain("recomputed", CROSSING, new=4)
    assert looped(model, [CROSSING], new=4)[0] == [tokens], "up to the limit and no further"


@each_kind
def test_a_cache_inside_generate_has_the_angles_of_a_fresh_model(kind: str) -> None:
    model, tokens = model_of(kind), plain(kind, LONG)[0]
    for text in (LONGER, LONG, LONG):
        cache = KVCache(model, "full", None)
        found = cached(model, torch.tensor([text]), cache)
    assert found == [tokens] and cache.get_seq_length() == len(LONG) + NEW - 1
    assert cache.audit()["attended_mean"] > len(LONG), "every step was the method's"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_chunks_inside_generate_have_the_angles_of_the_whole(kind: str) -> None:
    model = model_of(kind)
    cache = KVCache(model, "full", None, prompt_length=len(LONG))
    assert cached(model, torch.tensor([LONG]), cache, prefill_chunk_size=50) == [plain(kind, LONG)[0]]


@each_kind
def test_rows_with_other_angles_than_their_neighbours_are_refused_inside_generate(kind: str) -> None:
    """Transformers would give the shorter row those of the longer one."""
    model = model_of(kind)
    rows = torch.tensor([LONG, [PAD] * (len(LONG) - len(SHORT)) + SHORT])
    with pytest.raises(ConfigError, match=rf"rows of 40 and 150 tokens .*rope_type=\w+ with \w+={LIMIT}"):
        cached(model, rows, KVCache(model, "full", None))
    within = torch.tensor([numbers(50, seed=5), [PAD] * 10 + SHORT])
    alone = [plain(kind, row[row != PAD].tolist())[0] for row in within]
    assert cached(model, within, KVCache(model, "full", None)) == alone
    longer = [plain(kind, row)[0] for row in (LONG, LONG[::-1])]
    assert cached(model, torch.tensor([LONG, LONG[::-1]]), KVCache(model, "full", None)) == longer


# -- a model's class that lets go of its cache -------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [None, LONGROPE], ids=["default", "longrope"])
@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_a_class_that_drops_the_cache_is_refused_where_it_does(family: str, rope: dict[str, Any] | None) -> None:
    more = {"short_mscale": 1.0, "long_mscale": 1.2} if family == "phimoe" else {}
    changes: dict[str, Any] = {"original_max_position_embeddings": LIMIT, "sliding_window": None}
    if family == "phimoe":
        changes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = random_model(family, **changes, **({"rope_parameters": {**rope, **more}} if rope else {}))
    cache = KVCache(model, "streaming_llm", 16, positions="original")
    with pytest.raises(ConfigError, match=f"{type(model).__name__}: .*original_max_position_embeddings={LIMIT}"):
        cached(model, torch.tensor([CROSSING]), cache)
    assert cache.get_seq_length() == LIMIT, "refused at the step that drops it"
    whole = KVCache(model, "full", None)  # of a prompt beyond the limit nothing is there that could be dropped
    ids = torch.tensor([LONG])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    assert cached(model, ids, whole) == theirs[:, len(LONG) :].tolist()
    assert whole.get_seq_length() == len(LONG) + NEW - 1


def test_a_class_that_takes_another_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = random_model("llama"), torch.tensor([SHORT])
    kind = type(model)
    prepare, forward = kind.prepare_inputs_for_generation, kind.forward

    @functools.wraps(prepare)
    def prepared(self: Any, *args: Any, **given: Any) -> Any:
        return prepare(self, *args, **given) | {"past_key_values": DynamicCache()}

    @functools.wraps(forward)
    def forwarded(self: Any, *args: Any, **given: Any) -> Any:
        return forward(self, *args, **given | {"past_key_values": DynamicCache()})

    for name, own in (("prepare_inputs_for_generation", prepared), ("forward", forwarded)):
        cache = KVCache(model, "full", None)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, own)
            with pytest.raises(ConfigError, match="LlamaForCausalLM: .*KVCache after 0 tokens"):
                cached(model, ids, cache)


# -- keys of which a part is turned ------------------------------------------------------------------------------------

PARTIAL: dict[str, dict[str, Any]] = {
    "phi": {},
    "stablelm": {},
    "persimmon": {"num_key_value_heads": None},
    "gpt_neox": {},
    "glm": {},
    "ministral3": {"sliding_window": None},
}


@pytest.mark.parametrize("family", PARTIAL)
def test_of_one_layer_positions_in_the_cache_are_those_of_a_text_of_the_kept_tokens(family: str) -> None:
    """Its keys and values follow from their own token alone, so transformers may read the kept tokens alone."""
    model = random_model(family, num_hidden_layers=1, **PARTIAL[family])
    ours, budget, fed = copy.deepcopy(model), 24, 5
    prompt, more = numbers(90, seed=1), numbers(fed, seed=2)
    cache = KVCache(ours, "streaming_llm", budget, dense_layers=())
    with torch.no_grad():
        ours(torch.tensor([prompt]), past_key_values=cache)
        for step, token in enumerate(more):
            found = ours(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
            text = prompt + more[: step + 1]
            kept = text[:4] + text[-(budget - 4) :]
            expected = model(torch.tensor([kept])).logits[0, -1]
            torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS)
    assert (expected - model(torch.tensor([text])).logits[0, -1]).abs().max() > 0.01


@pytest.mark.parametrize("family", PARTIAL)
def test_keys_turned_back_are_those_of_the_first_position(family: str) -> None:
    model, ids = random_model(family, num_hidden_layers=1, **PARTIAL[family]), torch.tensor([SHORT])
    positions = torch.arange(len(SHORT))
    stored = []
    with torch.no_grad():
        for places in (positions, torch.zeros_like(positions)):
            theirs = DynamicCache()
            model(ids, position_ids=places[None], past_key_values=theirs)
            stored.append(theirs.layers[0].keys)
    use_kvbench_attention(model)
    rotation = ModelRotation(RotaryOf(model, [0]))
    torch.testing.assert_close(rotation.back(stored[0], positions[None, None]), stored[1], rtol=0, atol=CLOSE)
    torch.testing.assert_close(rotation.turn(stored[1], positions[None, None]), stored[0], rtol=0, atol=CLOSE)
    assert (stored[0] - stored[1]).abs().max() > 0.1


def test_a_model_that_does_more_to_its_keys_than_to_turn_them_is_refused() -> None:
    model = random_model("hunyuan_v1_dense")
    KVCache(model, "streaming_llm", 64)  # its norm behind the rotation weighs all channels alike
    for layer in model.model.layers:
        layer.self_attn.key_layernorm.weight.data *= torch.linspace(0.5, 2, 16)
    with pytest.raises(ConfigError, match="HunYuanDenseV1ForCausalLM: "):
        KVCache(model, "streaming_llm", 64)
