"""Decode steps of requests whose methods are at rest: one call a layer for all of them.

Between two passes of the same requests nothing of the prompts' copies changes, and of what came
since only how many tokens there are; so a layer costs the same Python whether one request runs or
sixteen. What the pass adds to each request is noted when it is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.attention.cpu import Part, resident_part, run
from kvbench.backends.vllm import kernels
from kvbench.backends.vllm.paged import BlockTable, Memory
from kvbench.backends.vllm.side import SideTier
from kvbench.memory.store import LayerStore
from kvbench.method import Shape


class Resting(Protocol):
    """A request whose method is at rest, as its engine has it."""

    @property
    def shape(self) -> Shape:
        """With the length of its prompt."""

    @property
    def stores(self) -> Mapping[int, LayerStore]:
        """Of each layer."""

    @property
    def table(self) -> BlockTable:
        """Its blocks."""

    @property
    def lengths(self) -> list[int]:
        """Its tokens, that of this pass aside, of one row."""


class Copies(NamedTuple):
    """What requests hold of their prompts in one layer.

    Attributes
    ----------
    memory
        of the layer, where what came since lies.
    part
        their attention to the copies.
    lists
        KV heads of all requests.
    """

    memory: Memory
    part: Part
    lists: int


class RestingRequests:
    """The requests of a pass that are at rest.

    Parameters
    ----------
    engines
        theirs; all decode.

    Attributes
    ----------
    engines
        the same.
    """

    def __init__(self, engines: Sequence[Resting] = ()) -> None:
        self.engines = list(engines)
        self._copies: dict[int, Copies | None] = {}

    def start_pass(self) -> None:
        """A decode step of each begins: one token more than it held."""
        prompts = torch.tensor([engine.shape.lengths[0] for engine in self.engines])
        lengths = torch.tensor([engine.lengths[0] + 1 for engine in self.engines])
        ids = prompts[:, None] + torch.arange(int((lengths - prompts).max()))
        self._index = torch.where(ids < lengths[:, None], ids, -1)[:, None]
        tables = torch.stack([engine.table.blocks for engine in self.engines], dim=1)
        self._tables = tables.contiguous()  # [groups, B, blocks]

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor | None:
        """Attention of one layer, [B, Hq, D] as the query; None: vLLM shall attend all tokens."""
        if layer not in self._copies:
            self._copies[layer] = self._of(layer)
        copies = self._copies[layer]
        if copies is None:
            return None
        blocks = copies.memory.blocks(self._tables[self.engines[0].table.group(layer)])
        parts = [copies.part, kernels.blocks_part(self._index, None, blocks, None, query.dtype)]
        return run(query[:, :, None], scaling, copies.lists, parts, 0).out[:, :, 0]

    def _of(self, layer: int) -> Copies | None:
        tiers = [
            tier
            for holder in self.engines
            if isinstance(tier := holder.stores[layer].device, SideTier)
        ]
        if not tiers:  # no request has copies in this layer
            return None
        copied = [tier.copies for tier in tiers if tier.copies is not None]
        assert len(copied) == len(self.engines), "all have copies, once their prompts are over"
        used_and_first = [holder.used for holder in copied], [holder.first for holder in copied]
        used, first = (torch.cat(parts).view(-1) for parts in used_and_first)
        pool = *copied[0].pool, None
        part = resident_part(used, first, torch.zeros_like(used), pool, tiers[0].codecs)
        return Copies(tiers[0].memory, part, len(used))
