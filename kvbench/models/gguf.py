"""What a GGUF file says of its model beside what transformers reads of it. No torch.

transformers reads a file's shape and weights and passes over the rest without a word: scaled rotary
positions, windows, experts. `kvbench.backends.hf.loading` reads such a file, and asks here what has
to be added, and what cannot be had.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.config import ConfigError, first_line, show
from kvbench.models.card import ModelCard
from kvbench.models.rope import FULL, SLIDING, refuse_wrong_rope

# Struct formats of GGUF's numbers by their type's id; besides there are strings and arrays.
NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
FLOAT32 = 0  # of a tensor
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
WITHOUT_AT_ZERO = (
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"),
    *("attention.max_alibi_bias", "attention.shared_kv_layers", "nextn_predict_layers"),
    *("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"),
    "rope.scaling.yarn_log_multiplier",
)
WITHOUT_AT_ONE = (
    *("logit_scale", "embedding_scale", "residual_scale", "attention.output_scale"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
)
WITHOUT = {
    **dict.fromkeys(WITHOUT_AT_ZERO, 0),
    **dict.fromkeys(WITHOUT_AT_ONE, 1),
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
# What reading a file that is none, or is damaged, ends in.
UNREADABLE = (
    *(LookupError, MemoryError, OSError, RecursionError, ValueError),
    *(OverflowError, struct.error),
)


class Tensor(NamedTuple):
    """Where the numbers of a tensor lie in a file.

    Attributes
    ----------
    shape
        the slowest dimension first.
    kind
        the id of its type.
    at
        the byte with which it begins.
    """

    shape: tuple[int, ...]
    kind: int
    at: int


class Header(NamedTuple):
    """What stands before the weights of a GGUF file.

    Attributes
    ----------
    file
        whose.
    keys
        its metadata; of an array of texts how many there are.
    tensors
        by name.
    """

    file: Path
    keys: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def arch(self) -> str:
        """The architecture, with which the keys of the model begin."""
        return str(self.keys.get("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of a model's key, which is given without the architecture."""
        return self.keys.get(f"{self.arch}.{key}", default)

    # -- rotary positions that are scaled ----------------------------------------------------------

    def with_scaling(self, config: Any) -> dict[str, Any]:
        """A model's rope parameters, scaled in layers of full attention as the file asks.

        Parameters
        ----------
        config
            transformers' config of that model.

        Raises
        ------
        ConfigError
            they are scaled in a way that transformers has no parameters for, or that shows in no
            key; or the model has none to scale.
        """
        rope = getattr(config, "rope_parameters", None) or {}
        scaled = self._scaling(ModelCard.of_config(config))
        where = f"model.path={self.file}: {self.arch}.rope.scaling: "
        refuse_wrong_rope({"rope_parameters": scaled}, where)
        if scaled and not rope:
            raise ConfigError(
                f"model.path={self.file}: {self.arch} has no rotary positions to scale; {INSTEAD}"
            )
        if FULL in rope:
            return {**rope, FULL: {**rope[FULL], **scaled}}
        return {**rope, **scaled}

    def _scaling(self, card: ModelCard) -> dict[str, Any]:
        """The rope parameters of the file's scaling; {}: its positions are not scaled."""
        if factors := self._factors():
            return self._llama3(factors, card)
        factor = self.of_model("rope.scaling.factor") or self.of_model("rope.scale_linear") or 1
        kind = self.of_model("rope.scaling.type", "linear")
        if kind == "none" or (kind in ("linear", "yarn") and factor == 1):
            return {}
        if kind == "linear":
            return {"rope_type": kind, "factor": factor}
        if kind != "yarn":
            raise self._refusal("rope.scaling.type", kind, "expected none, linear or yarn")
        original = self.of_model("rope.scaling.original_context_length")
        betas = {
            name: beta for key, name in BETAS.items() if (beta := self.of_model(key)) is not None
        }
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original or self.of_model("context_length"),
            **betas,
        }

    def _factors(self) -> list[float]:
        """By what the file divides each rotary frequency; [] where it divides none."""
        if FACTORS not in self.tensors:
            return []
        tensor = self.tensors[FACTORS]
        if tensor.kind != FLOAT32 or len(tensor.shape) != 1:
            raise ConfigError(
                f"model.path={self.file}: {FACTORS}: expected a list of float32 numbers"
            )
        count = tensor.shape[0]
        with self.file.open("rb") as stream:
            stream.seek(tensor.at)
            factors = list(struct.unpack(f"<{count}f", stream.read(4 * count)))
        return [] if all(factor == 1 for factor in factors) else factors

    def _llama3(self, factors: list[float], card: ModelCard) -> dict[str, Any]:
        """Llama 3's rope parameters, where they make these factors.

        Raises
        ------
        ConfigError
            they do not.
        """
        expected = _llama3_factors(max(factors), card)
        matches = len(factors) == len(expected) and all(
            math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
        )
        if not matches:
            raise ConfigError(
                f"model.path={self.file}: {FACTORS}=[{factors[0]:g} .. {factors[-1]:g}]: rotary"
                f" frequencies divided by other numbers than Llama 3's; {INSTEAD}"
            )
        return {"rope_type": "llama3", "factor": max(factors), **LLAMA3}

    # -- what the model of transformers leaves out -------------------------------------------------

    def refuse_dropped(self, config: Any) -> None:
        """Refuse a file that says what the model which transformers makes of it does not compute.

        Parameters
        ----------
        config
            transformers' config of that model, with the file's scaled rotary positions in it.

        Raises
        ------
        ConfigError
            names the first such key and its value.
        """
        if self.keys.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                f"model.path={self.file}: split.count={self.keys['split.count']}: expected one"
                " whole file"
            )
        card = ModelCard.of_config(config)
        model_values = _model_values(config, card)
        self._refuse_other_windows(card, getattr(config, "max_position_embeddings", math.inf))
        for name, value in {**self._defaults(model_values), **self.keys}.items():
            key = name.removeprefix(f"{self.arch}.")
            if name.startswith(HARMLESS) or key in (*HARMLESS_OF_MODEL, *SCALING, *BETAS, *WINDOWS):
                continue
            has = model_values.get(key, WITHOUT.get(key))
            if name == key or not _are_equal(value, has):
                text = "none" if has is None else show(has)
                raise ConfigError(
                    f"model.path={self.file}: {name}={show(value)}: the model that transformers"
                    f" makes of it has {text}; {INSTEAD}"
                )

    def _defaults(self, model_values: dict[str, Any]) -> dict[str, Any]:
        """What keys mean that are left out, where transformers' classes have other defaults."""
        defaults = {"attention.scale": model_values["attention.key_length"] ** -0.5}
        if "rope.freq_base" in model_values:
            defaults["rope.freq_base"] = 10000.0
        return {f"{self.arch}.{key}": value for key, value in defaults.items()}

    def _refuse_other_windows(self, card: ModelCard, positions: float) -> None:
        """Refuse a file whose windows are in other layers than the model's, or of another size."""
        size, windows = self.of_model(WINDOWS[0]), card.windows
        if type(size) is int and size >= positions:
            size = 0  # no position reaches past it
        if not size and not windows:
            return
        if not size:
            raise ConfigError(
                f"model.path={self.file}: {self.arch}.{WINDOWS[0]}: missing, and the model has"
                f" {len(windows)} layers with a window of {max(windows.values())}"
            )
        if {*windows.values()} != {size}:
            has = max(windows.values(), default="no window")
            raise self._refusal(WINDOWS[0], size, f"the model has {has}")
        pattern, layers = self.of_model(WINDOWS[1]), range(card.layers)
        if type(pattern) is int:
            pattern = [pattern > 1 and bool((layer + 1) % pattern) for layer in layers]
        if not isinstance(pattern, list):
            return
        if [layer for layer in layers if pattern[layer : layer + 1] == [True]] != [*windows]:
            text = f"the model has windows in the layers {[*windows]}"
            raise self._refusal(WINDOWS[1], pattern, text)

    def _refusal(self, key: str, value: Any, why: str) -> ConfigError:
        return ConfigError(
            f"model.path={self.file}: {self.arch}.{key}={show(value)}: {why}; {INSTEAD}"
        )

    def refuse_unread(self, read: Collection[str]) -> None:
        """Refuse a file with weights that are read into no part of the model.

        Parameters
        ----------
        read
            names of the tensors that are read; rotary factors have become rope parameters.

        Raises
        ------
        ConfigError
            names the first.
        """
        unread = [name for name in self.tensors if name not in read and name != FACTORS]
        unread = [name for name in unread if not UNUSED_TENSORS.match(name)]
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise ConfigError(
                f"model.path={self.file}: {unread[0]}{more}: weights that its model has no place"
                f" for; {INSTEAD}"
            )


