"""How many generations fit side by side: an estimate of what each takes beside the prompts that it
shares, before it begins, and what is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.loading import Loaded
from kvbench.measure.arm import Setup
from kvbench.memory.codecs import Codecs
from kvbench.memory.kinds import KV, NATIVE, Tier
from kvbench.method import Shape
from kvbench.models.footprint import free_memory

SHARE = 0.7  # of the memory that is free at the start; the rest is for what no estimate knows
PREFILLING = 2  # times a prompt is in memory while it is copied
INDEX = 0.25  # of a prompt's keys and values: what an index takes, until one was seen


def room(loaded: Loaded) -> float:
    """Bytes that generations may take, the device's where it has memory of its own."""
    free = free_memory(loaded.device)
    return SHARE * free.get("device", free.get("host", float("inf")))


def row_bytes(
    setup: Setup, lengths: Sequence[int], new_tokens: int, index_share: float = INDEX
) -> int:
    """Bytes that a generation takes beside its prompts, by its method's rule.

    Parameters
    ----------
    index_share
        what the method's index takes of the keys and values of its layers.
    """
    shape, kv, size = _shape(setup, lengths), setup.config.kv, setup.budget.size
    tokens, plain = shape.batch * max(lengths), _token_bytes(shape)  # of a layer
    sparse, layers = len(shape.sparse_layers), shape.full_layers
    total = shape.batch * len(layers) * new_tokens * plain
    total += round(index_share * sparse * tokens * plain)
    if setup.method.needs.home != "device":
        total += sparse * tokens * _token_bytes(shape, kv, "host")
    elif size is not None:  # who evicts copies what it keeps
        total += sparse * min(tokens, sum(map(setup.budget.tokens, lengths))) * plain
    if kv.coded:
        kinds = [kv.of_layer(layer, shape.layers, len(shape.windows)) for layer in layers]
        total += tokens * sum(_token_bytes(shape, kind) for kind in kinds if kind.coded)
    return total


def index_share(setup: Setup, lengths: Sequence[int], index_bytes: int) -> float:
    """What an index of so many bytes is of its prompts' keys and values in sparse layers."""
    shape = _shape(setup, lengths)
    indexed = len(shape.sparse_layers) * shape.batch * max(lengths) * _token_bytes(shape)
    return index_bytes / max(1, indexed)


def _shape(setup: Setup, lengths: Sequence[int]) -> Shape:
    model = setup.loaded.model
    return shape_of(model, lengths, setup.dense_layers, model.dtype, model.device)


def _token_bytes(shape: Shape, kv: KV = NATIVE, tier: Tier = "device") -> int:
    """Bytes of a token's keys and values in a layer."""
    return shape.kv_heads * Codecs.of(kv, tier, shape.head_dim, shape.dtype).nbytes
