"""Which models kvbench runs, by their transformers config alone: full attention in every layer. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.config import (
    ConfigError,
)

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
    reason = next(_unsupported(config), None)
    if reason is not None:
        kind = config.get("model_type", "this architecture")
        raise ConfigError(f"{name}: {kind} has {reason}; kvbench runs models with full attention in every layer")


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if others:
        yield f"layers of other kinds (layer_types: {', '.join(others)})"
    # layer_types says which layers use the window; without it the window holds for all, or as from max_window_layers.
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    first, layers = config.get("max_window_layers") or 0, config.get("num_hidden_layers", math.inf)
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
