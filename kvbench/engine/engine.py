"""One generation's state: the stores, the method, the executor and the meters, and the order in which they meet.

`generate.py` and `hf.KVCache` say which phase a forward pass belongs to; `hf.py` then calls `attend` once per layer.
The engine knows no method by name and no transformers class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kvbench.attention.executor import executor
from kvbench.budget import Budget
from kvbench.config import ConfigError, first_line
from kvbench.engine.audit import Audit
from kvbench.engine.positions import CachePositions, Rotary
from kvbench.engine.probes import Probe
from kvbench.engine.prompt import PromptReader
from kvbench.memory.store import LayerStore
from kvbench.memory.view import StoreView
from kvbench.method import Context, HeadScores, Method, Needs, Prompt, Selection, Shape
from kvbench.spans import Spans


@cache
def worker_pool() -> ThreadPoolExecutor:
    """The one pool in which all background index work of this process runs."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvbench")


class Engine:
    """Runs one method through one generation.

    Args:
        shape, method, budget: see `kvbench.method`.
        offsets: column of each row's first token in the prefill's forward passes (left padding); None: all 0.
        columns: width of the whole prompt there, padding included; None: the longest row.
        attention: which executor: "auto", "cpu", "torch", "reference" or "flashinfer".
        seed, sample: what the method's randomness derives from.
        new_tokens: decode steps to reserve memory for; None: unknown, the stores grow.
        audit_every: steps between two counts of per-query-head selections.
        probe_every: steps between two comparisons with full attention; 0: none.
        rotary: the model's, for methods with positions="cache".
        pieces: text of every vocabulary entry, for methods that need it.
        head_scores: of the model, for methods that need them.

    Raises:
        ConfigError: the method cannot keep to this budget, or cannot run on this model.
    """

    def __init__(
        self,
        shape: Shape,
        method: Method,
        budget: Budget,
        *,
        offsets: Sequence[int] | None = None,
        columns: int | None = None,
        attention: str = "auto",
        seed: int = 0,
        sample: str = "",
        new_tokens: int | None = None,
        audit_every: int = 1,
        probe_every: int = 0,
        rotary: Rotary | None = None,
        pieces: Sequence[str] | None = None,
        head_scores: HeadScores | None = None,
    ) -> None:
        self.shape, self.method, self.budget = shape, method, budget
        self.executor = executor(attention, shape)
        self.spans, self.audit = Spans(shape.device), Audit(shape, audit_every)
        self.stores: dict[int, LayerStore] = {}
        self.probe = Probe(shape, probe_every) if probe_every else None
        self.prefilled = False
        self._positions = None
        if method.needs.positions == "cache":
            assert rotary is not None, "this engine was made without the model's rotary positions"
            self._positions = CachePositions(shape, rotary)
        self._new_tokens = new_tokens
        self._sparse = frozenset(shape.sparse_layers)
        self._reader = PromptReader(shape.lengths, offsets, columns, method.needs, shape.scaling)
        self._active: list[bool] = [True] * shape.batch
        context = Context(seed, sample, worker_pool(), self.spans, pieces, new_tokens, head_scores)
        try:
            method.begin(shape, budget, StoreView(self.stores, self.audit.read), context)
        except ValueError as error:  # what only the model's shape or its tokenizer tells
            raise ConfigError(first_line(error)) from error

    @property
    def capacity(self) -> int:
        """Tokens a row that memory is reserved for."""
        return self._reader.columns + (self._new_tokens or 0)

    # -- phases ----------------------------------------------------------------------------------------------------

    def start_chunk(self, token_ids: torch.Tensor) -> None:
        """A prefill forward of the next columns, token_ids [B, q], begins."""
        assert not self.prefilled, "the prompt is complete"
        self._reader.start_chunk(token_ids)

    def start_step(self, tokens: torch.Tensor, active: Sequence[bool] | None = None) -> None:
        """A decode forward begins: tokens [B] on the CPU; `active` says which rows still generate (None: all)."""
        assert self.prefilled, "the prompt is not complete"
        if active is not None:
            self._active = list(active)
        if self._positions is not None:
            self._positions.start_step()
        with self.spans("index_update"):
            self.method.step(tokens, torch.tensor(self.stores[0].lengths), torch.tensor(self._active))

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer in the forward pass that was started.

        Args:
            query: [B, Hq, q, D], post-RoPE.
            key, value: [B, Hkv, q, D], the new tokens only.

        Returns:
            [B, Hq, q, D].
        """
        if self.prefilled:
            return self._decode(layer, query, key, value)
        return self._prefill(layer, query, key, value)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        reader, store = self._reader, self._store(layer)
        with self.spans("attention"):
            store.write_prompt(key, value, reader.column, reader.offsets)
            out = self.executor.prefill(query, store, reader.column, reader.offsets, self.shape.scaling)
        if layer in self._sparse:
            with self.spans("index_build"):
                reader.observe(layer, query, store)
        if reader.last_chunk:
            self._end_prompt(layer, store)
        return out

    def fill(self, layer: int, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor) -> None:
        """Store a layer's whole prompt that no forward pass has made, in layer order, after one `start_chunk`.

        Args:
            key, value: [B, Hkv, N, D], rows of one length.
            query: [B, Hq, W, D], the last queries of the prompt, W the method's window or more.
        """
        store = self._store(layer)
        store.write_prompt(key, value, 0, self._reader.offsets)
        if layer in self._sparse:
            self._reader.observe_last(layer, query)
        self._end_prompt(layer, store)

    def _end_prompt(self, layer: int, store: LayerStore) -> None:
        store.seal_prompt(self.shape.lengths)
        self._begin_layer(layer, store, self._reader.prompt(layer, store) if layer in self._sparse else None)

    def adopt(self, layer: int, shared: LayerStore, prompt: Prompt) -> LayerStore:
        """Begin a layer from a prefill made elsewhere, in layer order; returns the store that shares its memory."""
        store = self._store(layer, shared)
        if layer in self._sparse:
            self._begin_layer(layer, store, replace(prompt, on_host=store.on_host(prompt.keys.shape[2])))
        else:
            self._begin_layer(layer, store, None)
        return store

    def _begin_layer(self, layer: int, store: LayerStore, prompt: Prompt | None) -> None:
        """The whole prompt of a layer is stored: build its index (`prompt`: of a sparse layer), then decode."""
        if prompt is not None:
            if self.probe is not None:
                self.probe.begin_layer(layer, store)
            with self.spans("index_build"):
                self.method.prefill(layer, prompt)
            store.leave_device()
        if layer == self.shape.layers - 1 and not self.method.needs.layer_similarity:
            self.end_prefill()

    def residual(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """For `Needs.layer_similarity`: what a layer's attention has made of the hidden states in a prefill forward.

        Args:
            before, after: [B, q, E], the hidden states before attention and with it added.
        """
        self._reader.observe_residual(layer, before, after)
        if self._reader.last_chunk and layer == self.shape.layers - 1:
            self.end_prefill(self._reader.similarity())

    def end_prefill(self, similarity: torch.Tensor | None = None) -> None:
        """All layers are there, and `similarity` [layers, B] where the method needs it; decoding may begin."""
        with self.spans("index_build"):
            if similarity is not None:
                self.method.observe_layers(similarity[list(self.shape.sparse_layers)])
            self.method.end_prefill()
        self.prefilled = True

    def _store(self, layer: int, shared: LayerStore | None = None) -> LayerStore:
        if layer not in self.stores:
            needs = self.method.needs if layer in self._sparse else Needs()
            self.stores[layer] = LayerStore(
                self.shape.batch,
                self.shape.kv_heads,
                self.shape.head_dim,
                self.capacity,
                self.shape.dtype,
                self.shape.device,
                home=needs.home,
                on_drop=needs.on_drop,
                grows=self._new_tokens is None,
                in_place=self.executor.in_place,
                moved=self.audit.moved,
                spans=self.spans,
                shared=shared,
            )
        return self.stores[layer]

    # -- decode ----------------------------------------------------------------------------------------------------

    def _decode(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        store = self.stores[layer]
        with self.spans("attention"):
            store.append(key, value)
        if layer not in self._sparse:
            with self.spans("attention"):
                return self._end_layer(layer, self.executor(query, store, None, self.shape.scaling)[0])
        with self.spans("index_update"):
            self.method.append(layer, key, value)
        with self.spans("select"):
            selection = self.method.select(layer, query)
        with self.spans("attention"):
            asked, attended = query, selection
            if self._positions is not None:
                asked, attended = self._positions(query, selection or Selection(store.resident_ids()), store)
            observes = self.method.needs.probabilities
            out, weights = self.executor(asked, store, attended, self.shape.scaling, observes)
        self.audit.attended(layer, selection, store.device.used)
        if self.probe is not None:
            self.probe.step(layer, query, key, value, selection, store.resident_ids(), out, self._active)
        if weights is not None:
            with self.spans("index_update"):
                self.method.observe(layer, selection, weights)
        return self._end_layer(layer, out)

    def _end_layer(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        if layer == self.shape.layers - 1:
            with self.spans("index_update"):
                self.method.end_step()
        return out

    def settle(self) -> None:
        """Count the step that just ended; called outside the timed part, or before the next step begins."""
        self.spans.fold()
        for store in self.stores.values():
            store.count_fetched()
        device = sum(store.resident_bytes() for store in self.stores.values())
        allocated = sum(store.allocated_bytes() for store in self.stores.values())
        host = sum(store.host_bytes() for store in self.stores.values())
        self.audit.end_step(self.method, self.shape.lengths, self._active, device, allocated, host)

    def report(self) -> dict[str, Any]:
        """The audit so far, with the executor that ran, the dtype it ran in, and the method's own numbers."""
        size = self.budget.size
        budget = None if size is None else self.budget.tokens(max(self.shape.lengths))
        stored = [tensor for store in self.stores.values() for tensor in store.tensors()]
        report = {
            **self.method.report(),
            **self.audit.report(self.method, budget, stored),
            "executor": self.executor.used(),
            "dtype": str(self.shape.dtype).removeprefix("torch."),
        }
        if self.executor.note:
            report["executor_note"] = self.executor.note
        if any(store.host is not None for store in self.stores.values()):
            copied = "measured" if self.shape.device.type == "cuda" else "simulated"
            report["transfer"] = "in place" if self.executor.in_place else copied
        return report
