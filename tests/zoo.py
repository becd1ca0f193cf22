"""Random models of transformers' classes, small enough that each test can have its own, and what they generate."""

from __future__ import annotations

from typing import Any

import torch
from driver import numbers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 32
# What comes first and last has a window: nothing may lean on layer 0, nor on the last one.
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 259,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # attention far from uniform
    "pad_token_id": 258,
    "bos_token_id": 256,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # tied, random weights repeat the last token
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "gemma": {},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": MIXED, "query_pre_attn_scalar": 16},
    "gpt_oss": {
        "layer_types": MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen2-window": {"use_sliding_window": True, "max_window_layers": 2},
    "gemma2": {"attn_logit_softcapping": None},
    "olmo3": {},
    "cohere2": {"layer_types": MIXED},
    "exaone4": {"layer_types": MIXED},
}
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 2047},  # beyond every position of the model: none
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"num_key_value_heads": None},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
}
# Layers 1 and 2 store for the last three, of which the first has a window.
SHARING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "full", "full")],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 260,
}
SHARED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**SHARING, "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5] * 6},
    "gemma4_text": {**SHARING, "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2},
}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # the rotary part, as these configs say it
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
MLA_MOE = {
    **MLA,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**MLA_MOE, "n_shared_experts": 1},
    "deepseek_v3": MLA_MOE,
    "glm4_moe_lite": MLA_MOE,
    "minicpm3": MLA,
}
FAMILIES = {
    **PLAIN,
    **OTHERS,
    **LATENT,
    **{name: {"sliding_window": WINDOW, **changes} for name, changes in WINDOWED.items()},
}
NEW = 8
LENGTH = 120
PAD = 258
OFFSET = 37  # of the shorter of two prompts


def config_of(family: str, **changes: Any) -> Any:
    shared = {"sliding_window": WINDOW, **SHARED[family]} if family in SHARED else {}
    return AutoConfig.for_model(family.split("-")[0], **{**SIZES, **FAMILIES.get(family, shared), **changes})


def random_model(family: str, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    config = config_of(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = "eager" if family in ("gpt_oss", "gemma2") else attention  # transformers has no other of these
        model = AutoModelForCausalLM.from_config(config, attn_implementation=own).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # else near 0, where few would miss them
                torch.nn.init.normal_(parameter, mean=6.0)
    return model.requires_grad_(False)


def inputs(batch: int) -> dict[str, torch.Tensor]:
    """One prompt; or two, the second left-padded."""
    rows = [numbers(LENGTH, seed=6)]
    if batch == 2:
        rows.append([PAD] * OFFSET + numbers(LENGTH - OFFSET, seed=7))
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def generated(model: PreTrainedModel, given: dict[str, torch.Tensor], cache: Any = None, **options: Any) -> list:
    """The new tokens of each row."""
    if cache is not None:
        options["past_key_values"] = cache
    out = model.generate(**given, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return out[:, given["input_ids"].shape[1] :].tolist()
