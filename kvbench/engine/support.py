"""Which models kvbench runs, by their transformers config alone: full attention in every layer. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.config import ConfigError, show

# Keys of a transformers config that only models with other layers than attention have.
OTHER_LAYERS = re.compile(r"mamba_|ssm_|attn_layer_|layers_block_type$|block_types$|state_size$")


def refuse_unsupported(model_config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose attention kvbench would compute wrong: sliding-window, soft-capped, latent, hybrid.

    Args:
        model_config: a transformers config as a mapping, from `config.json` or `to_dict()`.
        name: what the message calls the model.

    Raises:
        ConfigError: names the model and the key that says so.
    """
    config = text_config(model_config)
    if model_config.get("is_encoder_decoder"):
        kind = model_config.get("model_type", "this architecture")
        raise ConfigError(f"{name}: {kind} has an encoder and a decoder; kvbench runs decoder-only models")
    reason = next(_unsupported(config), None)
    if reason is not None:
        kind = config.get("model_type", "this architecture")
        raise ConfigError(f"{name}: {kind} has {reason}; kvbench runs models with full attention in every layer")


# Sizes in a transformers config that are whole numbers, 1 or more, where they are set.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def refuse_impossible(model_config: Mapping[str, Any], where: str) -> None:
    """Refuse a shape that no model can have: heads that do not share out, or no size at all.

    Args:
        model_config: a transformers config as a mapping, as far as it is known.
        where: what stands before a key in the message, such as "model.config.".

    Raises:
        ConfigError: names the key, its value and what would be right.
    """
    config = text_config(model_config)
    for key in SIZES:
        size = config.get(key)
        may_be_null = key not in config or key in ("num_key_value_heads", "head_dim")
        if not (size is None and may_be_null) and (type(size) is not int or size < 1):
            raise ConfigError(f"{where}{key}={show(size)}: expected a whole number, 1 or more")
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}num_key_value_heads={kv_heads}: query heads share KV heads evenly; expected a divisor of "
            f"num_attention_heads={heads}"
        )
    if head_dim is None and width and heads:
        if width % heads:
            raise ConfigError(
                f"{where}hidden_size={width}: expected a multiple of num_attention_heads={heads}, or a head_dim"
            )
        head_dim = width // heads
    if head_dim and head_dim % 2:
        raise ConfigError(f"{where}head_dim={head_dim}: rotary positions turn pairs; expected an even number")


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if others:
        yield f"layers of other kinds (layer_types: {', '.join(others)})"
    # layer_types says which layers use the window; without it the window holds for all, or as from max_window_layers.
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    first, layers = config.get("max_window_layers") or 0, config.get("num_hidden_layers") or math.inf
    if window is not None and not config.get("layer_types") and first < layers:
        yield f"sliding-window attention (sliding_window={window})"
    if config.get("attn_logit_softcapping") is not None:
        yield f"soft-capped attention (attn_logit_softcapping={config['attn_logit_softcapping']})"
    if config.get("attention_chunk_size") is not None:
        yield f"chunked attention (attention_chunk_size={config['attention_chunk_size']})"
    if config.get("kv_lora_rank") is not None:
        yield f"latent attention (kv_lora_rank={config['kv_lora_rank']})"
    for key, value in config.items():
        if value is not None and OTHER_LAYERS.match(key):
            yield f"layers other than attention ({key})"


def text_config(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that may hold others beside it."""
    part = model_config.get("text_config")
    return part if isinstance(part, Mapping) else model_config


def window(model_config: Mapping[str, Any]) -> int | None:
    """Tokens that the positions of a model reach, by its transformers config; None where that does not say."""
    config = text_config(model_config)
    limit = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if limit is None or rope.get("rope_type", rope.get("type")) != "yarn":
        return limit
    # YaRN as its authors write it leaves max_position_embeddings at the length before stretching.
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int((rope.get("factor") or 1) * original))
