"""What a run takes of memory at least, from the shape of its model alone, and what is free: asked
before it is taken.

The estimates are lower bounds, so that nothing is refused that might run: weights, keys and values
of the longest prompt, and the widest tensors of one chunk of its prefill. What cannot be known here
(indexes, buffers, what a library keeps) comes on top.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvbench.config import ConfigError
from kvbench.memory.codecs import Codecs
from kvbench.memory.kinds import KV, NATIVE
from kvbench.models.support import text_config, windows

GATED = {"llama", "mistral", "qwen2", "qwen3"}  # whether or not a config says its activation
INNER = ("intermediate_size", "moe_intermediate_size")
SHAPE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
GIB = 2**30


class Prompts(NamedTuple):
    """The largest prompts of a run.

    Attributes
    ----------
    tokens
        of a row, the generated ones included; 0 where they are not known before the tokenizer is.
    rows
        that are generated together.
    chunk
        tokens of a forward pass; None: all.
    """

    tokens: int
    rows: int = 1
    chunk: int | None = None


class Footprint(NamedTuple):
    """Bytes that a run takes at least.

    Attributes
    ----------
    weights
        of the model.
    cache
        keys and values of all layers.
    activations
        of one forward pass of the prefill.
    """

    weights: int
    cache: int
    activations: int


def footprint(
    model_config: Mapping[str, Any], dtype: torch.dtype, prompts: Prompts, kv: KV = NATIVE
) -> Footprint | None:
    """The bytes of a model and its prompts, with keys and values as the host holds them; None where
    the shape does not say.
    """
    shape = text_config(model_config)
    if not all(shape.get(key) for key in SHAPE_KEYS):
        return None
    width, layers, heads, vocabulary = (int(shape[key]) for key in SHAPE_KEYS)
    head_dim = shape.get("head_dim") or width // heads
    kv_heads = shape.get("num_key_value_heads") or heads
    # some layers may be of experts alone
    inner = min((size for key in INNER if (size := shape.get(key))), default=0)
    matrices = 3 if _is_gated(shape) else 2
    # Queries and the output each H x Hq D, keys and values each H x Hkv D, and the matrices of the
    # MLP.
    layer = 2 * width * head_dim * (heads + kv_heads) + matrices * width * inner
    embeddings = vocabulary * width * (2 if shape.get("tie_word_embeddings") is False else 1)
    window_tokens = [min(prompts.tokens, size - 1) for size in windows(shape).values()]
    entries = sum(window_tokens) + (layers - len(window_tokens)) * prompts.tokens
    at_once = min(prompts.tokens, prompts.chunk or prompts.tokens)
    # Beside the hidden states the inner ones of the MLP, of a gated one twice, and their product.
    wide = 2 * width + matrices * inner
    return Footprint(
        (layers * layer + embeddings) * dtype.itemsize,
        Codecs.of(kv, "host", head_dim, dtype).nbytes * kv_heads * entries * prompts.rows,
        wide * at_once * prompts.rows * dtype.itemsize,
    )


def _is_gated(shape: Mapping[str, Any]) -> bool:
    """Whether the MLP surely has a third matrix, the gate."""
    kind = str(shape.get("model_type"))
    return shape.get("hidden_act") == "silu" or kind in GATED or kind.startswith("gemma")


def refuse_too_large(
    required: Footprint,
    device: torch.device,
    home: str,
    model: str,
    prompts: Prompts,
    free: Mapping[str, int],
) -> None:
    """Refuse a run that cannot fit.

    Parameters
    ----------
    required
        bytes of its parts.
    device
        that computes.
    home
        of keys and values, as in `Needs.home`; "by_layer" leaves open what of them either tier
        takes.
    model
        what messages call the model.
    prompts
        those that `required` is of.
    free
        bytes free, by "device" and "host"; what is not known is absent.

    Raises
    ------
    ConfigError
        names the key that takes most, the estimate, what is free and what would be right.
    """
    resting = {"weights": required.weights, "activations": required.activations}
    cache = {"KV cache": required.cache}
    shared_memory = device.type == "cpu"
    tiers = (
        {"host": resting | cache}
        if shared_memory
        else {"device": resting | (cache if home == "device" else {})}
    )
    if home == "host" and not shared_memory:
        tiers["host"] = cache
    for tier, parts in tiers.items():
        total = sum(parts.values())
        if total <= free.get(tier, total):
            continue
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        by_model = parts.get("weights", 0) > free[tier]
        key = (
            f"model={model}"
            if by_model
            else f"task.lengths: {prompts.tokens} tokens x {prompts.rows}"
        )
        right = "a smaller model" if by_model else "shorter prompts, fewer rows or a smaller model"
        raise ConfigError(
            f"{key}: takes {total / GIB:.1f} GiB of {tier} memory at least ({listed}), and"
            f" {free[tier] / GIB:.1f} are free; choose {right} (memory_check=false tries all the"
            " same)"
        )


def free_memory(*devices: torch.device) -> dict[str, int]:
    """Bytes free on the host and, where it is another memory, on the devices; what is not known is
    absent.
    """
    free = {"host": host} if (host := _free_on_host()) is not None else {}
    if devices[0].type == "cuda":
        gc.collect()  # caches and engines refer to each other
        free["device"] = sum(_free_on(device) for device in devices)
    return free


def _free_on(device: torch.device) -> int:
    """What nobody has of a GPU, and what torch has and no tensor does: memory of what ran before in
    this process.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _free_on_host() -> int | None:
    """What Linux says is available to a new program, or what a container's limit leaves of it; None
    elsewhere.
    """
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # files it has read make room
        return min(available, limit - used + int(usage["inactive_file"]))
    except (OSError, ValueError, LookupError):  # "max" is no number: there is no limit
        return available
