"""The card of a model: what its config says of it, read once, and whether kvbench runs it.

`kvbench.models.hub` makes it before anything is loaded, `kvbench.backends.hf.layers` of a loaded
model; nobody else reads a transformers config. What each layer is, a config object is asked, with
transformers imported; of a `config.json` by itself no torch is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvbench.config import ConfigError, show
from kvbench.models.rope import FULL, SLIDING, Rope, context_length, refuse_wrong_rope, ropes

# What a config calls the tokens that a layer of this kind attends.
WINDOWS = {
    SLIDING: "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
WITH_ALL_KEYS = {FULL, "hybrid"}  # kinds of layers that attend everything
GATED = {"llama", "mistral", "qwen2", "qwen3"}  # whether or not a config says its activation
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
PARAMETERS_OF = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

# Sizes in a transformers config that are whole numbers, 1 or more, where they are set.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# And of its windows, where it has any; with the least they may be.
WINDOW_SIZES = {"sliding_window": 1, "max_window_layers": 0}


@dataclass(frozen=True)
class ModelCard:
    """What a model's config says, as far as it is known; a size of 0 is not known.

    Attributes
    ----------
    layers
        how many there are.
    layer_kinds
        what each layer's cache is, in transformers' words: `FULL`, `SLIDING` or another; (): not
        known, as of a `config.json` that leaves it to the model's class.
    windows
        layers without full attention: their true indices, and how many of the most recent tokens
        each attends; 0: none, as where it holds a state.
    query_heads, kv_heads, head_dim, latent_dim
        of each layer's attention, see `kvbench.method.Shape`.
    hidden_size, vocabulary
        widths of the hidden states and of the logits.
    mlp_width
        widths of the matrices of an MLP, added up: three of a gated one, else two. Of the narrowest
        MLP, as some layers may be of experts alone.
    parameters
        how many there are at least, norms and biases left out.
    expert_share
        of a layer's experts that a token has; 1 where there are none.
    padding_id
        the token of padding; None: there is none.
    context_length
        tokens that the positions reach, see `kvbench.models.rope`; None: no limit is known.
    original_length
        `original_max_position_embeddings` of the model itself, where some classes compute all keys
        again.
    rope
        rotary positions by kind of layer, see `kvbench.models.rope.ropes`.
    refusal
        why kvbench does not run it; "": it does.
    """

    layers: int
    layer_kinds: tuple[str, ...]
    windows: Mapping[int, int]
    query_heads: int
    kv_heads: int
    head_dim: int
    latent_dim: int
    hidden_size: int
    vocabulary: int
    mlp_width: int
    parameters: int
    expert_share: float
    padding_id: int | None
    context_length: int | None
    original_length: int | None
    rope: Mapping[str, Rope]
    refusal: str

    @classmethod
    def of(cls, whole_config: Mapping[str, Any], where: str = "") -> ModelCard:
        """The card of a transformers config as a mapping, from `config.json` or `to_dict()`.

        Parameters
        ----------
        whole_config
            as far as it is known; {}: nothing is.
        where
            what stands before a key in a message.

        Raises
        ------
        ConfigError
            rope parameters that no model can have.
        """
        config = _text_config(whole_config)
        refuse_wrong_rope(config, where)
        kinds = _layer_kinds(config)
        return cls(
            layers=len(kinds) or _size(config, "num_hidden_layers"),
            layer_kinds=kinds,
            windows=_windows(config, kinds),
            query_heads=_size(config, "num_attention_heads"),
            kv_heads=_kv_heads(config),
            head_dim=_head_dim(config),
            latent_dim=_latent_dim(config),
            hidden_size=_size(config, "hidden_size"),
            vocabulary=_size(config, "vocab_size"),
            mlp_width=_mlp_width(config),
            parameters=_parameters(config),
            expert_share=_expert_share(config),
            padding_id=config.get("pad_token_id"),
            context_length=context_length(config),
            original_length=config.get("original_max_position_embeddings"),
            rope=ropes(config),
            refusal=_refusal(whole_config, config, kinds),
        )

    @classmethod
    def of_class(cls, whole_config: Mapping[str, Any], where: str = "") -> ModelCard:
        """The card of the config object that transformers makes of a mapping, which knows more.

        Imports transformers. A mapping that it makes none of says what it says.

        Parameters
        ----------
        whole_config, where
            as of `of`.

        Raises
        ------
        ConfigError
            as `of`.
        """
        from transformers import AutoConfig

        try:
            config = AutoConfig.for_model(**copy.deepcopy(dict(whole_config)))
        except Exception:  # loading it says why
            return cls.of(whole_config, where)
        return cls.of_config(config, where)

    @classmethod
    def of_config(cls, config: Any, where: str = "") -> ModelCard:
        """The card of a config object of transformers.

        Parameters
        ----------
        config
            a `PreTrainedConfig`, which knows sizes by other names than `to_dict()` has.
        where
            as of `of`.

        Raises
        ------
        ConfigError
            as `of`.
        """
        from transformers.cache_utils import get_layer_types_and_kwargs

        values = config.to_dict()
        # of several parts, as an encoder and a decoder, none is the model
        part = config if values.get("is_encoder_decoder") else config.get_text_config(decoder=True)
        renamed = _attributes(part, (*SIZES, *WINDOWS.values()))
        kinds = {"layer_types": get_layer_types_and_kwargs(part)[0]}
        return cls.of({**values, "text_config": {**part.to_dict(), **renamed, **kinds}}, where)

    def entries(self, tokens: int) -> int:
        """Keys of a KV head that all layers hold of a text."""
        in_windows = [min(tokens, max(size - 1, 0)) for size in self.windows.values()]
        return sum(in_windows) + (self.layers - len(in_windows)) * tokens

    def refuse_unsupported(self, name: str) -> None:
        """Refuse a model that kvbench would compute wrong, or that leaves methods nothing to do.

        Parameters
        ----------
        name
            what the message calls it.

        Raises
        ------
        ConfigError
            names the model and the key that says so.
        """
        if self.refusal:
            raise ConfigError(f"{name}: {self.refusal}")


def _text_config(whole_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that may hold others beside it."""
    part = whole_config.get("text_config")
    return part if isinstance(part, Mapping) else whole_config


