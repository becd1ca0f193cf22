"""One generation's state: the stores, the method, the executor and the meters, and the order in which they meet.

`generate.py` and `hf.KVCache` say which phase a forward pass belongs to; `hf.py` then calls `attend` once per layer.
The engine knows no method by name and no transformers class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvbench import attention
from kvbench.attention.torch import prefill as dense_attention
from kvbench.meters import Audit, Spans
from kvbench.method import Budget, Context, Method, Prompt, Shape
from kvbench.store import LayerStore, View


@cache
def worker_pool() -> ThreadPoolExecutor:
    """The one pool in which all background index work of this process runs."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvbench")


@dataclass
class _Chunk:
    """The columns of the prefill forward that runs: column .. column + width - 1."""

    column: int
    width: int


class Engine:
    """Runs one method through one generation.

    Args:
        shape, method, budget: see `kvbench.method`.
        offsets: column of each row's first token in the prefill's forward passes (left padding); None: all 0.
        columns: width of the whole prompt there, padding included; None: the longest row.
        executor: "auto", "torch" or "reference".
        seed, sample: what the method's randomness derives from.
        new_tokens: decode steps to reserve memory for; None: unknown, the stores grow.
        audit_every: steps between two counts of per-query-head selections.
        pieces: text of every vocabulary entry, for methods that need it.
    """

    def __init__(
        self,
        shape: Shape,
        method: Method,
        budget: Budget,
        *,
        offsets: Sequence[int] | None = None,
        columns: int | None = None,
        executor: str = "auto",
        seed: int = 0,
        sample: str = "",
        new_tokens: int | None = None,
        audit_every: int = 1,
        pieces: Sequence[str] | None = None,
    ) -> None:
        self.shape, self.method, self.budget = shape, method, budget
        self.executor_name, self._execute = attention.executor(executor)
        self.spans, self.audit = Spans(), Audit(shape, audit_every)
        self.stores: dict[int, LayerStore] = {}
        self._new_tokens = new_tokens
        self._sparse = frozenset(shape.sparse_layers)
        self._offsets = tuple(offsets or [0] * shape.batch)
        self._columns = columns or max(shape.lengths)
        self._chunk: _Chunk | None = _Chunk(0, 0)
        self._queries: dict[int, torch.Tensor] = {}
        self._token_ids: list[torch.Tensor] = []
        self._active: list[bool] = [True] * shape.batch
        context = Context(seed, sample, worker_pool(), self.spans, pieces)
        method.begin(shape, budget, View(self.stores, self.audit), context)

    # -- phases ----------------------------------------------------------------------------------------------------

    @property
    def prefilled(self) -> bool:
        """All of the prompt has been read."""
        return self._chunk is None

    def start_chunk(self, token_ids: torch.Tensor) -> None:
        """A prefill forward of the next columns, token_ids [B, q], begins."""
        assert self._chunk is not None, "the prompt is complete"
        self._chunk = _Chunk(self._chunk.column + self._chunk.width, token_ids.shape[1])
        self._token_ids.append(token_ids)

    def start_step(self, tokens: torch.Tensor, active: Sequence[bool] | None = None) -> None:
        """A decode forward begins: tokens [B]; `active` says which rows still generate (None: all)."""
        assert self.prefilled, "the prompt is not complete"
        if active is not None:
            self._active = list(active)
        if self._sparse:
            first = self.stores[min(self._sparse)]
            device = tokens.device
            with self.spans("index_update"):
                self.method.step(
                    tokens, torch.tensor(first.lengths, device=device), torch.tensor(self._active, device=device)
                )

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer in the forward pass that was started.

        Args:
            query: [B, Hq, q, D], post-RoPE.
            key, value: [B, Hkv, q, D], the new tokens only.

        Returns:
            [B, Hq, q, D].
        """
        if self._chunk is not None:
            return self._prefill(layer, query, key, value)
        return self._decode(layer, query, key, value)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert self._chunk is not None
        store = self._store(layer, key)
        with self.spans("attention"):
            store.write_prompt(key, value, self._chunk.column, self._offsets)
            out = dense_attention(query, store, self._chunk.column, self._offsets, self.shape.scaling)
        if layer in self._sparse and self.method.needs.query_window:
            self._collect_queries(layer, query)
        if self._chunk.column + self._chunk.width == self._columns:
            self._finish_prompt(layer, store)
        return out

    def _store(self, layer: int, key: torch.Tensor) -> LayerStore:
        if layer not in self.stores:
            batch, kv_heads, _, head_dim = key.shape
            capacity = self._columns + (self._new_tokens or 0)
            grows = self._new_tokens is None
            self.stores[layer] = LayerStore(batch, kv_heads, head_dim, capacity, key.dtype, key.device, grows)
        return self.stores[layer]

    def _finish_prompt(self, layer: int, store: LayerStore) -> None:
        store.seal_prompt(self.shape.lengths)
        if layer in self._sparse:
            longest = max(self.shape.lengths)
            prompt = Prompt(
                lengths=self.shape.lengths,
                token_ids=self._aligned_token_ids(),
                keys=store.key[:, :, :longest],
                values=store.value[:, :, :longest],
                queries=self._window(layer, store),
            )
            with self.spans("index_build"):
                self.method.prefill(layer, prompt)
        if layer == self.shape.layers - 1:
            with self.spans("index_build"):
                self.method.end_prefill()
            self._chunk = None
            self._queries.clear()
            self._token_ids.clear()

    def _collect_queries(self, layer: int, query: torch.Tensor) -> None:
        """Copy into the window [B, Hq, W, D] what this chunk holds of each row's last W queries."""
        assert self._chunk is not None
        batch, heads, width, head_dim = query.shape
        size = min(self.method.needs.query_window, max(self.shape.lengths))
        if layer not in self._queries:
            self._queries[layer] = query.new_zeros(batch, heads, size, head_dim)
        window = self._queries[layer]
        for row, (length, offset) in enumerate(zip(self.shape.lengths, self._offsets, strict=True)):
            # window place 0 is column `start`; the row's own tokens begin no earlier than its offset
            start = offset + length - size
            first = max(self._chunk.column, start, offset)
            last = min(self._chunk.column + width, offset + length)
            if first < last:
                source = query[row, :, first - self._chunk.column : last - self._chunk.column]
                window[row, :, first - start : last - start] = source

    def _window(self, layer: int, store: LayerStore) -> torch.Tensor:
        empty = store.key.new_zeros(self.shape.batch, self.shape.query_heads, 0, self.shape.head_dim)
        return self._queries.get(layer, empty)

    def _aligned_token_ids(self) -> torch.Tensor:
        """[B, N] token ids of the whole prompt, left-aligned, 0 behind a row's end."""
        ids = torch.cat(self._token_ids, dim=1)
        self._token_ids = [ids]
        aligned = ids.new_zeros(ids.shape[0], max(self.shape.lengths))
        for row, (length, offset) in enumerate(zip(self.shape.lengths, self._offsets, strict=True)):
            aligned[row, :length] = ids[row, offset : offset + length]
        return aligned

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        store, selection = self.stores[layer], None
        observes = layer in self._sparse and self.method.needs.probabilities
        with self.spans("attention"):
            store.append(key, value)
        if layer in self._sparse:
            with self.spans("index_update"):
                self.method.append(layer, key, value)
            with self.spans("select"):
                selection = self.method.select(layer, query)
            self.audit.attended(layer, selection, store.used)
        with self.spans("attention"):
            out, weights = self._execute(query, store, selection, self.shape.scaling, observes)
        if weights is not None:
            with self.spans("index_update"):
                self.method.observe(layer, selection, weights)
        if layer == self.shape.layers - 1:
            with self.spans("index_update"):
                self.method.end_step()
        return out

    def settle(self) -> None:
        """Count the step that just ended; called outside the timed part, or before the next step begins."""
        held = sum(store.resident_bytes() for store in self.stores.values())
        self.audit.end_step(self.method, self.shape.lengths, self._active, held)

    def report(self) -> dict[str, Any]:
        """The audit so far, with the executor that ran."""
        size = self.budget.size
        budget = None if size is None else self.budget.tokens(max(self.shape.lengths))
        return {**self.audit.report(self.method, budget), "executor": self.executor_name}
