"""Architectures of transformers, tiny and random, each against transformers itself: equal, or refused by name.

Equal means: the same tokens, and logits within `CLOSE` of the largest, in float32: for a left-padded batch, a later
turn in the same cache, and a prompt in chunks, under methods that find room for everything.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from driver import numbers, slow
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from zoo import SIZES

from kvbench import KVCache
from kvbench.config import ConfigError

METHODS = ["full", "snapkv", "quest", "streaming_llm", "icecache"]
WHOLE = 500  # a budget of more than every text here
PROMPT, PADDING, NEW, TURN = 60, 17, 8, 12
CLOSE = 1e-4  # of the largest logit: sums over other orders, through layers that enlarge differences
PAD = 258
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}

# What each is made of, beside the sizes that its config knows; ...: as the config has it.
EQUAL: dict[str, dict[str, Any]] = {
    "afmoe": {**MOE, "num_dense_layers": 1, **WINDOWS},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": WINDOWS,
    "cwm": WINDOWS,
    "bert": {"is_decoder": True},
    "dots1": {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": {**WINDOWS, "sliding_window_pattern": 2},
    "flex_olmo": MOE,
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": None, "sliding_window": 24, "query_pre_attn_scalar": 100},
    "gemma4_text": {"head_dim": ..., "num_key_value_heads": ..., "num_kv_shared_layers": 0},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 100},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, **MOE, "first_k_dense_replace": 1},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": {},
    "gpt_oss": {
        **WINDOWS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granite": {"attention_multiplier": 0.1},
    "granitemoe": {"attention_multiplier": 0.1, "num_local_experts": 4},
    "granitemoeshared": {"attention_multiplier": 0.1, "num_local_experts": 4},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "lfm2": {},
    "llama": {},
    "ministral": WINDOWS,
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "modernbert-decoder": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "olmoe": MOE,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "phimoe": {"num_local_experts": 4},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": MOE,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {"attn_logit_softcapping": None, "sliding_window": 24, "query_pre_attn_scalar": 100},
}


# Where no key can be turned to another position, and with it none of `streaming_llm`: all positions are learned, layers
# with full attention have none, or a norm stands behind the rotation.
NOT_TURNED = {
    "afmoe": "without rotary positions",
    "bert": "without rotary positions",
    "biogpt": "without rotary positions",
    "cohere2": "without rotary positions",
    "exaone4": "without rotary positions",
    "gemma4_text": "does more to a key",
    "gpt2": "without rotary positions",
    "gpt_bigcode": "without rotary positions",
    "hunyuan_v1_dense": "does more to a key",
    "hunyuan_v1_moe": "does more to a key",
    "opt": "without rotary positions",
    "smollm3": "without rotary positions",
}

OWN = "computes attention in a way of its own"
OTHERS = "layers of other kinds"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("looks ahead", {}),
    "bloom": (OWN, {}),
    "deepseek_v3": ("latent attention", {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16}),
    "diffllama": ("attends other keys and values than it stores", {}),
    "doge": ("a mask of its own", {}),
    "falcon": (OWN, {"head_dim": ..., "num_key_value_heads": ...}),
    "gpt_neo": (OWN, {"num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]]}),
    "gptj": (OWN, {**GPT2, "rotary_dim": 8}),
    "hrm_text": ("stores its keys as layer", {}),
    "jetmoe": ("attends other keys and values than it stores", {}),
    "llama4_text": (OTHERS, {}),
    "mamba": ("layers other than attention", {}),
    "minimax": (OTHERS, {}),
    "mpt": (OWN, {}),
    "qwen3_5_text": (OTHERS, {}),
    "recurrent_gemma": ("layers other than attention", {}),
    "rwkv": (OWN, {}),
    "zamba": ("layers other than attention", {}),
}


def model_of(name: str, **changes: Any) -> PreTrainedModel:
    """A random model: matrices drawn at a deviation of 0.2, norms about 1."""
    known = AutoConfig.for_model(name)
    sizes = {key: value for key, value in SIZES.items() if key not in changes and hasattr(known, key)}
    given = {**sizes, "vocab_size": 260, **changes}
    config = AutoConfig.for_model(name, **{key: value for key, value in given.items() if value is not ...})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        except ValueError:  # transformers has no other of these
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def scored(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens, and the logits that chose the new ones [NEW, B, V]."""
    mask = torch.ones_like(ids)
    mask[1:, :PADDING] = 0
    given = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    out = model.generate(ids, **given, **options, output_logits=True, return_dict_in_generate=True)
    return out.sequences, torch.stack(out.logits)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE * float(theirs.abs().max().clamp(min=1)))


@pytest.fixture(scope="module")
def conversations() -> Any:
    """Of an architecture: the model, and each text with the logits of its new tokens, by transformers alone."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made.clear()
            model = model_of(name, **EQUAL[name])
            rows = [numbers(PROMPT, seed=1), [PAD] * PADDING + numbers(PROMPT - PADDING, seed=2)]
            prompt, turn = torch.tensor(rows), torch.tensor([numbers(TURN, seed=3)] * 2)
            first = scored(model, prompt)
            asked = torch.cat([first[0], turn], dim=1)
            made[name] = model, prompt, first, asked, scored(model, asked)
        return made[name]

    return get


QUICK = ["opt", "phi"]  # attention that scales its queries itself; rotary positions of a part of each key
EACH = [(name, method) for name in EQUAL for method in METHODS]


@pytest.mark.parametrize(
    ("name", "method"),
    [("opt", "full"), ("phi", "streaming_llm"), *slow(*(each for each in EACH if each[0] not in QUICK))],
)
def test_an_architecture_generates_what_transformers_generates_or_is_refused(
    conversations: Any, name: str, method: str
) -> None:
    model, prompt, first, asked, second = conversations(name)
    ours, budget = copy.deepcopy(model), None if method == "full" else WHOLE
    if method == "streaming_llm" and name in NOT_TURNED:
        with pytest.raises(ConfigError, match=f"{type(ours).__name__}: it .*{NOT_TURNED[name]}.*positions=original"):
            KVCache(ours, method, budget, dense_layers=())
        return
    cache = KVCache(ours, method, budget, dense_layers=())
    for ids, (tokens, logits) in ((prompt, first), (asked, second)):
        found = scored(ours, ids, past_key_values=cache)
        assert torch.equal(found[0], tokens)
        close(found[1], logits)
        assert (logits[0] - logits[-1]).abs().max() > 0.01 * logits.abs().max(), "steps that differ"
    chunked = KVCache(ours, method, budget, dense_layers=(), prompt_length=PROMPT)
    tokens, logits = scored(ours, prompt, past_key_values=chunked, prefill_chunk_size=25)
    assert torch.equal(tokens, first[0])
    close(logits, first[1])


@pytest.mark.parametrize("name", ["diffllama", *slow(*(name for name in REFUSED if name != "diffllama"))])
def test_an_architecture_that_would_run_wrong_is_refused_by_name(name: str) -> None:
    reason, changes = REFUSED[name]
    model = model_of(name, **changes)
    before = model.config._attn_implementation
    for method in ("full", "streaming_llm"):
        with pytest.raises(ConfigError, match=reason) as refusal:
            KVCache(model, method, dense_layers=())
        kind = "BertSelfAttention" if name == "bert" else type(model).__name__.removesuffix("ForCausalLM")
        assert kind in str(refusal.value) and "\n" not in str(refusal.value)
    assert model.config._attn_implementation == before, "a refused model stays as it was"