class _Reader:
    """Reads a file's header from the front.

    Raises `struct.error` or `ValueError` where the file ends, or is none.
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

    def header(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Keys and tensors; where these begin is said from the first on."""
        word, version = self.number("4s"), self.number("I")
        if word != b"GGUF" or version not in VERSIONS:
            raise ValueError(f"version {version}; expected {' or '.join(map(str, VERSIONS))}")
        tensors, keys = self.number("Q"), self.number("Q")
        metadata = {self.text(): self.value(self.number("I")) for _ in range(keys)}
        return metadata, dict(self._tensor() for _ in range(tensors))

    def _tensor(self) -> tuple[str, Tensor]:
        name, dimensions = self.text(), self.number("I")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, Tensor(shape, self.number("I"), self.number("Q"))


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
            keys, tensors = reader.header()
    except UNREADABLE as error:
        raise ConfigError(
            f"model.path={file}: cannot be read as GGUF: {first_line(error)}"
        ) from error
    step = keys.get("general.alignment", 32)
    if type(step) is not int or step < 1:
        raise ConfigError(
            f"model.path={file}: general.alignment={show(step)}: expected a whole number, 1 or more"
        )
    start = -(-reader.at // step) * step
    moved = {name: tensor._replace(at=start + tensor.at) for name, tensor in tensors.items()}
    return Header(file, keys, moved)


def _llama3_factors(most: float, card: ModelCard) -> list[float]:
    """By what Llama 3's scaling divides the frequency of each rotary pair, at most by `most`."""
    if (rope := card.rope.get(FULL)) is None:
        return []
    dim = int(card.head_dim * rope.share)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    expected = []
    for pair in range(dim // 2):
        # within the length before scaling
        length = 2 * math.pi * (rope.base or 1.0) ** (2 * pair / dim)
        turns = LLAMA3["original_max_position_embeddings"] / length
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / most + smooth))
    return expected


