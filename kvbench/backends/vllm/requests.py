"""The requests of a vLLM engine, each with a method of its own.

Knows vLLM's memory, and nothing else of vLLM.

vLLM reads prompts, whole or in chunks, and writes all keys and values. A method is shown a prompt
when its last chunk is there; from then on a forward pass of a single token is a decode step. A
preempted request is read again from its first token: its prompt is one anew, and the tokens that it
had generated are those of a later turn, which attend everything that is left (see
`Engine.start_turn`). Where prompts are freed that is what the method keeps, as in the decode
steps that are repeated, though vLLM holds the whole prompt in that pass.

A method whose tokens live on the host, in an order of its own, has them there: a copy of what
vLLM's blocks hold. In an engine that frees prompts what a method keeps of them is a copy, too: see
`side.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.attention import cpu
from kvbench.backends.vllm.paged import BlockTable, Memory, PagedStore, PagedTier, attend_blocks
from kvbench.backends.vllm.plan import Plan
from kvbench.backends.vllm.resting import RestingRequests
from kvbench.backends.vllm.side import Seat, Side, SideTier, attend_some
from kvbench.config import ConfigError, first_line
from kvbench.engine.engine import Engine, TurnTokens, surely_finite
from kvbench.kernels.library import library
from kvbench.memory.store import LayerStore
from kvbench.method import Selection, Shape

REPORTS = 1000  # ended requests whose audits are kept, the last ones
NOTHING = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A request's part of a forward pass.

    Attributes
    ----------
    request
        its id.
    prompt_length
        tokens of its prompt; those that it has generated are not among them.
    token_ids
        [n] all its tokens up to the end of this pass.
    computed
        of them, those of earlier passes, or of another request that began alike.
    blocks
        [groups, blocks] int64, where its keys and values lie; see `BlockTable`.
    """

    request: str
    prompt_length: int
    token_ids: Tensor
    computed: int
    blocks: Tensor


