"""What a GGUF file says of its model, beside what transformers makes of it: honoured, or refused by
name. No torch.

transformers reads a file's shape and weights and passes over the rest without a word: scaled rotary
positions, windows, experts. `kvbench.backends.hf.loading` reads such a file, and asks here what has
to be added, and what cannot be had.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.config import ConfigError, first_line, show
from kvbench.models.support import refuse_wrong_rope, windows

# Struct formats of GGUF's numbers by their type's id; besides there are strings and arrays.
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY, FLOAT32 = 8, 9, 0
VERSIONS = (2, 3)  # the first counted in 32 bits; no file has it any more

# Keys that say nothing of what a model computes: what it is called, its texts and tokens (the
# tokenizer's own reader takes these), and of the model itself how the file came to be.
HARMLESS = ("general.", "tokenizer.", "quantize.", "split.")
HARMLESS_OF_MODEL = (
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "decoder_start_token_id",
    "pooling_type",
)
# Keys that are read elsewhere here.
SCALING = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
)
WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern")
BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}

# Attributes of a transformers config that hold a key's value; of several names the first that the
# config has.
CONFIG_ATTRIBUTES = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}
# The value of a key with which a model does without, for those that have no such thing.
WITHOUT = {
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"), 0
    ),
    **dict.fromkeys(
        ("attention.max_alibi_bias", "attention.shared_kv_layers", "nextn_predict_layers"), 0
    ),
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"), 0
    ),
    **dict.fromkeys(
        ("logit_scale", "embedding_scale", "residual_scale", "attention.output_scale"), 1
    ),
    **dict.fromkeys(
        (
            "rope.scaling.attn_factor",
            "rope.scaling.yarn_attn_factor",
            "rope.scaling.yarn_ext_factor",
        ),
        1,
    ),
    "rope.scaling.yarn_log_multiplier": 0,
    "attention.causal": True,
    "expert_weights_norm": False,
}
# What of Llama 3's scaling all published models have in common; a file has its factors alone, one
# of each rotary pair.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FACTORS = "rope_freqs.weight"
INSTEAD = "expected the model as a folder of transformers, which says all of it"
# older files' rotary frequencies, which follow from the keys
UNUSED_TENSORS = re.compile(r"blk\.\d+\.attn_rot_embd")


class Header(NamedTuple):
    """What stands before the weights of a GGUF file.

    Attributes
    ----------
    file
        whose.
    keys
        its metadata; of an array of texts how many there are.
    tensors
        for each name the shape, the type's id, and where it begins in the file.
    """

    file: Path
    keys: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]

    @property
    def arch(self) -> str:
        """The architecture, with which the keys of the model begin."""
        return str(self.keys.get("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of a model's key, which is given without the architecture."""
        return self.keys.get(f"{self.arch}.{key}", default)