def _model_values(config: Any, card: ModelCard) -> dict[str, Any]:
    """What a model computes with, by a file's keys, as far as its config says."""
    by_key: dict[str, Any] = {}
    for key, names in CONFIG_ATTRIBUTES.items():
        values = (getattr(config, name, None) for name in names)
        if (value := next((value for value in values if value is not None), None)) is not None:
            by_key[key] = value
    by_key |= dict.fromkeys(("attention.key_length", "attention.value_length"), card.head_dim)
    scale = getattr(config, "attention_multiplier", None)
    base = getattr(config, "query_pre_attn_scalar", None) or card.head_dim
    by_key["attention.scale"] = scale or base**-0.5
    by_key.setdefault("feed_forward_length", 4 * card.hidden_size)  # GPT-2
    if (rope := card.rope.get(FULL)) is not None:
        by_key["rope.freq_base"] = rope.base
        by_key["rope.dimension_count"] = int(card.head_dim * rope.share)
    if (near := card.rope.get(SLIDING)) is not None:
        by_key["rope.freq_base_swa"] = near.base
    return by_key


def _are_equal(value: Any, model_value: Any) -> bool:
    """Whether a file's value is the model's."""
    if isinstance(value, int | float) and isinstance(model_value, int | float):
        return math.isclose(value, model_value, rel_tol=1e-5)  # of float32
    return bool(value == model_value)
