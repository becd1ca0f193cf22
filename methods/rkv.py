"""R-KV: compression by importance and redundancy (Cai et al. 2025, "R-KV: Redundancy-aware KV Cache
Compression for Reasoning Models", section 3).

Generated tokens fill a buffer after the cache. When it is full, those tokens stay that the last
queries look at and whose keys few others resemble, and the buffer is empty again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import max_pool1d

from kvbench.budget import Budget
from kvbench.method import Context, Needs, Prompt, Shape, View
from methods.blocks.ends import KeepsEnds, at_ends
from methods.blocks.queries import LastQueries
from methods.blocks.ragged import stacked

SIMILAR = 0.5  # cosine above which a key is a near-duplicate of another
BLOCK = 256  # keys that are compared with all at once


@dataclass(eq=False)
class RKV(KeepsEnds):
    """Keep C tokens, of the prompt and of what is generated, whenever the buffer is full.

    Where generated tokens count, the buffer is a part of C, a quarter at most, and the window an
    eighth.

    Parameters
    ----------
    window
        last queries whose attention counts, and whose tokens stay, W.
    kernel
        width of the pooling over neighbours' importance, odd.
    mix_lambda
        weight of importance against redundancy, lambda.
    buffer
        tokens that come before the cache is compressed anew.
    order
        the neighbours, and which of two similar keys is the later one, are those of the cache,
        where tokens that were kept stand best first ("score", the public code), or those of the
        text ("time").
    """

    evicts = "always"

    window: int = 8
    kernel: int = 7
    mix_lambda: float = 0.07
    buffer: int = 128
    order: Literal["score", "time"] = "score"

    def __post_init__(self) -> None:
        self.needs = Needs(query_window=self.window, queries=True, host_step=False)

    def begin(self, shape: Shape, budget: Budget, view: View, context: Context) -> None:
        """Settle what is kept of each row, and how many tokens there may be before."""
        super().begin(shape, budget, view, context)
        self.windows, buffers = zip(*map(self.parts, self.capacities), strict=True)
        pairs = [*zip(self.capacities, buffers, strict=True)]
        inside = budget.counts_generated
        self.keep_counts = [capacity - inside * buffer for capacity, buffer in pairs]
        self.limits = [capacity + (not inside) * buffer for capacity, buffer in pairs]
        self.sizes = [*shape.lengths]  # tokens of each row in the cache
        self.queries: dict[int, LastQueries] = {}  # the last W of a layer
        self.steps = 0
        # ids [Hkv, n] of each row, in the order of the cache
        self.cache: dict[int, list[torch.Tensor]] = {}
        self.since = shape.lengths  # later tokens follow them

    def parts(self, capacity: int) -> tuple[int, int]:
        """Tokens of the window and of the buffer of a budget of `capacity` tokens."""
        if self.budget.counts_generated:
            return min(self.window, capacity // 8), min(self.buffer, capacity // 4)
        return self.window, self.buffer

    def reserved(self, capacity: int) -> int:
        """The window, and the buffer where it is inside."""
        window, buffer = self.parts(capacity)
        return window + self.budget.counts_generated * buffer

    def prefill(self, layer: int, prompt: Prompt) -> None:
        """Compress the prompt of each row that fills the cache."""
        self.queries[layer] = LastQueries(prompt.queries, self.window)
        lengths, heads = prompt.lengths, self.shape.kv_heads
        self.cache[layer] = [
            torch.arange(length, device=self.shape.device_of(layer)).expand(heads, -1)
            for length in lengths
        ]
        full = [row for row, length in enumerate(lengths) if length >= self.capacities[row]]
        self._compress(layer, full)
        if layer == self.shape.sparse_layers[-1]:
            self._note_sizes(full)

    def select(self, layer: int, query: torch.Tensor) -> None:
        """All that there is; the query may be one of the window's."""
        self.queries[layer].append(query)

    def end_step(self) -> None:
        """Compress the rows whose buffer is full."""
        self.steps += 1
        self.sizes = [size + 1 for size in self.sizes]
        full = [row for row, size in enumerate(self.sizes) if size == self.limits[row]]
        if full:
            for layer in self.shape.sparse_layers:
                self._append_newer(layer)
                self._compress(layer, full)
            self.since = self.view.lengths(self.shape.sparse_layers[0])
            self._note_sizes(full)

    def _note_sizes(self, full: Collection[int]) -> None:
        for row in full:
            self.sizes[row] = self.keep_counts[row]

    def _append_newer(self, layer: int) -> None:
        """What came since the last compression follows the cache."""
        cache, heads = self.cache[layer], self.shape.kv_heads
        for row, (first, last) in enumerate(zip(self.since, self.view.lengths(layer), strict=True)):
            newer = torch.arange(first, last, device=self.shape.device_of(layer))
            cache[row] = torch.cat([cache[row], newer.expand(heads, -1)], dim=1)

    def _compress(self, layer: int, rows: Collection[int]) -> None:
        """Keep the best tokens of these rows, and all of the others'."""
        cache = self.cache[layer]
        if rows:
            keys = self.view.keys(layer, stacked(cache))
            queries = self.queries[layer].ordered(self.steps)
            grouped = queries.unflatten(1, (self.shape.kv_heads, -1))
        for row in rows:
            row_keys = keys[row, :, : cache[row].shape[1]].float()
            row_queries = grouped[row, :, :, -self.windows[row] :].float()
            stays = at_ends(cache[row], self.shape.lengths[row], self.ends[row])
            slots = self._best(row_queries, row_keys, stays, self.keep_counts[row])
            cache[row] = cache[row].gather(1, slots)
        room = min(limit - ids.shape[1] for limit, ids in zip(self.limits, cache, strict=True))
        self.view.keep(layer, stacked(cache), room)

    def _best(
        self, queries: torch.Tensor, keys: torch.Tensor, stays: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Slots [Hkv, count] of keys [Hkv, n, D] to keep, by queries [Hkv, G, W, D]: best first,
        then the window's.

        Those that `stays` [Hkv, n] names come before all others.
        """
        window, older = queries.shape[2], keys.shape[1] - queries.shape[2]
        scores = importance(queries, keys, self.shape, self.kernel) * self.mix_lambda
        scores = scores - redundancy(keys)[:, :older] * (1 - self.mix_lambda)
        scores = scores.masked_fill(stays[:, :older], torch.inf)
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : count - window]
        latest = torch.arange(older, older + window, device=keys.device).expand(len(keys), -1)
        slots = torch.cat([best, latest], dim=1)
        return slots if self.order == "score" else slots.sort(dim=1).values

    def rule(self, layer: int, length: int, generated: int) -> int:
        """C, and as published the buffer."""
        capacity = self.budget.tokens(length)
        return capacity if self.budget.counts_generated else capacity + min(generated, self.buffer)


def importance(
    queries: torch.Tensor, keys: torch.Tensor, shape: Shape, kernel: int
) -> torch.Tensor:
    """What the keys before the window receive from its queries, in the mean, the largest of
    `kernel` neighbours.

    The logits of a group are joined by their maximum, and the softmax leaves the window's own keys
    out.

    Parameters
    ----------
    queries
        [Hkv, G, W, D], of the last W tokens.
    keys
        [Hkv, n, D].

    Returns
    -------
    torch.Tensor
        [Hkv, n - W].
    """
    before = keys[:, None, : keys.shape[1] - queries.shape[2]]
    logits = shape.logits((queries @ before.transpose(2, 3)).amax(dim=1))
    received = logits.softmax(dim=-1).mean(dim=1)
    pooled: torch.Tensor = max_pool1d(received, kernel, stride=1, padding=kernel // 2)
    return pooled


def redundancy(keys: torch.Tensor) -> torch.Tensor:
    """How much each of keys [H, n, D] resembles the others, a softmax over the n: [H, n].

    That is its mean cosine with them, but those of whom it is the latest near-duplicate count 0. A
    key without any leaves out its cosine with the first one, as the public code does.
    """
    total = keys.shape[1]
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    slot = torch.arange(total, device=keys.device)
    sums = keys.new_zeros(keys.shape[:2])
    for start in range(0, total, BLOCK):
        cosines = unit[:, start : start + BLOCK] @ unit.transpose(1, 2)
        cosines.diagonal(offset=start, dim1=1, dim2=2).zero_()
        latest = torch.where(cosines > SIMILAR, slot, 0).amax(dim=2, keepdim=True)
        sums += cosines.scatter_(2, latest, 0).sum(dim=1)
    return (sums / total).softmax(dim=-1)
