"""How many generations fit side by side: an estimate of what each takes, before it begins, and what
is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvbench.backends.hf.layers import shape_of
from kvbench.backends.hf.loading import Loaded
from kvbench.backends.hf.prefilled import union
from kvbench.measure.arm import Setup
from kvbench.memory.codecs import Codecs
from kvbench.memory.kinds import KV, NATIVE, Tier
from kvbench.memory.large import shares_pages
from kvbench.method import Needs, Shape
from kvbench.models.footprint import free_memory

SHARE = 0.7  # of the memory that is free at the start; the rest is for what no estimate knows
INDEX = 0.25  # of a prompt's keys and values: what an index takes, until one was seen


def room(loaded: Loaded) -> float:
    """Bytes that generations may take, the device's where it has memory of its own."""
    free = free_memory(loaded.device)
    return SHARE * free.get("device", free.get("host", float("inf")))


def prompt_bytes(setup: Setup, lengths: Sequence[int]) -> int:
    """Bytes of the keys and values of prompts, which all generations share that begin from their
    prefill.
    """
    shape = _shape(setup, lengths)
    return _entries(shape, len(shape.full_layers)) * _token_bytes(shape)


def recorded_bytes(setup: Setup, lengths: Sequence[int], needs: Iterable[Needs]) -> int:
    """Bytes of what a shared prefill keeps besides, for methods with these needs: queries, sums,
    replays.
    """
    needs, shape = list(needs), _shape(setup, lengths)
    longest, number = max(lengths), shape.dtype.itemsize
    query, both = (
        heads * shape.head_dim * number
        for heads in (shape.query_heads, shape.query_heads + shape.kv_heads)
    )
    every = union(needs)
    layer_bytes = (
        min(every.query_window, longest) * query
        + every.attention_sums * longest * shape.query_heads * 4
    )
    layer_bytes += len({need.replay for need in needs} - {None}) * longest * both
    return shape.batch * shape.layers * layer_bytes


def reference_bytes(setup: Setup, steps: int) -> int:
    """Bytes of what full attention says at so many steps, which all share that are compared with
    it.
    """
    return steps * setup.loaded.card.vocabulary * torch.float32.itemsize


def row_bytes(
    setup: Setup, lengths: Sequence[int], new_tokens: int, index_share: float | None = None
) -> int:
    """Bytes that a generation takes beside the prompts that it shares, by its method's rule.

    Parameters
    ----------
    index_share
        what the method's index took of the keys and values of an earlier prompt; None: not known.
    """
    shape, kv = _shape(setup, lengths), setup.config.kv
    size, layers = setup.budget.size, len(shape.sparse_layers)
    sparse, plain = _entries(shape, layers), _token_bytes(shape)
    total = shape.batch * len(shape.full_layers) * new_tokens * plain
    total += round((INDEX if index_share is None else index_share) * sparse * plain)
    if setup.method.needs.home != "device":
        total += sparse * _token_bytes(shape, kv, "host")
    elif size is not None:  # who evicts copies what it keeps
        total += min(sparse, layers * sum(map(setup.budget.tokens, shape.lengths))) * plain
    if kv.coded:
        layer_kvs = [
            kv.of_layer(layer, shape.layers, len(shape.windows)) for layer in shape.full_layers
        ]
        total += _entries(shape, 1) * sum(
            _token_bytes(shape, layer_kv) for layer_kv in layer_kvs if layer_kv.coded
        )
    return total if shares_pages(shape.device) else total + prompt_bytes(setup, lengths)


def index_share(setup: Setup, lengths: Sequence[int], index_bytes: int) -> float:
    """What an index of so many bytes is of its prompts' keys and values in sparse layers."""
    shape = _shape(setup, lengths)
    return index_bytes / max(1, _entries(shape, len(shape.sparse_layers)) * _token_bytes(shape))


def _shape(setup: Setup, lengths: Sequence[int]) -> Shape:
    model = setup.loaded.model
    return shape_of(model, lengths, setup.dense_layers, model.dtype, model.device)


def _entries(shape: Shape, layers: int) -> int:
    """Tokens in so many layers: rows of unequal length take as much as the longest."""
    return layers * shape.batch * max(shape.lengths)


def _token_bytes(shape: Shape, kv: KV = NATIVE, tier: Tier = "device") -> int:
    """Bytes of a token's keys and values in a layer."""
    return shape.kv_heads * Codecs.of(kv, tier, shape.head_dim, shape.dtype).nbytes
