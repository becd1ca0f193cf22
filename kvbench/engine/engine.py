"""One generation's state: the stores, the method, the executor and the meters, and the order in
which they meet.

Who makes the forward passes says which phase each belongs to, and calls `attend` once per layer.
The engine knows no method by name and no transformers class.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.attention import torch as dense
from kvbench.attention.cpu import READABLE
from kvbench.attention.executor import executor
from kvbench.attention.sinks import with_sinks
from kvbench.budget import Budget
from kvbench.config import ConfigError, first_line
from kvbench.engine.audit import Audit, attended_bytes
from kvbench.engine.captured import CapturedStep, Forward, Repeats
from kvbench.engine.positions import CachePositions, ModelRotation, Rotary
from kvbench.engine.probes import Probe
from kvbench.engine.prompt import PromptReader
from kvbench.engine.replay import Template
from kvbench.kernels.library import why_missing
from kvbench.kernels.tokens import finite
from kvbench.memory.kinds import KV, NATIVE
from kvbench.memory.store import LayerStore
from kvbench.memory.transfer import computing_on, uploaded
from kvbench.memory.view import StoreView
from kvbench.method import Context, HeadScores, Method, Prompt, Replayed, Selection, Shape
from kvbench.models.heads import refuse_other_shape
from kvbench.spans import Spans


@cache
def worker_pool() -> ThreadPoolExecutor:
    """The one pool in which all background index work of this process runs."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="kvbench")


class TurnTokens(NamedTuple):
    """Tokens of a turn in one layer, [B, H, q, D] each: queries have q = 0 where nobody asks for
    them. `sinks` as of `Engine.attend`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None

    def column(self, at: int) -> TurnTokens:
        """A token of each row."""
        here = slice(None), slice(None), slice(at, at + 1)
        return TurnTokens(self.query[here], self.key[here], self.value[here], self.sinks)


class LayerMemory(Protocol):
    """Keys and values of a layer."""

    def resident_bytes(self) -> int:
        """Bytes of those on the device."""

    def allocated_bytes(self) -> int:
        """Bytes that they take there."""


class KeptMemory(LayerMemory, Protocol):
    """A layer, or a part of it, that the model keeps itself: a window, or a state."""

    def state_bytes(self) -> int:
        """Bytes of what it holds beside keys and values."""

    def copy(self, rows: slice = slice(None)) -> KeptMemory:
        """One that goes on by itself from what rows hold."""


@dataclass(frozen=True)
class Settings:
    """How an engine runs its method.

    Attributes
    ----------
    attention
        which executor: "auto", "cpu", "torch", "reference" or "flashinfer".
    kv
        how keys and values are held once the prompt is over.
    seed, samples
        what the method's randomness derives from, see `kvbench.method.Context`.
    new_tokens
        decode steps to reserve memory for; None: unknown, the stores grow.
    audit_every
        steps between two counts of per-query-head selections.
    probe_every
        steps between two comparisons with full attention; 0: none.
    rotary
        the model's, for methods with positions="cache" or rotation.
    pieces
        text of every vocabulary entry, for methods that need it.
    head_scores
        of the model, for methods that need them.
    template
        the tokenizer's, for methods that need prefixes.
    output
        see `kvbench.method.Context`.
    cuda_graphs
        a GPU repeats steps by itself, see `CapturedStep`; False: each is run as ever.
    """

    attention: str = "auto"
    kv: KV = NATIVE
    seed: int = 0
    samples: Sequence[str] = ("",)
    new_tokens: int | None = None
    audit_every: int = 1
    probe_every: int = 0
    rotary: Rotary | None = None
    pieces: Sequence[str] | None = None
    head_scores: HeadScores | None = None
    template: Template | None = None
    output: Callable[[int], Tensor] | None = None
    cuda_graphs: bool = True

    def positions(self, shape: Shape, method: Method) -> CachePositions | None:
        """Where a method's keys stand, if not where they stood in the text."""
        if method.needs.positions != "cache":
            return None
        assert self.rotary is not None, "this engine was made without the model's rotary positions"
        return CachePositions(shape, self.rotary)

    def context(self, shape: Shape, spans: Spans) -> Context:
        """What a method is given of it."""
        rotation = None if self.rotary is None else ModelRotation(self.rotary)
        resources = self.pieces, self.new_tokens, self.head_scores, rotation, self.output
        return Context(self.seed, tuple(self.samples), worker_pool(), spans, *resources)