class _Reader:
    """Reads a file's header from the front; `struct.error` and `ValueError` where it ends or is
    none.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        # as it was written before it was a float32
        return float(f"{value:.7g}") if kind == "f" else value

    def text(self) -> str:
        end = self.number("Q") + self.at
        if end > len(self.data):
            raise ValueError("it is cut short")
        text, self.at = self.data[self.at : end], end
        return text.decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        of, count = self.number("I"), self.number("Q")
        if of not in (STRING, ARRAY):
            values = list(struct.unpack_from(f"<{count}{NUMBERS[of]}", self.data, self.at))
            self.at += struct.calcsize(f"<{count}{NUMBERS[of]}")
            return values
        for _ in range(count):
            self.value(of)
        return count


def read_header(file: Path) -> Header:
    """The header of a GGUF file.

    Raises
    ------
    ConfigError
        it has none that can be read.
    """
    try:
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            reader = _Reader(data)
            word, version = reader.number("4s"), reader.number("I")
            if word != b"GGUF" or version not in VERSIONS:
                raise ValueError(f"version {version}; expected {' or '.join(map(str, VERSIONS))}")
            count, many = reader.number("Q"), reader.number("Q")
            keys = {reader.text(): reader.value(reader.number("I")) for _ in range(many)}
            tensors = {}
            for _ in range(count):
                name, dimensions = reader.text(), reader.number("I")
                shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
                tensors[name] = shape, reader.number("I"), reader.number("Q")
    except (
        OSError,
        ValueError,
        KeyError,
        struct.error,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"model.path={file}: cannot be read as GGUF: {first_line(error)}"
        ) from error
    step = keys.get("general.alignment", 32)
    if type(step) is not int or step < 1:
        raise ConfigError(
            f"model.path={file}: general.alignment={show(step)}: expected a whole number, 1 or more"
        )
    start = -(-reader.at // step) * step
    return Header(
        file, keys, {name: (shape, kind, start + at) for name, (shape, kind, at) in tensors.items()}
    )


def scaling_of(header: Header, theta: float, dim: int) -> dict[str, Any] | None:
    """The rope parameters that a file asks for where its rotary positions are scaled; None where
    they are not.

    Parameters
    ----------
    header
        of the file.
    theta
        the base of the model's rotary frequencies.
    dim
        channels of a head that are turned.

    Raises
    ------
    ConfigError
        they are scaled in a way that transformers has no parameters for, or that shows in no key.
    """
    if (factors := _factors(header)) is not None:
        return _llama3(header, factors, theta, dim)
    factor = header.of_model("rope.scaling.factor") or header.of_model("rope.scale_linear") or 1
    kind = header.of_model("rope.scaling.type", "linear")
    if kind == "none" or (kind in ("linear", "yarn") and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        raise _refusal(header, "rope.scaling.type", kind, "expected none, linear or yarn")
    original = header.of_model("rope.scaling.original_context_length") or header.of_model(
        "context_length"
    )
    betas = {
        name: header.of_model(key)
        for key, name in BETAS.items()
        if header.of_model(key) is not None
    }
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        **betas,
    }


def _factors(header: Header) -> list[float] | None:
    """By what a file divides each rotary frequency; None where it divides none."""
    if FACTORS not in header.tensors:
        return None
    shape, kind, start = header.tensors[FACTORS]
    if kind != FLOAT32 or len(shape) != 1:
        raise ConfigError(
            f"model.path={header.file}: {FACTORS}: expected a list of float32 numbers"
        )
    with header.file.open("rb") as stream:
        stream.seek(start)
        factors = list(struct.unpack(f"<{shape[0]}f", stream.read(4 * shape[0])))
    return None if all(factor == 1 for factor in factors) else factors


def _llama3(header: Header, factors: list[float], theta: float, dim: int) -> dict[str, Any]:
    """Llama 3's rope parameters, where they make these factors.

    Raises
    ------
    ConfigError
        they do not.
    """
    most = max(factors)
    low, high, original = LLAMA3.values()
    expected = []
    for pair in range(dim // 2):
        # within the length before scaling
        turns = original / (2 * math.pi * theta ** (2 * pair / dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / most + smooth))
    matches = len(factors) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
    )
    if not matches:
        raise ConfigError(
            f"model.path={header.file}: {FACTORS}=[{factors[0]:g} .. {factors[-1]:g}]: rotary"
            f" frequencies divided by other numbers than Llama 3's; {INSTEAD}"
        )
    return {"rope_type": "llama3", "factor": most, **LLAMA3}


def with_scaling(header: Header, config: Any) -> dict[str, Any]:
    """A model's rope parameters with the scaling that its file asks for, in layers with full
    attention.

    Parameters
    ----------
    header
        of the file.
    config
        transformers' config of that model.

    Raises
    ------
    ConfigError
        as `scaling_of`, or the model has no rotary positions to scale.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention") or rope
    scaled = (
        scaling_of(header, full.get("rope_theta") or 1.0, rotary_dim_of(config) if full else 0)
        or {}
    )
    refuse_wrong_rope(
        {"rope_parameters": scaled}, f"model.path={header.file}: {header.arch}.rope.scaling: "
    )
    if scaled and not full:
        raise ConfigError(
            f"model.path={header.file}: {header.arch} has no rotary positions to scale; {INSTEAD}"
        )
    return (
        {**rope, "full_attention": {**full, **scaled}}
        if "full_attention" in rope
        else {**full, **scaled}
    )


