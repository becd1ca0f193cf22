"""Rotary positions of a transformers config: how many tokens they reach, and what none can have.

`kvbench.models.card` reads a model's with it, `kvbench.models.gguf` those of a file. Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvbench.config import ConfigError, show

FULL = "full_attention"  # as transformers calls these layers
SLIDING = "sliding_attention"

# Kinds of scaling whose `max_position_embeddings` names the positions before it, unless something
# says otherwise.
STRETCHING = ("linear", "dynamic", "yarn")

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


class Rope(NamedTuple):
    """Rotary positions of a model, or of one kind of its layers.

    Attributes
    ----------
    kind
        of scaling, as transformers calls it: "default", "linear", "dynamic", "yarn", "longrope",
        "llama3".
    base
        of the frequencies; None: the config does not say.
    factor
        by which positions are stretched.
    original
        positions before scaling; None: the config does not say.
    share
        of a head's channels that are turned.
    """

    kind: str
    base: float | None
    factor: float
    original: int | None
    share: float

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Rope:
        """Those of transformers' rope parameters."""
        return cls(
            kind=_kind(parameters),
            base=parameters.get("rope_theta"),
            factor=parameters.get("factor") or 1,
            original=parameters.get("original_max_position_embeddings"),
            share=parameters.get("partial_rotary_factor") or 1,
        )

    def reach(self, limit: int, scaled_already: bool, stated: Any) -> int:
        """Tokens that these positions reach in a model with this `max_position_embeddings`.

        Parameters
        ----------
        limit
            `max_position_embeddings`.
        scaled_already
            it is known to be what they reach after scaling.
        stated
            `max_sequence_length` of the config.
        """
        if self.kind not in STRETCHING or (self.original is None and scaled_already):
            return limit
        says_itself = self.original is None and self.kind != "yarn" and type(stated) is int
        if says_itself and stated >= limit:
            return int(stated)
        return max(limit, int(self.factor * (self.original or limit)))


def ropes(config: Mapping[str, Any]) -> dict[str, Rope]:
    """The rotary positions of a language model's config, by kind of layer.

    Those under `FULL` hold for every kind that has none of its own; {}: the config says nothing of
    rotary positions.
    """
    common = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    parts = _by_layer(parameters) or ({FULL: parameters} if parameters or common else {})
    return {kind: Rope.of({**common, **part}) for kind, part in parts.items()}


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens that the positions of a language model reach; None: its config does not say.

    `max_position_embeddings` is what they reach under llama3 and longrope scaling. Under linear,
    dynamic and YaRN scaling it is what they reached before, as transformers documents
    `rope_scaling`, and `factor` times that is the context length (Vicuna 16k, LongChat), but for
    configs that say more: a length before scaling of its own in the rope parameters (YaRN),
    `max_sequence_length` beside a linear or dynamic factor, which is the context length itself, and
    parameters for each kind of layer (Gemma 3), whose limit is scaled already. A config that has a
    scaled limit and says so nowhere (DeepSeek Coder: linear 4, 16384) looks as one with an unscaled
    one, and is taken as such.
    """
    # the latter: GPT-2
    limit: int | None = config.get("max_position_embeddings", config.get("n_positions"))
    if type(limit) is not int:
        return None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled_already = bool(_by_layer(rope)) or str(config.get("model_type")).startswith("gemma3")
    stated = config.get("max_sequence_length")
    reached = [part.reach(limit, scaled_already, stated) for part in ropes(config).values()]
    return max(reached, default=limit)


def refuse_wrong_rope(config: Mapping[str, Any], where: str = "") -> None:
    """Refuse rope parameters that none can have, with which transformers may go on.

    Parameters
    ----------
    config
        a language model's transformers config as a mapping, as far as it is known.
    where
        what stands before a key in the message, such as "model.config.".

    Raises
    ------
    ConfigError
        names the key, its value and what would be right.
    """
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
        by_layer = {f"{where}{name}.{kind}.": part for kind, part in _by_layer(rope).items()}
        for prefix, part in (by_layer or {f"{where}{name}.": rope}).items():
            _refuse_wrong_part(part, prefix)


def _refuse_wrong_part(rope: Mapping[str, Any], prefix: str) -> None:
    """The same of the parameters of one kind of layers."""
    _refuse_wrong_numbers(rope, prefix)
    kind = _kind(rope)
    if not isinstance(kind, str):
        raise ConfigError(f"{prefix}rope_type={show(kind)}: expected a word, such as linear")
    if kind in ("linear", "dynamic", "llama3") and rope.get("factor") is None:
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


def _by_layer(rope: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rope parameters of each kind of layers; {}: the same for all."""
    return {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}


def _kind(rope: Mapping[str, Any]) -> Any:
    """The kind of scaling; `type` is the older name, which the newer stands above."""
    return rope.get("rope_type", rope.get("type")) or "default"


def _is_above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
