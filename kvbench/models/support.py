"""Which models kvbench runs, by their transformers config alone: full attention in some layers or
in all. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.config import ConfigError, show

# Keys of a transformers config that only models with other layers than attention have.
OTHER_LAYERS = re.compile(r"mamba_|ssm_|attn_layer_|layers_block_type$|block_types$|state_size$")
# Every which layer has full attention, between layers with a window, where a config says no more
# than the model's type.
FULL_EVERY = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}


def refuse_unsupported(model_config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose attention kvbench would compute wrong, or that leaves a method nothing
    to change.

    Parameters
    ----------
    model_config
        a transformers config as a mapping, from `config.json` or `to_dict()`.
    name
        what the message calls the model.

    Raises
    ------
    ConfigError
        names the model and the key that says so.
    """
    refuse_wrong_rope(model_config, f"{name}: ")
    config = text_config(model_config)
    if model_config.get("is_encoder_decoder"):
        kind = model_config.get("model_type", "this architecture")
        raise ConfigError(
            f"{name}: {kind} has an encoder and a decoder; kvbench runs decoder-only models"
        )
    reason = next(_unsupported(config), None)
    if reason is not None:
        kind = config.get("model_type", "this architecture")
        raise ConfigError(
            f"{name}: {kind} has {reason}; kvbench runs models with full attention in some layers"
            " or in all"
        )


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
# And of its windows, where it has any; with the least they may be.
WINDOW_SIZES = {"sliding_window": 1, "max_window_layers": 0}


def refuse_impossible(model_config: Mapping[str, Any], where: str) -> None:
    """Refuse a shape that no model can have: heads that do not share out, or no size at all.

    Parameters
    ----------
    model_config
        a transformers config as a mapping, as far as it is known.
    where
        what stands before a key in the message, such as "model.config.".

    Raises
    ------
    ConfigError
        names the key, its value and what would be right.
    """
    config = text_config(model_config)
    for key in SIZES:
        size = config.get(key)
        may_be_null = key not in config or key in ("num_key_value_heads", "head_dim")
        if not (size is None and may_be_null) and (type(size) is not int or size < 1):
            raise ConfigError(f"{where}{key}={show(size)}: expected a whole number, 1 or more")
    for key, least in WINDOW_SIZES.items():
        size = config.get(key)
        if size is not None and (type(size) is not int or size < least):
            raise ConfigError(
                f"{where}{key}={show(size)}: expected a whole number, {least} or more"
            )
    types = config.get("layer_types")
    if types is not None and not (
        isinstance(types, list | tuple) and all(isinstance(kind, str) for kind in types)
    ):
        raise ConfigError(
            f"{where}layer_types={show(types)}: expected a list of words, such as full_attention"
        )
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}num_key_value_heads={kv_heads}: query heads share KV heads evenly; expected a"
            f" divisor of num_attention_heads={heads}"
        )
    if head_dim is None and width and heads:
        if width % heads:
            raise ConfigError(
                f"{where}hidden_size={width}: expected a multiple of num_attention_heads={heads},"
                " or a head_dim"
            )
        head_dim = width // heads
    if head_dim and head_dim % 2:
        raise ConfigError(
            f"{where}head_dim={head_dim}: rotary positions turn pairs; expected an even number"
        )


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if others:
        yield f"layers of other kinds (layer_types: {', '.join(others)})"
    elif (windowed := windows(config)) and len(windowed) == config["num_hidden_layers"]:
        yield f"a sliding window in every layer (sliding_window={config['sliding_window']})"
    if config.get("attn_logit_softcapping") is not None:
        yield f"soft-capped attention (attn_logit_softcapping={config['attn_logit_softcapping']})"
    if config.get("attention_chunk_size") is not None:
        yield f"chunked attention (attention_chunk_size={config['attention_chunk_size']})"
    if config.get("kv_lora_rank") is not None:
        yield f"latent attention (kv_lora_rank={config['kv_lora_rank']})"
    if config.get("num_kv_shared_layers"):
        yield (
            "layers without keys and values of their own"
            f" (num_kv_shared_layers={config['num_kv_shared_layers']})"
        )
    for key, value in {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}.items():
        if config.get(key) in value:
            yield f"bidirectional attention ({key}={show(config[key])})"
    for key, value in config.items():
        if value is not None and OTHER_LAYERS.match(key):
            yield f"layers other than attention ({key})"


def windows(model_config: Mapping[str, Any]) -> dict[int, int]:
    """Layers that attend the most recent tokens alone: their true indices, and how many tokens.

    A window in every layer that no position of the model reaches past is none.
    """
    config = text_config(model_config)
    size = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layers = range(config.get("num_hidden_layers") or 0)
    if size is None:
        return {}
    if types := config.get("layer_types"):
        windowed = [
            layer for layer, kind in zip(layers, types, strict=False) if kind == "sliding_attention"
        ]
    elif every := _full_every(config):
        windowed = [layer for layer in layers if (layer + 1) % every]
    else:
        windowed = list(layers[config.get("max_window_layers") or 0 :])
    limit = window(config)
    if len(windowed) == len(layers) and limit is not None and size >= limit:
        return {}
    return dict.fromkeys(windowed, size)


