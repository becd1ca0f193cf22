"""A model of which a `KVCache` was made, where none is handed to it: it is as it was; and what is done to models."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import SMALL
from transformers import PreTrainedModel
from zoo import generated, inputs, random_model

from kvbench import KVCache
from kvbench.config import ConfigError

GIVEN = inputs(2)
IDS, MASK = GIVEN["input_ids"], GIVEN["attention_mask"]


def pair_of(family: str = "llama", attention: str = "eager") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and its copy, which a KVCache was made of and has read a prompt."""
    plain = random_model(family, attention)
    watched = copy.deepcopy(plain)
    generated(watched, GIVEN, KVCache(watched, "quest", SMALL), max_new_tokens=2)
    return plain, watched


def saved_and_loaded(model: PreTrainedModel) -> PreTrainedModel:
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    return torch.load(written, weights_only=False)


USES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "says its attention": lambda model: torch.tensor(model.config._attn_implementation == "eager"),
    "given embeddings": lambda model: model.generate(
        inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=MASK, max_new_tokens=3, do_sample=False
    ),
    "given a mask by its place": lambda model: model(IDS, MASK).logits,
    "gives its attention": lambda model: torch.stack(model(**GIVEN, output_attentions=True).attentions),
    "written and read": lambda model: saved_and_loaded(model)(**GIVEN).logits,
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True)(IDS, use_cache=False).logits,
}


@pytest.mark.parametrize("use", USES)
def test_a_model_without_a_cache_is_as_it_was(use: str) -> None:
    plain, watched = map(USES[use], pair_of())
    assert torch.equal(plain, watched)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "gpt2"])
def test_so_it_is_with_windows_sinks_and_other_caches(family: str) -> None:
    plain, watched = pair_of(family)
    assert plain.config._attn_implementation == watched.config._attn_implementation
    for options in ({"use_cache": False}, {"use_cache": True}, {"output_attentions": True}):
        outputs = [model(**GIVEN, **options) for model in (plain, watched)]
        assert torch.equal(*(output.logits for output in outputs))
    assert torch.equal(*(torch.stack(output.attentions) for output in outputs))


def test_a_config_may_ask_for_attentions_after_a_cache_was_made() -> None:
    _, watched = pair_of()
    watched.config.output_attentions = True
    assert watched(**GIVEN).attentions
    with pytest.raises(ConfigError, match="output_attentions=True: .*output_attentions=False"):
        watched(**GIVEN, past_key_values=KVCache(watched))


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    _, watched = pair_of()
    cache, inner = KVCache(watched, "quest", SMALL), watched.model.layers[2].mlp
    hook = inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watched(**GIVEN, past_key_values=cache)
    hook.remove()
    assert watched.config._attn_implementation == "eager"
    assert watched(**GIVEN, output_attentions=True).attentions


def test_threads_without_a_cache_get_the_model_s_own_attention_meanwhile() -> None:
    _, watched = pair_of()
    expected, wrong, stop = watched(**GIVEN).logits, [], threading.Event()

    def plainly() -> None:
        while not stop.is_set():
            wrong.append(not torch.equal(watched(**GIVEN).logits, expected))

    threads = [threading.Thread(target=plainly) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        generated(watched, GIVEN, KVCache(watched, "full", None))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong and not any(wrong)


def test_what_a_user_puts_before_a_model_s_inputs_stays() -> None:
    model, calls = random_model("llama"), []
    own = model.prepare_inputs_for_generation

    @functools.wraps(own)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.prepare_inputs_for_generation = counted
    for cache in (None, KVCache(model, "full", None)):
        calls.clear()
        generated(model, GIVEN, cache, max_new_tokens=3)
        assert len(calls) == 3


# -- what is done to models --------------------------------------------------------------------------------------------


def test_a_cache_given_by_its_place_and_to_the_part_without_the_head_is_read_into() -> None:
    plain, watched = pair_of()
    for ours, theirs in ((watched, plain), (watched.model, plain.model)):
        cache = KVCache(watched, "full", None)
        found = ours(IDS, MASK, None, cache)[0]
        assert cache.get_seq_length() == IDS.shape[1]
        assert (found - theirs(IDS, MASK)[0])[MASK.bool()].abs().max() < 1e-3
        with pytest.raises(ValueError, match="attention_mask"):
            ours(IDS[:, :1], MASK, None, cache)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("method", ["quest", "icecache", "expected_attention"])
def test_layers_quantised_as_they_run_generate_as_by_themselves(method: str) -> None:
    model = torch.ao.quantization.quantize_dynamic(random_model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    assert generated(model, inputs(1), KVCache(model, method, 500)) == generated(model, inputs(1))


@pytest.mark.parametrize("at_first", [False, True])
@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiled_layers_are_refused_by_name(part: str, at_first: bool) -> None:
    model = random_model("llama")
    cache = None if at_first else KVCache(model)
    inner = model.model if part == "model" else model.model.layers[1]
    inner.compile(backend="eager")
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM, its {type(inner).__name__}: compiled by torch.compile"):
        model(**GIVEN, past_key_values=cache or KVCache(model))


def test_gradient_checkpointing_is_refused_while_it_trains() -> None:
    model = random_model("llama")
    cache = KVCache(model, "full", None)
    model.gradient_checkpointing_enable()
    expected = generated(model, GIVEN)
    assert generated(model, GIVEN, cache) == expected
    model.train()
    cache.reset()
    for use in (lambda: KVCache(model), lambda: generated(model, GIVEN, cache)):
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM: .*gradient checkpointing.*model\.eval"):
            use()


def test_attention_that_leaves_weights_out_at_random_is_refused() -> None:
    model = random_model("llama", attention_dropout=0.5).train()
    cache = KVCache(model.eval(), "full", None)
    with pytest.raises(ConfigError, match=r"dropout=0\.5.*model\.eval"):
        model.train()(**GIVEN, past_key_values=cache)


class Wrapped(torch.nn.Module):
    """As peft wraps a model: a module around it that has its configs by name, and passes all on."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        super().__init__()
        self.inner = model
        self.peft_config = {"default": SimpleNamespace(peft_type=SimpleNamespace(value=kind))}

    def get_base_model(self) -> PreTrainedModel:
        return self.inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(super().__getattr__("inner"), name)


def test_a_model_that_peft_wraps_is_taken_as_it_is_and_a_prefix_refused() -> None:
    wrapped = Wrapped(random_model("llama"), "LORA")
    assert generated(wrapped, GIVEN, KVCache(wrapped, "full", None)) == generated(random_model("llama"), GIVEN)
    with pytest.raises(ConfigError, match="Wrapped: its adapter default is PREFIX_TUNING.*LoRA"):
        KVCache(Wrapped(random_model("llama"), "PREFIX_TUNING"))


def test_adapters_of_peft_itself() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(random_model("llama"), lora).eval()
    expected = generated(model, GIVEN)
    assert generated(model, GIVEN, KVCache(model, "full", None)) == expected
    with model.disable_adapter():
        assert generated(model, GIVEN, KVCache(model, "full", None)) == generated(random_model("llama"), GIVEN)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    with pytest.raises(ConfigError, match="PREFIX_TUNING"):
        KVCache(peft.get_peft_model(random_model("llama"), prefix))