def _refusal(header: Header, key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(
        f"model.path={header.file}: {header.arch}.{key}={show(value)}: {why}; {INSTEAD}"
    )


def refuse_dropped(header: Header, config: Any) -> None:
    """Refuse a file that says what the model which transformers makes of it does not compute.

    Parameters
    ----------
    header
        of the file.
    config
        transformers' config of that model, with the file's scaled rotary positions in it.

    Raises
    ------
    ConfigError
        names the first such key and its value.
    """
    if header.keys.get("split.count", 1) not in (0, 1):
        raise ConfigError(
            f"model.path={header.file}: split.count={header.keys['split.count']}: expected one"
            " whole file"
        )
    model_values = _model_values(config)
    prefix = f"{header.arch}."
    _refuse_other_windows(header, config)
    for name, value in {**_defaults(header, model_values), **header.keys}.items():
        key = name.removeprefix(prefix)
        if name.startswith(HARMLESS) or key in (*HARMLESS_OF_MODEL, *SCALING, *BETAS, *WINDOWS):
            continue
        has = model_values.get(key, WITHOUT.get(key))
        if name == key or not _are_equal(value, has):
            text = "none" if has is None else show(has)
            raise ConfigError(
                f"model.path={header.file}: {name}={show(value)}: the model that transformers makes"
                f" of it has {text}; {INSTEAD}"
            )


def _defaults(header: Header, model_values: Mapping[str, Any]) -> dict[str, Any]:
    """What the keys mean that a file leaves out, where transformers' classes have defaults of their
    own.
    """
    defaults = {"attention.scale": model_values["attention.key_length"] ** -0.5}
    if "rope.freq_base" in model_values:
        defaults["rope.freq_base"] = 10000.0
    return {f"{header.arch}.{key}": value for key, value in defaults.items()}


def _refuse_other_windows(header: Header, config: Any) -> None:
    """Refuse a file whose layers with a window are others than the model's, or as long as the model
    has them.
    """
    size, pattern = (header.of_model(key) for key in WINDOWS)
    has = windows(config.to_dict())
    if type(size) is int and size >= config.max_position_embeddings:
        size = 0  # no position reaches past it
    if size is None or size == 0:
        if has and not size:
            windowed = f"{len(has)} layers with a window of {max(has.values())}"
            raise ConfigError(
                f"model.path={header.file}: {header.arch}.{WINDOWS[0]}: missing, and the model has"
                f" {windowed}"
            )
        return
    if set(has.values()) != {size}:
        raise _refusal(
            header,
            WINDOWS[0],
            size,
            f"the model has {'no window' if not has else max(has.values())}",
        )
    layers = range(config.num_hidden_layers)
    if type(pattern) is int:
        pattern = (
            [bool((layer + 1) % pattern) for layer in layers]
            if pattern > 1
            else [False for _ in layers]
        )
    if isinstance(pattern, list) and [
        layer for layer in layers if pattern[layer : layer + 1] == [True]
    ] != sorted(has):
        raise _refusal(
            header, WINDOWS[1], pattern, f"the model has windows in the layers {sorted(has)}"
        )


def _model_values(config: Any) -> dict[str, Any]:
    """What a model computes with, by a file's keys, as far as its config says."""
    by_key: dict[str, Any] = {}
    for key, names in CONFIG_ATTRIBUTES.items():
        values = (getattr(config, name, None) for name in names)
        if (value := next((value for value in values if value is not None), None)) is not None:
            by_key[key] = value
    head_dim = head_dim_of(config)
    by_key |= dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    scale = getattr(config, "attention_multiplier", None)
    by_key["attention.scale"] = (
        scale or (getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
    )
    if by_key.get("feed_forward_length") is None:
        by_key["feed_forward_length"] = 4 * config.hidden_size  # GPT-2
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention") or rope
    if full:
        by_key["rope.freq_base"], by_key["rope.dimension_count"] = (
            full.get("rope_theta"),
            rotary_dim_of(config),
        )
    if (near := rope.get("sliding_attention")) is not None:
        by_key["rope.freq_base_swa"] = near.get("rope_theta")
    return by_key


def head_dim_of(config: Any) -> int:
    """Channels of a head by a transformers config."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def rotary_dim_of(config: Any) -> int:
    """Channels of a head that are turned, in layers with full attention."""
    rope = config.rope_parameters.get("full_attention") or config.rope_parameters
    return int(head_dim_of(config) * (rope.get("partial_rotary_factor") or 1))


def _are_equal(value: Any, model_value: Any) -> bool:
    """Whether a file's value is the held one."""
    if isinstance(value, int | float) and isinstance(model_value, int | float):
        return math.isclose(value, model_value, rel_tol=1e-5)  # of float32
    return bool(value == model_value)


def refuse_unread(header: Header, read: Collection[str]) -> None:
    """Refuse a file with weights that are read into no part of the model.

    Parameters
    ----------
    header
        of the file.
    read
        names of the tensors that are read; rotary factors have become rope parameters.

    Raises
    ------
    ConfigError
        names the first.
    """
    unread = [name for name in header.tensors if name not in read and name != FACTORS]
    unread = [name for name in unread if not UNUSED_TENSORS.match(name)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise ConfigError(
            f"model.path={header.file}: {unread[0]}{more}: weights that its model has no place for;"
            f" {INSTEAD}"
        )