class Engine:
    """Runs one method through one generation.

    Parameters
    ----------
    shape, method, budget
        see `kvbench.method`.
    offsets
        column of each row's first token in the prefill's forward passes (left padding); None: all
        0.
    columns
        width of the whole prompt there, padding included; None: the longest row.
    settings
        see `Settings`.

    Attributes
    ----------
    windowed
        the layers of which the model keeps all or a part itself, by index.
    waiting
        layers that wait for a replay, each with what the method will be shown; None: a dense one.
    replay_tokens
        tokens of it, of all rows.

    Raises
    ------
    ConfigError
        the method cannot keep to this budget, or cannot run on this model.
    """

    def __init__(
        self,
        shape: Shape,
        method: Method,
        budget: Budget,
        *,
        offsets: Sequence[int] | None = None,
        columns: int | None = None,
        **settings: Any,
    ) -> None:
        self.shape, self.method, self.budget = shape, method, budget
        self._how = how = Settings(**settings)
        self.executor, self.template = executor(how.attention, shape, how.kv), how.template
        self.spans, self.audit = Spans(shape.device), Audit(shape, how.audit_every)
        self.stores: dict[int, LayerStore] = {}
        self.waiting: dict[int, Prompt | None] = {}
        self.replay_tokens = 0
        self.windowed: Mapping[int, KeptMemory] = {}
        self.probe = Probe(shape, how.probe_every) if how.probe_every else None
        self.prefilled = False
        self._turn: Tensor | None = None  # tokens [B, q] that are read at once
        self._turn_tokens: dict[int, TurnTokens] = {}  # of each layer so far
        self._positions = how.positions(shape, method)
        self._sparse, self._last = frozenset(shape.sparse_layers), shape.full_layers[-1]
        self._last_reader = shape.readers(self._last)[-1]
        # of the step, for layers that reuse what a method learns of by its layer's queries alone
        self._selected: dict[int, Selection | None] = {}
        logits = shape.scaling, shape.softcap
        self._reader = PromptReader(shape.lengths, offsets, columns, method.needs, *logits)
        self.offsets = self._reader.offsets
        self._active: list[bool] = [True] * shape.batch
        self.view = StoreView(self.stores, self.audit.read)
        self.captured: CapturedStep | None = None  # made by the first `run` of one that can be
        self._whole = False  # a captured step is one graph
        self._repeats: Repeats | None = None  # see `note_repeats`
        self._has_sinks = False
        try:
            if method.needs.head_scores and how.head_scores is not None:
                refuse_other_shape(how.head_scores, shape, method.needs.measures)
            method.begin(shape, budget, self.view, how.context(shape, self.spans))
        except ValueError as error:  # what only the model's shape or its tokenizer shows
            raise ConfigError(first_line(error)) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """An engine that goes on from here by itself, between two forward passes; it times anew."""
        shared = self._how, self._how.rotary, self._how.pieces, worker_pool()
        memo.update({id(thing): thing for thing in shared})
        memo[id(self.spans)] = Spans(self.shape.device)
        memo[id(self.executor)] = executor(self._how.attention, self.shape, self._how.kv)
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    @property
    def capacity(self) -> int:
        """Tokens a row that memory is reserved for."""
        return self._reader.columns + (self._how.new_tokens or 0)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far."""
        return self.stores[self._last].lengths

    # -- phases ------------------------------------------------------------------------------------

    def start_chunk(self, token_ids: Tensor) -> None:
        """A prefill forward of the next columns, token_ids [B, q], begins."""
        assert not self.prefilled, "the prompt is complete"
        self._reader.start_chunk(token_ids)

    def start_step(self, tokens: Tensor, active: Sequence[bool] | None = None) -> None:
        """A decode forward begins: tokens [B] on the CPU; `active` says which rows still generate
        (None: all).
        """
        assert self.prefilled, "the prompt is not complete"
        self._turn = None
        self._active = self._active if active is None else list(active)
        with self.spans("index_update"):
            self.method.step(tokens, torch.tensor(self.lengths), torch.tensor(self._active))

    def start_turn(self, token_ids: Tensor) -> None:
        """A pass of several more tokens of every row, token_ids [B, q], read at once, as a later
        turn of a conversation is.

        They attend all that any tier still has, and themselves, causally. After the last layer they
        are stored one after the other, and the method learns of each as of a generated token.
        """
        assert self.prefilled, "the prompt is not complete"
        self._turn, self._turn_tokens = token_ids.cpu(), {}
        self.audit.start_turn()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        *,
        valid: bool = False,
    ) -> Tensor:
        """Attention [B, Hq, q, D] of one layer in the pass that was started; of sparse ones after
        `check_finite`.

        Parameters
        ----------
        query, key, value
            [B, Hq or Hkv, q, D], of the new tokens only, post-RoPE.
        sinks
            [Hq], see `kvbench.attention.sinks`; None: the model has none.
        valid
            queries and keys were checked before.
        """
        if self.captured is None or self._whole:
            return self._attend(layer, query, key, value, sinks, valid)

        def part() -> Tensor:
            # a method may keep what it is shown, and a graph fills its tensors anew in each step
            copies = query.clone(), key.clone(), value.clone()
            return self._attend(layer, *copies, sinks, valid)

        return self.captured.outside(part)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        valid: bool,
    ) -> Tensor:
        self.spans.on(query.device)
        with computing_on(query.device):
            if query.shape[2] == 1:
                query, key = query.contiguous(), key.contiguous()
                value = value.contiguous()
            if self.shape.source(layer) in self._sparse and not valid:
                check_finite(layer, query, key, self.prefilled)
            attend = (
                self._prefill
                if not self.prefilled
                else self._decode
                if self._turn is None
                else self._read_at_once
            )
            return attend(layer, query, key, value, sinks)

    # -- steps that the device repeats by itself ---------------------------------------------------

    def run(self, inputs: Tensor, forward: Forward) -> Tensor:
        """Logits of the decode step that was started, captured where that can be.

        Arguments as of `CapturedStep.__call__`; `forward` calls `attend` of all layers.
        """
        if self.captured is None and self._can_be_captured():
            self.captured = CapturedStep(self, self.shape.device)
        if self.captured is None:
            return forward(*uploaded(inputs, self.shape.device))
        self._whole = self._needs_no_host()
        logits = self.captured(inputs, forward)
        if self._whole:
            self._end_step()
        return logits

    def _can_be_captured(self) -> bool:
        shape = self.shape
        # a model's windows move in memory with each token, and a graph is of one device
        return (
            self._how.cuda_graphs
            and shape.device.type == "cuda"
            and not shape.elsewhere
            and not self.windowed
        )

    def _needs_no_host(self) -> bool:
        """Whether the host has no part in what layers select and attend."""
        if self._how.kv.grouped or self.probe or self._has_sinks:
            return False
        if any(store.host is not None for store in self.stores.values()):
            return False
        return self.method.at_rest or not self.method.needs.host_step

    def layout(self) -> object:
        """Where all is that a captured step reads and writes; None: the next step moves it."""
        if not self._whole:
            return ()
        layouts = [store.layout for store in self.stores.values()]
        method = () if self.method.at_rest else self.method.layout
        return None if None in layouts or method is None else (layouts, method)

    def note_repeats(self, repeats: Repeats | None) -> None:
        """Note in `repeats` what is counted in the step that follows; None: no longer."""
        self._repeats = self.view.repeats = repeats

    # -- prefill -----------------------------------------------------------------------------------

    def _prefill(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        reader, source = self._reader, self.shape.source(layer)
        store = self._store(source)
        with self.spans("attention"):
            if source == layer:
                store.write_prompt(key, value, reader.column, reader.offsets)
            # a layer that reuses may be asked about the last columns alone
            column = reader.column + reader.width - query.shape[2]
            out = self.executor.prefill(
                query, store, column, reader.offsets, self.shape.scaling, sinks
            )
        if layer in self._sparse:
            with self.spans("index_build"):
                reader.observe(layer, query, store, sinks)
        if reader.last_chunk and layer == self.shape.readers(source)[-1]:
            self._end_prompt(source, store)
        return out

    def fill(self, layer: int, key: Tensor, value: Tensor, query: Tensor) -> None:
        """Store a layer's whole prompt that no forward pass has made, in layer order, after one
        `start_chunk`.

        Parameters
        ----------
        key, value
            [B, Hkv, N, D], rows of one length.
        query
            [B, Hq, W, D], the last queries of the prompt, W the method's window or more.
        """
        store = self._store(layer)
        store.write_prompt(key, value, 0, self._reader.offsets)
        if layer in self._sparse:
            self._reader.observe_last(layer, query)
        self._end_prompt(layer, store)

    def _end_prompt(self, layer: int, store: LayerStore) -> None:
        store.seal_prompt(self.shape.lengths)
        self.waiting[layer] = self._reader.prompt(layer, store) if layer in self._sparse else None
        if self.method.needs.replay is None:
            self.begin_layers({})

    def adopt(self, layer: int, rows: tuple[Tensor, Tensor], prompt: Prompt) -> LayerStore:
        """Begin a layer from a prefill made elsewhere, in layer order; returns the store, which
        uses the memory of its keys and values.
        """
        store = self.stores[layer] = self._layer_store(layer, rows)
        store.seal_prompt(self.shape.lengths)
        shown = replace(prompt, **store.first(max(self.shape.lengths)))
        self.waiting[layer] = shown if layer in self._sparse else None
        self.begin_layers({})
        return store

    def begin_layers(self, replayed: Mapping[int, tuple[Replayed, ...]]) -> None:
        """Build the indexes of the layers that wait, whose whole prompts are stored; `replayed` is
        what a replay has shown of each.
        """
        waiting, self.waiting = self.waiting, {}
        for layer, prompt in waiting.items():
            if prompt is not None:
                store, replays = self.stores[layer], replayed.get(layer, prompt.replayed)
                if self.probe is not None:
                    self.probe.begin_layer(layer, store)
                with self.spans("index_build"):
                    self._build_index(layer, replace(prompt, replayed=replays))
                store.leave_device()
            if layer == self._last and not self.method.needs.layer_similarity:
                self.end_prefill()

    def take_inputs(self, layer: int, states: Tensor) -> None:
        """For `Needs.inputs`: what a layer's attention reads of a chunk, [B, q, E], before
        `attend`.
        """
        if layer in self._sparse:
            self._reader.observe_inputs(layer, states)

    def residual(self, layer: int, before: Tensor, after: Tensor) -> None:
        """For `Needs.layer_similarity`: the hidden states [B, q, E] before a layer's attention and
        with it added.
        """
        self._reader.observe_residual(layer, before, after)
        if self._reader.last_chunk and layer == self.shape.layers - 1:
            self.end_prefill(self._reader.similarity(self.shape.layers))

    def end_prefill(self, similarity: Tensor | None = None) -> None:
        """All layers are there, and `similarity` [layers, B] where the method needs it; decoding
        may begin.
        """
        with self.spans("index_build"):
            if similarity is not None:
                self.method.observe_layers(similarity[list(self.shape.sparse_layers)])
            self.method.end_prefill()
        with self.spans("attention"):
            for store in self.stores.values():
                store.encode()
        self.audit.end_prefill()
        self.prefilled = True

    def _build_index(self, layer: int, prompt: Prompt) -> None:
        """Show the method the prompt of a layer.

        Raises
        ------
        ConfigError
            something is wrong that only the prompt shows.
        """
        if self.template is not None:
            prompt = replace(prompt, prefixes=self.template.prefixes(prompt))
        self.replay_tokens = sum(replay.queries.shape[1] for replay in prompt.replayed)
        try:
            self.method.prefill(layer, prompt)
        except ValueError as error:
            raise ConfigError(first_line(error)) from error

    def _store(self, layer: int) -> LayerStore:
        if layer not in self.stores:
            self.stores[layer] = self._layer_store(layer)
        return self.stores[layer]

    def _layer_store(self, layer: int, shared: tuple[Tensor, Tensor] | None = None) -> LayerStore:
        """A fresh store for a layer; `shared`: as of `LayerStore`."""
        shape, audit = self.shape, self.audit
        return LayerStore(
            shape.batch,
            shape.kv_heads,
            shape.head_dim,
            self.capacity,
            shape.dtype,
            shape.device_of(layer),
            latent_dim=shape.latent_dim,
            **(_wishes(self.method, layer) if layer in shape.sparse_layers else {}),
            grows=self._how.new_tokens is None,
            in_place=self.executor.in_place,
            kv=self._how.kv.of_layer(layer, shape.layers, len(shape.windows)),
            moved=audit.moved,
            count_hits=audit.count_hits,
            spans=self.spans,
            shared=shared,
        )

    # -- decode ------------------------------------------------------------------------------------

    def _decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        source, spans = self.shape.source(layer), self.spans
        store, stores, sparse = self.stores[source], source == layer, source in self._sparse
        selection: Selection | None = None
        self._has_sinks = sinks is not None
        with spans("attention"):
            if stores:
                store.append(key, value)
                if self._repeats is not None:
                    self._repeats.append(store.advance)
            if sparse:
                if stores:
                    spans.then("index_update")
                    self.method.append(layer, key, value)
                spans.then("select")
                selection = self._select(layer, query)
                spans.then("attention")
            attended = selection
            if sparse and self._positions is not None:
                attended = self._positions(
                    selection or Selection(store.resident_ids()), store, query.device
                )
            attended = with_sinks(attended, store, sinks, key)
            observes = sparse and stores and self.method.needs.probabilities
            out, weights = self.executor(query, store, attended, self.shape.scaling, observes)
        if sparse:
            note = partial(self.audit.attended, layer, selection, store.device.numbers)
            note()
            if self._repeats is not None:
                self._repeats.append(note)
            if self.probe is not None and stores:
                resident = store.resident_ids()
                self.probe.step(
                    layer, query, key, value, selection, resident, out, self._active, sinks
                )
        if weights is not None:
            weights = weights if sinks is None else weights[..., :-1]
            with spans("index_update"):
                self.method.observe(
                    layer,
                    selection,
                    self._positions.in_order(weights) if self._positions else weights,
                )
        if layer == self._last_reader and not self._whole:
            self._end_step()
        return out

    def _select(self, layer: int, query: Tensor) -> Selection | None:
        """What a layer attends; one that reuses another is asked about as that one, by queries of
        its own unless the method learns from queries: it learns from those of the layer that
        stores.
        """
        source, needs = self.shape.source(layer), self.method.needs
        if source != layer and (needs.queries or needs.probabilities):
            return self._selected[source]
        selection = self.method.select(source, query)
        if self.shape.reuses:
            self._selected[source] = selection
        return selection

    def _end_step(self) -> None:
        with self.spans("index_update"):
            self.method.end_step()

    # -- later turns -------------------------------------------------------------------------------

    def _read_at_once(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        asks = self.method.needs.queries or self.method.needs.probabilities
        shown = query if asks and layer in self._sparse else query[:, :, :0]
        source = self.shape.source(layer)
        if source == layer:
            self._turn_tokens[layer] = TurnTokens(shown, key, value, sinks)
        with self.spans("attention"):
            self.audit.moved(self.stores[source].remote_bytes())
            last = query.shape[2]
            if source != layer:  # it may be asked about the last tokens alone
                query = pad(query, (0, 0, key.shape[2] - last, 0))
            out = self.over_remaining(source, query, key, value, sinks)[:, :, -last:]
        if layer == self._last_reader and self._turn is not None:
            with self.spans("index_update"):
                self.take_in(self._turn, lambda layer, at: self._turn_tokens[layer].column(at))
            self._turn_tokens.clear()
        return out

    def over_remaining(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of tokens after the prompt over all that any tier still has, and themselves."""
        store, weights = self.stores[layer], None
        past = store.remaining()
        if layer in self._sparse:
            weights = self.method.turn_weights(layer)
            if self._positions is not None:
                past = past._replace(key=self._positions.of_turn(past.key, store))
        scaling, softcap = self.shape.scaling, self.shape.softcap
        return dense.turn(query, key, value, past, scaling, sinks, weights, softcap)

    def take_in(self, token_ids: Tensor, shown: Callable[[int, int], TurnTokens]) -> None:
        """Store tokens [B, q] that were read at once, and have the method learn of them: a decode
        step each, without its attention. `shown` gives those of a layer in a column.
        """
        everyone = torch.ones(len(token_ids), dtype=torch.bool)
        for at, tokens in enumerate(token_ids.T):
            self.method.step(tokens, torch.tensor(self.lengths), everyone)
            for layer, store in self.stores.items():
                token = shown(layer, at)
                store.append(token.key, token.value)
                if layer in self._sparse:
                    if self.probe is not None:
                        self.probe.append(layer, token.key, token.value)
                    self.method.append(layer, token.key, token.value)
                    if token.query.shape[2]:
                        self._show_attention(layer, token)
            self.method.end_step()
        self.audit.end_turn(token_ids.shape[1])

    def _show_attention(self, layer: int, token: TurnTokens) -> None:
        selection = self.method.select(layer, token.query)
        if self.method.needs.probabilities:
            store, sinks = self.stores[layer], token.sinks
            attended = with_sinks(selection, store, sinks, token.key)
            _, weights = self.executor(token.query, store, attended, self.shape.scaling, True)
            assert weights is not None
            self.method.observe(layer, selection, weights if sinks is None else weights[..., :-1])

    def crop(self, count: int) -> None:
        """Take the last `count` tokens of every row back.

        Raises
        ------
        ValueError
            the method cannot, or tokens were dropped.
        """
        method = self.method
        if not method.needs.crops or not all(store.complete for store in self.stores.values()):
            raise ValueError(
                f"{type(method).__name__} takes no tokens back: its needs do not say crops=True, or"
                " it dropped some"
            )
        for layer, store in self.stores.items():
            store.device.crop(count)
            store.lengths = [length - count for length in store.lengths]
            if layer in self._sparse:
                method.crop(layer)

    # -- counting ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Count the step that just ended; called outside the timed part, or before the next step
        begins.
        """
        self.spans.fold()
        for store in self.stores.values():
            store.count_fetched()
        device = sum(layer.resident_bytes() for layer in self._layer_memories())
        host = sum(store.host_bytes() for store in self.stores.values())
        self.audit.end_step(
            self.method, self.shape.lengths, self._active, device, self.allocated_bytes(), host
        )

    def release(self) -> None:
        """Let go of all keys and values, when nothing more is to be generated."""
        self.stores.clear()
        self.windowed, self.captured, self._whole = {}, None, False

    def allocated_bytes(self) -> int:
        """Bytes that keys and values of all layers take on the device."""
        return sum(layer.allocated_bytes() for layer in self._layer_memories())

    def _layer_memories(self) -> list[LayerMemory]:
        return [*self.stores.values(), *self.windowed.values()]

    def report(self, row: int | None = None) -> dict[str, Any]:
        """The audit so far, with the executor that ran, the dtype it ran in, and the method's own
        numbers.

        Of one row are C, what it attended and whether that was over the rule; all else is the
        batch's.
        """
        size, lengths = self.budget.size, self.shape.lengths
        budget = (
            None
            if size is None
            else self.budget.tokens(max(lengths) if row is None else lengths[row])
        )
        stored = [tensor for store in self.stores.values() for tensor in store.tensors()]
        # before the audit: a method may have work of its own to end
        method_report = self.method.report()
        return {
            **method_report,
            **self.audit.report(self.method, budget, stored, row),
            **self._remarks(),
        }

    def _remarks(self) -> dict[str, Any]:
        """What a report says besides: executor, dtype, kv; where it applies bytes attended,
        windows, how tokens come up.
        """
        remarks: dict[str, Any] = {
            "executor": self.executor.used(),
            "dtype": str(self.shape.dtype).removeprefix("torch."),
            "kv": str(self._how.kv),
        }
        if self.audit.steps:
            entry_bytes = {layer: store.entry_bytes for layer, store in self.stores.items()}
            steps = self.audit.attended_mean, self.audit.steps
            remarks["attended_bytes_per_step"] = attended_bytes(self.shape, *steps, entry_bytes)
        if self.replay_tokens:
            remarks["replay_tokens"] = self.replay_tokens / self.shape.batch
        if self.executor.note:
            remarks["executor_note"] = self.executor.note
        if self.windowed:
            kept = self.windowed.values()
            others = len(self.shape.windows) - len(self.shape.reuses)
            remarks["windowed_share"] = others / self.shape.layers
            remarks["windowed_kv_bytes"] = sum(layer.resident_bytes() for layer in kept)
            if states := sum(layer.state_bytes() for layer in kept):
                remarks["state_bytes"] = states
        if any(store.host is not None for store in self.stores.values()):
            copied = "measured" if self.shape.device.type == "cuda" else "simulated"
            remarks["transfer"] = "in place" if self.executor.in_place else copied
        return remarks


def check_finite(layer: int, query: Tensor, key: Tensor, decoding: bool) -> None:
    """Refuse queries and keys that no method can rank.

    Values pass: what attends one that is not finite is not, and so the next layer's keys are not,
    or the logits. A GPU is asked about prompts alone, as each answer makes the host wait.

    Parameters
    ----------
    query
        [B, Hq, q, D].
    key
        [B, Hkv, q, D].
    decoding
        they are of tokens after the prompt.

    Raises
    ------
    FloatingPointError
        NaN or inf among them; it names layer and head.
    """
    if decoding and (not query.is_cpu or surely_finite(query, key)):
        return
    for name, head, vectors in (("query", "query head", query), ("key", "KV head", key)):
        # NaN and inf stay in a sum; it is also infinite where it overflows
        if math.isfinite(vectors.sum()):
            continue
        wrong = (~vectors.isfinite()).any(dim=3).any(dim=2).any(dim=0).tolist()
        if any(wrong):
            raise FloatingPointError(
                f"layer {layer}, {head} {wrong.index(True)}: a {name} is not finite"
            )


def surely_finite(query: Tensor, key: Tensor) -> bool:
    """Whether both were quickly seen to be finite; False: they may be all the same."""
    if (
        not query.is_cpu
        or query.dtype not in READABLE
        or why_missing() is not None
        or not query.is_contiguous()
        or not key.is_contiguous()
    ):
        return False
    return finite(query, key)


def _wishes(method: Method, layer: int) -> dict[str, Any]:
    """What the method needs of the store of a layer."""
    needs, home = method.needs, method.home(layer)
    cache = {"cache": needs.cache} if home == "host" else {}
    keys = {"rebuilds_keys": needs.rebuilds_keys, "host_keys": needs.host_keys}
    return {"home": home, "on_drop": needs.on_drop, **keys, **cache}