class _Executor:
    """Attends what is selected, and leaves the rest to others; see `kvbench.attention.executor`.

    Attributes
    ----------
    whole
        all tokens were asked for, which vLLM shall attend.
    """

    name = "vllm"
    note = None
    in_place = True
    whole = False

    def __call__(
        self,
        query: Tensor,
        store: LayerStore,
        selection: Selection | None,
        scaling: float,
        probabilities: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """One decode step's attention in one layer; without meaning where it is left to others."""
        tier = store.device
        self.whole = selection is None and store.complete and not isinstance(tier, SideTier)
        if isinstance(tier, SideTier):
            return attend_some(query, tier, selection or Selection(tier.token_ids()), scaling), None
        if self.whole:
            return query, None
        if store.host is not None:
            return cpu.attend(query, store, selection, scaling, probabilities)
        assert isinstance(store, PagedStore) and not probabilities
        return attend_blocks(query, *store.blocks_with(selection), scaling), None

    def prefill(self, query: Tensor, *_: Any) -> Tensor:
        """vLLM computes it."""
        return query

    def used(self) -> str:
        """Its name."""
        return self.name


class RequestEngine(Engine):
    """The engine of one request, whose stores lie in vLLM's memory, unless their home is the host.

    Parameters
    ----------
    memory
        of each layer, as soon as vLLM has shown it.
    groups
        of layers, see `BlockTable`.
    seat
        for what is kept of a prompt that vLLM frees; None: it frees none.
    arguments, settings
        as of `Engine`.

    Attributes
    ----------
    finite
        no pass has made NaN or infinite queries, keys or logits; once one has, vLLM attends all for
        it.
    instead
        why full attention stands in for the engine's method; "" where it does not.
    entries
        keys that full attention would have attended in sparse layers, of all KV heads and decode
        steps.
    table
        its blocks.
    """

    finite = True
    instead = ""
    entries = 0

    def __init__(
        self,
        memory: Mapping[int, Memory],
        *arguments: Any,
        groups: Sequence[int] = (),
        seat: Seat | None = None,
        **settings: Any,
    ) -> None:
        self._memory = memory
        self.table = BlockTable(groups)
        self.seat = seat
        super().__init__(*arguments, attention="torch", **settings)
        self._request_executor = self.executor = _Executor()  # type: ignore[assignment]
        library()  # built now, if nobody has built them

    def _store(self, layer: int) -> LayerStore:
        if self._copied(layer):
            return super()._store(layer)
        if layer not in self.stores:
            place = self._memory[layer], self.table, layer
            seat = self.seat if layer in self._sparse else None
            tier = PagedTier(*place) if seat is None else SideTier(*place, seat)
            self.stores[layer] = PagedStore(tier, spans=self.spans)
        return self.stores[layer]

    def _copied(self, layer: int) -> bool:
        """Whether a layer's keys and values live on the host, beside what vLLM has of them."""
        return layer in self._sparse and self.method.home(layer) == "host"

    @property
    def tokens_read(self) -> int:
        """Tokens that the forward passes before this one have read."""
        return self.lengths[0] if self.prefilled else self._reader.column + self._reader.width

    def start_pass(self, scheduled: Scheduled) -> None:
        """A forward pass begins.

        Of a prompt, all that was not computed in this engine's sight is passed over.
        """
        self._decodes = False
        if not self.finite:
            return
        self.table.blocks = scheduled.blocks
        prompt, end = self.shape.lengths[0], len(scheduled.token_ids)
        # tokens of the pass that are the prompt's
        self._within = max(0, prompt - scheduled.computed)
        # not taken in yet
        self._behind = scheduled.token_ids[scheduled.computed if self.prefilled else prompt :]
        self._decodes = self.prefilled and len(self._behind) == 1
        if self._decodes:
            self.start_step(self._behind)
        elif not self.prefilled:
            ids = scheduled.token_ids[None, :prompt]
            self._passed = slice(self.tokens_read, min(scheduled.computed, prompt))
            if self.tokens_read < scheduled.computed:
                self.start_chunk(ids[:, self.tokens_read : scheduled.computed])
            self.start_chunk(ids[:, scheduled.computed : end])

    @property
    def rests(self) -> bool:
        """The pass is a decode step where each layer attends all it holds: `RestingRequests`."""
        return self._decodes and self.method.at_rest and self._positions is None and self._uncut

    @cached_property
    def _uncut(self) -> bool:
        """Of what was copied all is attended; of a prompt that is not freed all is."""
        return all(
            not tier.cut if isinstance(tier := store.device, SideTier) else store.complete
            for store in self.stores.values()
        )

    def end_rest(self) -> None:
        """The step is over, and who attended all layers has asked neither method nor stores."""
        for layer, store in self.stores.items():
            store.append(NOTHING, NOTHING)  # which vLLM has written
            if layer in self._sparse:
                self.audit.attended(layer, None, store.device.numbers)
        self.method.end_step()

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Attention of one layer, [1, H, q, D] each; None: vLLM shall attend all tokens.

        Of fewer tokens than were given it is that of the last ones, and vLLM shall attend the
        others.
        """
        try:
            return self._attended(layer, query, key, value) if self.finite else None
        except FloatingPointError:  # of this request: the others of the pass go on
            self.give_up()
            return None

    def give_up(self) -> None:
        """Let vLLM attend all from now on: there are vectors that no method can rank."""
        self.finite = self._decodes = False

    def _attended(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        if self._decodes:
            attended = self.attend(layer, query, key, value)
            return None if self._request_executor.whole else attended
        if not self.prefilled:
            if self._passed.start < self._passed.stop and self._copied(layer):
                before = self._memory[layer].first(self.table.of(layer), self._passed.stop)
                earlier_key, earlier_value = (part[:, :, self._passed] for part in before)
                self._store(layer).write_prompt(earlier_key, earlier_value, self._passed.start, [0])
            self.attend(layer, *(part[:, :, : self._within] for part in (query, key, value)))
        freed = self.seat is not None and layer in self._sparse and len(self._behind) > 0
        new = (part[:, :, self._within :] for part in (query, key, value))
        out = self.over_remaining(layer, *new) if freed else None
        if layer == self._last:
            self.audit.start_turn()
            self.take_in(self._behind[None], self._written)
        return out

    def _written(self, layer: int, at: int) -> TurnTokens:
        """The next token's key and value, which vLLM has written; its query is not shown."""
        here = torch.tensor(self.stores[layer].lengths).expand(1, self.shape.kv_heads, 1)
        key, value = self._memory[layer].rows(self.table.of(layer), here)
        return TurnTokens(key[:, :, :0], key, value)

    def end_pass(self) -> None:
        """Count the step that has ended."""
        if self._decodes:
            self.settle()
            self.entries += self.lengths[0] * self._lists

    @property
    def attended(self) -> float:
        """Of `entries` those that were attended.

        A step that the audit does not count is as the mean of the others.
        """
        return self.audit.attended_mean * self.audit.steps * self._lists

    @property
    def _lists(self) -> int:
        """KV heads of all sparse layers."""
        return len(self._sparse) * self.shape.kv_heads

    def release(self) -> None:
        """See `Engine.release`."""
        super().release()
        if self.seat is not None:
            self.seat.leave()

    def report(self, row: int | None = None) -> dict[str, Any]:
        """The audit so far.

        Beside that of `Engine`, where it applies: `broken`, where a rule was; `visibility_only`,
        dropped tokens are attended no more, and keep their memory; `not_finite`, there were NaN or
        infinite queries, keys or logits; `full_attention`, why that stands in for the engine's
        method.
        """
        more = {
            "broken": self.audit.broken(row),
            "visibility_only": (
                self.seat is None and not all(store.complete for store in self.stores.values())
            ),
            "not_finite": not self.finite,
            "full_attention": self.instead,
        }
        return {**super().report(row), **{name: value for name, value in more.items() if value}}


class Requests:
    """All requests of one worker.

    vLLM's scheduler is the loop, so that no `kvbench.engine.batch.Batch` steps these: it says in
    each pass whose tokens are read, chunks of prompts beside decode steps, and attends all tokens
    itself for a request that fails.

    Parameters
    ----------
    plan
        what runs.
    shape
        the model's, of no request: without lengths.
    side
        for what is kept of prompts, where vLLM frees them.
    settings
        of every `Engine`: rotary, pieces.

    Attributes
    ----------
    memory
        of each layer; who knows it puts it here before the layer's first attention.
    groups
        of layers, see `BlockTable`; likewise, before the first pass.
    reports
        audits of requests that have ended, by id.
    """

    def __init__(self, plan: Plan, shape: Shape, side: Side | None = None, **settings: Any) -> None:
        self.memory: dict[int, Memory] = {}
        self.groups: Sequence[int] = ()
        self._side = side
        self.reports: dict[str, dict[str, Any]] = {}
        self._plan = plan
        self._shape = shape
        self._settings = settings
        self._budget = plan.sizes()
        self._engines: dict[str, RequestEngine] = {}
        self._passing: list[RequestEngine] = []
        # entries of requests that are over: attended, and those of full attention
        self._gone = np.zeros(2)
        self._attended = 0.0
        self._resting: dict[int, RequestEngine] = {}  # of the pass, those at rest
        self._resting_requests = RestingRequests()
        self._outputs: list[tuple[slice | Tensor, Tensor]] = []

    def forget(self, requests: Iterable[str]) -> None:
        """These have ended, or lost their memory."""
        for request in requests:
            engine = self._engines.pop(request, None)
            if engine is not None:
                if engine.prefilled or not engine.finite:
                    self.reports[request] = engine.report()
                self._release(engine)
        while len(self.reports) > REPORTS:
            del self.reports[next(iter(self.reports))]

    def audits(self) -> dict[str, dict[str, Any]]:
        """Of requests that have ended, the last ones, and of those that decode now, or cannot.

        By id.
        """
        reporting = {
            request: engine
            for request, engine in self._engines.items()
            if engine.prefilled or not engine.finite
        }
        current = {request: engine.report() for request, engine in reporting.items()}
        return {**self.reports, **current}

    def _release(self, engine: RequestEngine) -> None:
        self._gone += engine.attended, engine.entries
        engine.release()

    def counts(self) -> dict[str, float]:
        """Numbers of all requests together.

        Returns
        -------
        dict[str, float]
            `attended_entries` and `full_attention_entries`, see `RequestEngine.entries`, of all
            requests so far; `side_used_bytes` and `side_bytes`, of the copies of freed prompts.
        """
        current = np.array(
            [(engine.attended, engine.entries) for engine in self._engines.values()]
        ).reshape(-1, 2)
        attended, entries = (self._gone + current.sum(axis=0)).tolist()
        # the mean of the steps that are counted may fall
        self._attended = max(self._attended, attended)
        numbers = {"attended_entries": self._attended, "full_attention_entries": entries}
        return numbers | ({} if self._side is None else self._side.counts())

    def start_pass(self, rows: Sequence[Scheduled]) -> None:
        """A forward pass of these requests begins."""
        self._passing = [self._engine(scheduled) for scheduled in rows]
        for engine, scheduled in zip(self._passing, rows, strict=True):
            engine.start_pass(scheduled)
        self._find_resting()

    def _find_resting(self) -> None:
        """Find who in the pass is at rest; in step after step it is mostly the same."""
        self._resting = {row: engine for row, engine in enumerate(self._passing) if engine.rests}
        if (engines := [*self._resting.values()]) != self._resting_requests.engines:
            self._resting_requests = RestingRequests(engines)
        if engines:
            self._resting_requests.start_pass()

    def _engine(self, scheduled: Scheduled) -> RequestEngine:
        """The request's engine, or a new one: at its first pass, or when it is read again."""
        existing = self._engines.get(scheduled.request)
        if existing is not None and (
            existing.tokens_read == scheduled.computed or not existing.finite
        ):
            return existing
        if existing is not None:
            self._release(existing)
        shape = replace(self._shape, lengths=(scheduled.prompt_length,))
        plan = self._plan
        settings = {
            "seed": plan.seed,
            "audit_every": plan.audit_every,
            "groups": self.groups,
            **self._settings,
        }
        settings["seat"] = None if self._side is None else self._side.take()
        try:
            engine = RequestEngine(self.memory, shape, plan.build(), self._budget, **settings)
        except ConfigError as error:
            # A fraction of its prompt is too little for the method. An error here would end all
            # requests of a server.
            full = Plan("full", None)
            engine = RequestEngine(self.memory, shape, full.build(), full.sizes(), **settings)
            engine.instead = first_line(error)
        self._engines[scheduled.request] = engine
        return engine

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, starts: list[int]
    ) -> list[int]:
        """Attention of one layer in the pass that was started.

        Parameters
        ----------
        query
            [T, Hq, D], post-RoPE.
        key, value
            [T, Hkv, D], in the layer's memory already.
        starts
            [B + 1], where the tokens of each request begin.

        Returns
        -------
        list[int]
            The others, which vLLM shall attend: all tokens, causally. It may write over what
            requests have attended themselves, of all their tokens or the last ones: `finish` comes
            after.
        """
        self._outputs = []
        others = self._attend_resting(layer, query, key, starts)
        for row, engine in enumerate(self._passing):
            if row in self._resting:
                continue
            tokens = slice(starts[row], starts[row + 1])
            new = (part[tokens].transpose(0, 1)[None] for part in (query, key, value))
            attended = engine.attend_new(layer, *new)
            if attended is None:
                others.append(row)
            else:
                span = slice(tokens.stop - attended.shape[2], tokens.stop)
                self._outputs.append((span, attended[0].transpose(0, 1)))
                if span != tokens:
                    others.append(row)
        return sorted(others)

    def _attend_resting(
        self, layer: int, query: Tensor, key: Tensor, starts: list[int]
    ) -> list[int]:
        """As `attend`, for those at rest."""
        if not self._resting:
            return []
        at = torch.tensor([starts[row] for row in self._resting])
        queries, new = query[at], key[at]
        if (
            layer in self._shape.sparse_layers
            and not surely_finite(queries, new)
            and self._refused(queries, new)
        ):
            return self._attend_resting(layer, query, key, starts)
        attended = self._resting_requests.attend(layer, queries, self._shape.scaling)
        if attended is None:
            return [*self._resting]
        self._outputs.append((at, attended))
        return []

    def _refused(self, query: Tensor, key: Tensor) -> bool:
        """Whether those at rest became fewer.

        vLLM attends all for a request whose queries or keys are not finite.
        """
        finite = query.flatten(1).isfinite().all(dim=1) & key.flatten(1).isfinite().all(dim=1)
        for engine, fine in zip(self._resting.values(), finite.tolist(), strict=True):
            if not fine:
                engine.give_up()
        before = len(self._resting)
        self._find_resting()
        return len(self._resting) < before

    def finish(self, out: Tensor) -> None:
        """Write what requests have attended themselves in the layer, [T, Hq, D]."""
        for tokens, attended in self._outputs:
            out[tokens] = attended

    def end_pass(self, logits: Tensor | None = None) -> None:
        """The forward pass is over.

        Parameters
        ----------
        logits
            [B, vocabulary], of each request in it; None: none were made.
        """
        if logits is not None and not bool((finite := logits.amax(dim=1).isfinite()).all()):
            for row in (~finite).nonzero()[:, 0].tolist():
                self._passing[row].finite = False
        for engine in self._resting.values():
            engine.end_rest()
        for engine in self._passing:
            engine.end_pass()
        self._passing, self._resting = [], {}