def _attributes(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those that a config object has, and has in common for all layers."""
    values = {}
    for name in names:
        with suppress(AttributeError, RuntimeError):  # absent, or another in some layers
            values[name] = getattr(config, name)
    return values


def _size(config: Mapping[str, Any], key: str) -> int:
    """A size of a config; 0: it has none, or not the same in every layer."""
    size = config.get(key)
    return size if type(size) is int else 0


def _latent_dim(config: Mapping[str, Any]) -> int:
    """Width of the latents that a layer stores, beside the rotary key of all heads; 0: none."""
    return _size(config, "kv_lora_rank")


def _head_dim(config: Mapping[str, Any]) -> int:
    if latent_dim := _latent_dim(config):
        return latent_dim + _size(config, "qk_rope_head_dim")
    heads = _size(config, "num_attention_heads")
    return _size(config, "head_dim") or (_size(config, "hidden_size") // heads if heads else 0)


def _kv_heads(config: Mapping[str, Any]) -> int:
    if _latent_dim(config):
        return 1
    return _size(config, "num_key_value_heads") or _size(config, "num_attention_heads")


def _mlp_width(config: Mapping[str, Any]) -> int:
    kind = str(config.get("model_type"))
    gated = config.get("hidden_act") == "silu" or kind in GATED or kind.startswith("gemma")
    sizes = [_size(config, key) for key in ("intermediate_size", "moe_intermediate_size")]
    return (3 if gated else 2) * min(filter(None, sizes), default=0)


def _parameters(config: Mapping[str, Any]) -> int:
    if not all(_size(config, key) for key in PARAMETERS_OF):
        return 0
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    layer = _attention_parameters(config) + width * _mlp_width(config)
    embeddings = 2 if config.get("tie_word_embeddings") is False else 1
    return int(layers * layer + width * embeddings * config["vocab_size"])


def _attention_parameters(config: Mapping[str, Any]) -> int:
    """Of queries and the output, each H x Hq D, and of keys and values, each H x Hkv D; of latent
    attention those of the output, of latents, and of keys and values made of these.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = _head_dim(config)
    if latent_dim := _latent_dim(config):
        value_dim = _size(config, "v_head_dim")
        made = heads * (_size(config, "qk_nope_head_dim") + value_dim)
        return int(width * (heads * value_dim + head_dim) + latent_dim * made)
    return int(2 * width * head_dim * (heads + _kv_heads(config)))


def _expert_share(config: Mapping[str, Any]) -> float:
    experts = next(filter(None, (_size(config, key) for key in EXPERTS)), 0)
    per_token = _size(config, "num_experts_per_tok")
    return min(1.0, per_token / experts) if experts and per_token else 1.0


def _layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What each layer is, as far as a config says it.

    Windows in all layers that no position of the model reaches past are none.
    """
    kinds = config.get("layer_types")
    if not isinstance(kinds, list | tuple):
        return ()
    size = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if size is None or (set(kinds) == {SLIDING} and _is_out_of_reach(config)):
        kinds = [FULL if kind == SLIDING else kind for kind in kinds]
    return tuple(kinds)


def _is_out_of_reach(config: Mapping[str, Any]) -> bool:
    limit = context_length(config)
    return limit is not None and _size(config, "sliding_window") >= limit


def _windows(config: Mapping[str, Any], kinds: tuple[str, ...]) -> dict[int, int]:
    others = {layer: kind for layer, kind in enumerate(kinds) if kind not in WITH_ALL_KEYS}
    return {layer: _size(config, WINDOWS.get(kind, "")) for layer, kind in others.items()}


def _refusal(
    whole_config: Mapping[str, Any], config: Mapping[str, Any], kinds: tuple[str, ...]
) -> str:
    """Why kvbench does not run a model; "" where it does."""
    if whole_config.get("is_encoder_decoder"):
        kind = whole_config.get("model_type", "this architecture")
        return f"{kind} has an encoder and a decoder; kvbench runs decoder-only models"
    if (reason := next(_unsupported(config, kinds), None)) is None:
        return ""
    return (
        f"{config.get('model_type', 'this architecture')} has {reason}; kvbench runs models with"
        " full attention in some layers or in all"
    )


def _unsupported(config: Mapping[str, Any], kinds: tuple[str, ...]) -> Iterator[str]:
    if "indexed_attention" in kinds or config.get("index_topk"):
        yield "layers that attend what a trained indexer chooses (indexed_attention)"
    if kinds and not WITH_ALL_KEYS & set(kinds):
        yield f"no layer with full attention (layer_types: {', '.join(sorted({*kinds}))})"
    for key, value in {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}.items():
        if config.get(key) in value:
            yield f"bidirectional attention ({key}={show(config[key])})"


def refuse_impossible(whole_config: Mapping[str, Any], where: str) -> None:
    """Refuse a shape that no model can have: heads that do not share out, or no size at all.

    Parameters
    ----------
    whole_config
        a transformers config as a mapping, as far as it is known.
    where
        what stands before a key in the message, such as "model.config.".

    Raises
    ------
    ConfigError
        names the key, its value and what would be right.
    """
    config = _text_config(whole_config)
    refuse_wrong_rope(config, where)
    for key in (*SIZES, "max_position_embeddings"):
        may_be_null = key not in config or key in ("num_key_value_heads", "head_dim")
        _refuse_less_than(1, config, key, where, may_be_null)
    for key, least in WINDOW_SIZES.items():
        _refuse_less_than(least, config, key, where)
    types = config.get("layer_types")
    if types is not None and not (
        isinstance(types, list | tuple) and all(isinstance(kind, str) for kind in types)
    ):
        raise ConfigError(
            f"{where}layer_types={show(types)}: expected a list of words, such as full_attention"
        )
    _refuse_uneven(config, where)


def _refuse_less_than(
    least: int, config: Mapping[str, Any], key: str, where: str, may_be_null: bool = True
) -> None:
    size = config.get(key)
    if not (size is None and may_be_null) and (type(size) is not int or size < least):
        raise ConfigError(f"{where}{key}={show(size)}: expected a whole number, {least} or more")


def _refuse_uneven(config: Mapping[str, Any], where: str) -> None:
    """Heads that do not share out evenly."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads, head_dim = config.get("num_key_value_heads"), _head_dim(config)
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}num_key_value_heads={kv_heads}: query heads share KV heads evenly; expected a"
            f" divisor of num_attention_heads={heads}"
        )
    apart = config.get("head_dim") is None and not _latent_dim(config)
    if apart and width and heads and width % heads:
        raise ConfigError(
            f"{where}hidden_size={width}: expected a multiple of num_attention_heads={heads},"
            " or a head_dim"
        )
    if head_dim and head_dim % 2:
        raise ConfigError(
            f"{where}head_dim={head_dim}: rotary positions turn pairs; expected an even number"
        )
