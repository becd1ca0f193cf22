"""Keys and queries at other positions: at their places inside a selection (StreamingLLM, section
3.2), or at none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import embedding

from kvbench.attention.sinks import joined
from kvbench.kernels import rotary as kernels
from kvbench.kernels.library import why_missing
from kvbench.memory.device import NO_TOKEN
from kvbench.memory.store import LayerStore
from kvbench.memory.transfer import uploaded
from kvbench.method import Extra, Selection, Shape

# cos and sin [B, L, n, D] float32, as the model arranges them
Angles = tuple[torch.Tensor, torch.Tensor]
TABLE = 1024  # positions by which a table of them grows


class Rotary(Protocol):
    """A model's rotary positions."""

    def angles(self, by: torch.Tensor) -> Angles:
        """Those of a turn by a number of positions, [B, L, n]."""
        ...

    def turn(self, vectors: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Vectors [B, H, n, D], turned in float32; L is 1 or H."""
        ...


class ModelRotation:
    """Vectors of tokens at any position without RoPE, and with it again; see
    `kvbench.method.Rotation`.

    On a CPU cosines and sines are read from tables that grow with the positions asked for. A GPU
    computes them as quickly, and need not be waited for to know how far they reach.

    Parameters
    ----------
    rotary
        the model's.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._tables: Angles | None = None  # cos and sin [positions, R]
        # whether the model turns as the kernel does; None: not tried yet
        self._by_halves: bool | None = None

    def back(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys [B, H, n, D] at positions [B, 1 or H, n], as they were before RoPE."""
        cos, sin = self._angles(positions)
        return self._rotary.turn(keys, (cos, -sin))

    def turn(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys without RoPE, with that of their positions."""
        if keys.is_cpu and keys.dtype == torch.float32 and why_missing() is None:
            if self._by_halves is None:
                self._by_halves = self._tried(keys.shape[3])
            if self._by_halves:
                return self._turned(keys, positions)
        return self._rotary.turn(keys, self._angles(positions))

    def _tried(self, width: int) -> bool:
        """Whether keys of positions that a table has come out of the kernel as of the model."""
        last = torch.arange(TABLE - 16, TABLE)[None, None]
        keys = torch.randn(1, 1, last.shape[2], width, generator=torch.Generator().manual_seed(0))
        return torch.allclose(
            self._turned(keys, last), self._rotary.turn(keys, self._angles(last)), rtol=0, atol=1e-5
        )

    def _turned(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return kernels.turn(keys, positions, *self._table(positions))

    def _angles(self, positions: torch.Tensor) -> Angles:
        if not positions.is_cpu:
            return self._rotary.angles(positions)
        cos, sin = self._table(positions)
        return embedding(positions, cos), embedding(positions, sin)

    def _table(self, positions: torch.Tensor) -> Angles:
        """Tables that have all of these positions."""
        table_length = 0 if self._tables is None else len(self._tables[0])
        required = int(positions.max()) + 1 if positions.numel() else 0
        if self._tables is None or required > table_length:
            longer = torch.arange(table_length, max(required + -required % TABLE, TABLE))
            parts = [part[0, 0] for part in self._rotary.angles(longer[None, None])]
            if self._tables is not None:
                parts = [torch.cat(pair) for pair in zip(self._tables, parts, strict=True)]
            self._tables = parts[0].contiguous(), parts[1].contiguous()
        return self._tables


class Separated(NamedTuple):
    """The entries of a selection [B, L, M] that a gap parts from the query, E of a list at most.

    Attributes
    ----------
    ids
        [B, L, E] on the CPU, their tokens, -1 = none.
    turn
        of their keys.
    others
        [B, L, M], the selection without them.
    entries
        [B, Hq, E], which they are.
    log_weight
        [B, Hq, E], -inf where there is none.
    """

    ids: torch.Tensor
    turn: Angles
    others: torch.Tensor
    entries: torch.Tensor
    log_weight: torch.Tensor


class CachePositions:
    """The m-th oldest of the selected tokens stands m tokens after the first of them: gaps between
    them are closed.

    What a query and a key are worth to each other depends on how far apart they are, so the query
    stays where it is, and so do all tokens that no gap parts from it: of sinks and a window the
    window. The others are turned to the places right before these, and attended as extra entries;
    while they are the same, they are read once. What is stored at its original position is first
    turned back to position 0: the angle of a difference of large positions, rounded once, is not
    the difference of their rounded angles. Both turns are made as one. A selection that one layer
    attends after the other has its angles computed once.
    """

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        self._shape, self._rotary = shape, rotary
        self._index: torch.Tensor | None = None  # the selection that the angles are of,
        # where they are, and at which lengths
        self._where: tuple[torch.device, list[int]] | None = None
        self._separated: Separated | None = None
        # keys and values of the tokens apart
        self._rows: dict[LayerStore, tuple[torch.Tensor, torch.Tensor]] = {}
        self._turned: dict[LayerStore, torch.Tensor] = {}  # these keys at their places

    def __call__(self, selection: Selection, store: LayerStore, device: torch.device) -> Selection:
        """The selection with its keys at those positions, on the device of the layer."""
        if selection.index is not self._index or self._where != (device, store.lengths):
            on_device = selection.index.is_cuda and selection.sinks is not None
            separate = self._separate_sinks if on_device else self._separate
            before, self._separated = self._separated, separate(selection, store, device)
            self._index, self._where = selection.index, (device, store.lengths)
            self._turned = {}
            if (
                before is None
                or self._separated is None
                or not torch.equal(before.ids, self._separated.ids)
            ):
                self._rows.clear()
        if (separated := self._separated) is None:
            return selection
        if store not in self._rows:
            self._rows[store] = store.gather(separated.ids.expand(-1, self._shape.kv_heads, -1))
        if store not in self._turned:
            self._turn(separated.turn, device)
        weight = separated.log_weight
        if selection.log_weight is not None:
            weight = weight + selection.log_weight.gather(2, separated.entries)
        extra = joined(selection.extra, Extra(self._turned[store], self._rows[store][1], weight))
        return replace(selection, index=separated.others, keys=None, extra=extra)

    def _turn(self, angles: Angles, device: torch.device) -> None:
        """Turn the keys of all layers there that are not yet turned, at once."""
        keys = {
            store: key
            for store, (key, _) in self._rows.items()
            if store not in self._turned and key.device == device
        }
        many = len(keys) if angles[0].shape[1] > 1 else 1
        cos, sin = (part.repeat(1, many, 1, 1) for part in angles)
        turned = self._rotary.turn(torch.cat([*keys.values()], dim=1), (cos, sin))
        self._turned |= zip(keys, turned.split(self._shape.kv_heads, dim=1), strict=True)

    def in_order(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention probabilities of the last selection's entries at their places in it, its own
        extra ones last.
        """
        if self._separated is None:
            return weights
        count = self._separated.entries.shape[2]
        return weights[..., :-count].scatter_add(2, self._separated.entries, weights[..., -count:])

    def of_turn(self, past: torch.Tensor, store: LayerStore) -> torch.Tensor:
        """The stored keys [B, Hkv, n, D], ids ascending, right before new tokens, which are not in
        the store yet.
        """
        ids = uploaded(store.resident_ids(), past.device)
        count = (ids >= 0).sum(dim=2, keepdim=True)
        place = torch.arange(ids.shape[2], device=past.device)
        return self._rotary.turn(
            past, self._from_to(ids.clamp(min=0), store.seen[:, None, None] - count + place)
        )

    def _separate_sinks(
        self, selection: Selection, store: LayerStore, device: torch.device
    ) -> Separated | None:
        """As `_separate`, of a selection on a GPU that says which tokens are sinks; nothing waits.

        Where there is no gap yet they are without weight.
        """
        index, sinks = selection.index, selection.sinks
        if not sinks:
            return None
        count = (index >= 0).sum(dim=2, keepdim=True)
        gap, old = store.seen[:, None, None] - count, torch.arange(sinks, device=device)
        old = old.expand(*index.shape[:2], sinks)
        weight = torch.where(gap > 0, 0.0, -torch.inf).expand(old.shape)
        of_queries = self._shape.query_heads // index.shape[1]
        entries, weight = (
            part.repeat_interleave(of_queries, dim=1) for part in (count - 1 - old, weight)
        )
        others = torch.where((index < sinks) & (gap > 0), -1, index)
        ids = torch.arange(sinks).expand(old.shape)
        return Separated(ids, self._from_to(old, old + gap), others, entries, weight)

    def _separate(
        self, selection: Selection, store: LayerStore, device: torch.device
    ) -> Separated | None:
        """What a gap parts from the query, of a selection [B, L, M]; None: nothing.

        Waits for a selection on a GPU.
        """
        index = selection.index
        if index.shape[1] not in (1, self._shape.kv_heads):
            raise ValueError(
                'positions="cache" needs one selection per KV head: its keys are rotated once'
            )
        index, present = index.cpu(), index.cpu() >= 0
        place = torch.where(present, index, NO_TOKEN).argsort(dim=2).argsort(dim=2)
        target = (
            torch.tensor(store.lengths)[:, None, None] - present.sum(dim=2, keepdim=True) + place
        )
        separated = present & (target != index)
        count = int(separated.sum(dim=2).max())
        if not count:
            return None
        entries = separated.int().argsort(dim=2, descending=True, stable=True)[..., :count]
        here = separated.gather(2, entries)
        ids, target = (torch.where(here, part.gather(2, entries), -1) for part in (index, target))
        of_queries = self._shape.query_heads // index.shape[1]
        weight, entries = (
            part.repeat_interleave(of_queries, dim=1)
            for part in (torch.where(here, 0.0, -torch.inf), entries)
        )
        moved = (
            ids.clamp(min=0),
            target.clamp(min=0),
            torch.where(separated, -1, index),
            entries,
            weight,
        )
        sent = [uploaded(part, device) for part in moved]
        return Separated(ids, self._from_to(sent[0], sent[1]), *sent[2:])

    def _from_to(self, old: torch.Tensor, new: torch.Tensor) -> Angles:
        """A turn by -old and one by new [B, L, n], as one."""
        (back, down), (forth, up) = self._rotary.angles(old), self._rotary.angles(new)
        return forth * back + up * down, up * back - forth * down
