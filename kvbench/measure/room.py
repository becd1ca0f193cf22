"""How many generations fit side by side: an estimate of what each takes, before it begins, and what is free.

What is shared is counted once: a prompt lies in memory as long as one of its generations goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.backends.hf.layers import shape_of
from kvbench.measure.arm import Arm, TokenizedSample
from kvbench.memory.codec import Codecs
from kvbench.memory.kinds import ROWS, kv_in
from kvbench.method import Shape
from kvbench.models.footprint import free_memory

SHARE = 0.7  # of the memory that is free at the start; the rest is for what no estimate knows
INDEX = 0.25  # of a prompt's keys and values: what an index takes, until one was seen
MOST_ROWS = 64  # of one pass; more make a row hardly quicker


def room(arm: Arm) -> float:
    """Bytes that the generations of a run may take, the device's where it has memory of its own."""
    free = free_memory(arm.loaded.device)
    return SHARE * free.get("device", free.get("host", float("inf")))


def prompt_bytes(arm: Arm, prompts: Sequence[TokenizedSample]) -> int:
    """Bytes of the keys and values that one prefill of a batch leaves; while it is made they are there twice."""
    shape = _shape(arm, prompts)
    return 2 * _entries(shape, len(shape.full_layers)) * _kind_bytes(shape, "native")


def row_bytes(arm: Arm, prompts: Sequence[TokenizedSample], index_share: float | None = None) -> int:
    """Bytes that a generation takes beside the prompt that it shares, by its method's rule.

    Args:
        index_share: what the method's index took of the keys and values of an earlier prompt; None: not known.
    """
    shape, kinds, size = _shape(arm, prompts), kv_in(arm.config), arm.budget.size
    dense, sparse = (
        _entries(shape, layers)
        for layers in (len(shape.full_layers) - len(shape.sparse_layers), len(shape.sparse_layers))
    )
    plain, coded = (_kind_bytes(shape, kind) for kind in ("native", kinds.device))
    new = shape.batch * len(shape.full_layers) * (prompts[0].sample.max_new_tokens + len(prompts[0].question))
    if arm.method.needs.home != "device":
        own = sparse * _kind_bytes(shape, kinds.host)
    elif size is not None:  # a method that evicts copies what it keeps
        own = min(sparse, len(shape.sparse_layers) * sum(map(arm.budget.tokens, shape.lengths))) * plain
    else:
        own = 0
    if coded != plain:
        own += (dense + sparse) * coded
    return round(own + (INDEX if index_share is None else index_share) * sparse * plain + new * plain)


def index_share(arm: Arm, prompts: Sequence[TokenizedSample], index_bytes: int) -> float:
    """What an index of so many bytes is of its prompt's keys and values in sparse layers."""
    shape = _shape(arm, prompts)
    return index_bytes / max(1, _entries(shape, len(shape.sparse_layers)) * _kind_bytes(shape, "native"))


def _shape(arm: Arm, prompts: Sequence[TokenizedSample]) -> Shape:
    model = arm.loaded.model
    return shape_of(model, [len(prompt.ids) for prompt in prompts], arm.dense_layers, model.dtype, model.device)


def _entries(shape: Shape, layers: int) -> int:
    """Tokens of a batch in so many layers: rows of unequal length take as much as the longest."""
    return layers * shape.batch * max(shape.lengths)


def _kind_bytes(shape: Shape, kind: str) -> int:
    """Bytes of a token's keys and values in a layer; at most, where groups share parameters."""
    return shape.kv_heads * Codecs.of(kind if kind in ROWS else "int8", shape.head_dim, shape.dtype).nbytes