def _full_every(config: Mapping[str, Any]) -> int | None:
    every = config.get("sliding_window_pattern")
    return every if type(every) is int else FULL_EVERY.get(config.get("model_type", ""))


def text_config(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that may hold others beside it."""
    part = model_config.get("text_config")
    return part if isinstance(part, Mapping) else model_config


# Kinds of rope scaling whose `max_position_embeddings` names the positions before it, unless
# something says otherwise.
STRETCHING = ("linear", "dynamic", "yarn")


def window(model_config: Mapping[str, Any]) -> int | None:
    """Tokens that the positions of a model reach, by its transformers config; None where that does
    not say.

    `max_position_embeddings` is what they reach under llama3 and longrope scaling. Under linear,
    dynamic and YaRN scaling it is what they reached before, as transformers documents
    `rope_scaling`, and `factor` times that is the window (Vicuna 16k, LongChat), but for configs
    that say more: a length before scaling of its own in the rope parameters (YaRN),
    `max_sequence_length` beside a linear or dynamic factor, which is the window itself, and
    parameters for each kind of layer (Gemma 3), whose limit is scaled already. A config that has a
    scaled limit and says so nowhere (DeepSeek Coder: linear 4, 16384) looks as one with an unscaled
    one, and is taken as such.

    Raises
    ------
    ConfigError
        as `refuse_wrong_rope`.
    """
    refuse_wrong_rope(model_config)
    config = text_config(model_config)
    # the latter: GPT-2
    limit: int | None = config.get("max_position_embeddings", config.get("n_positions"))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if limit is None or type(limit) is not int:  # what is no number, `refuse_impossible` refuses
        return None
    by_layer = any(isinstance(value, Mapping) for value in rope.values())
    parts = [value for value in rope.values() if isinstance(value, Mapping)] if by_layer else [rope]
    scaled_already = by_layer or str(config.get("model_type")).startswith("gemma3")
    return max(
        _reach(part, limit, scaled_already, config.get("max_sequence_length")) for part in parts
    )


def _reach(rope: Mapping[str, Any], limit: int, scaled_already: bool, stated: Any) -> int:
    """Positions that layers with these rope parameters reach, of a model with this limit and
    `max_sequence_length`.
    """
    kind = _kind(rope)
    if kind not in STRETCHING:
        return limit
    if (original := rope.get("original_max_position_embeddings")) is None:
        if scaled_already:
            return limit
        if kind != "yarn" and type(stated) is int and stated >= limit:
            return stated
        original = limit
    return max(limit, int((rope.get("factor") or 1) * original))


# Rope parameters that are 1 or more, those above 0, and longrope's lists of these.
ROPE_AT_LEAST_1 = ("factor", "original_max_position_embeddings")
ROPE_ABOVE_ZERO = (
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
ROPE_LISTS = ("short_factor", "long_factor")


def _kind(rope: Mapping[str, Any]) -> Any:
    """The kind of scaling that rope parameters ask for; `type` is the older name, which the newer
    stands above.
    """
    return rope.get("rope_type", rope.get("type")) or "default"


def refuse_wrong_rope(model_config: Mapping[str, Any], where: str = "") -> None:
    """Refuse rope parameters of a type or size that none can have, with which transformers may go
    on all the same.

    Parameters
    ----------
    model_config
        a transformers config as a mapping, as far as it is known.
    where
        what stands before a key in the message, such as "model.config.".

    Raises
    ------
    ConfigError
        names the key, its value and what would be right.
    """
    config = text_config(model_config)
    _refuse_wrong_numbers(config, where)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ConfigError(
                f"{where}{name}={show(rope)}: expected a mapping, such as {{rope_type:"
                " linear,factor: 4}"
            )
        by_layer = {
            f"{where}{name}.{key}.": part for key, part in rope.items() if isinstance(part, Mapping)
        }
        for prefix, part in (by_layer or {f"{where}{name}.": rope}).items():
            _refuse_wrong_numbers(part, prefix)
            kind = _kind(part)
            if not isinstance(kind, str):
                raise ConfigError(
                    f"{prefix}rope_type={show(kind)}: expected a word, such as linear"
                )
            if kind in ("linear", "dynamic", "llama3") and part.get("factor") is None:
                raise ConfigError(
                    f"{prefix}factor=null: {kind} scaling needs it; expected a number, 1 or more"
                )


def _refuse_wrong_numbers(rope: Mapping[str, Any], prefix: str) -> None:
    for key in ROPE_AT_LEAST_1 + ROPE_ABOVE_ZERO + ROPE_LISTS:
        value: Any = rope.get(key)
        whole = key == "original_max_position_embeddings"
        if key in ROPE_LISTS:
            right = isinstance(value, list | tuple) and all(map(_is_above_zero, value))
            expected = "a list of numbers above 0"
        elif key in ROPE_ABOVE_ZERO:
            right, expected = _is_above_zero(value), "a number above 0"
        else:
            right = _is_above_zero(value) and value >= 1 and (type(value) is int or not whole)
            expected = f"a {'whole ' if whole else ''}number, 1 or more"
        if value is not None and not right:
            raise ConfigError(f"{prefix}{key}={show(value)}: expected {expected}")


def _is_above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
