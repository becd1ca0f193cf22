"""Evicted tokens are found again, in the background (RACC, section 4.2).

Searches have two modes. Deterministic: the answer to a request is used a fixed number of steps
later, and waited for if need be, so that scores never depend on timing: the span "waiting". Free:
the latest finished answer is used, however old, and decoding never waits; a step that finds a
search still running asks for nothing. Queries leave a GPU, and answers come up to it, beside what
it computes.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch

from kvbench.method import Context, Shape, View
from methods.racc.background import Batch
from methods.racc.index import Floats, KeyIndex, Tokens
from methods.racc.settings import RACCOptions


@dataclass
class Log:
    """What became of the searches of one generation, all layers together.

    Attributes
    ----------
    requests
        searches that were asked for.
    late
        steps that could not ask, or not link, since a search was still running.
    failed
        searches that raised an error.
    used
        steps times layers that had an answer.
    staleness, staleness_max
        steps between the request of an answer and its use, summed, and at most.
    rebuilds
        see `KeyIndex`.
    """

    requests: int = 0
    late: int = 0
    failed: int = 0
    used: int = 0
    staleness: int = 0
    staleness_max: int = 0
    rebuilds: int = 0

    def use(self, age: int) -> None:
        """An answer of `age` steps is used."""
        self.used += 1
        self.staleness += age
        self.staleness_max = max(self.staleness_max, age)

    def report(self) -> dict[str, float]:
        """The numbers for a sample's record."""
        return {
            "searches": self.requests,
            "searches_late": self.late,
            "searches_failed": self.failed,
            "staleness_mean": self.staleness / self.used if self.used else 0.0,
            "staleness_max": self.staleness_max,
            "index_rebuilds": self.rebuilds,
        }


class RetrievedTokens(NamedTuple):
    """Tokens found [B, Hkv, k], nearest first, trailing -1, for the queries of `step` and on their
    device.
    """

    step: int
    tokens: torch.Tensor


class Queries:
    """Queries [B, Hkv, D] on their way to the CPU, where a job reads them."""

    def __init__(self, queries: torch.Tensor) -> None:
        # from a GPU into pinned memory; whoever reads it waits for the event
        self._vectors = queries.float().to("cpu", non_blocking=True)
        self._left = (
            torch.cuda.current_stream(queries.device).record_event() if queries.is_cuda else None
        )

    def read(self) -> Floats:
        """The queries, once they are there."""
        if self._left is not None:
            self._left.synchronize()
        vectors: Floats = self._vectors.numpy()
        return vectors


class _JobResult(NamedTuple):
    """What a job did: tokens found (None: it searched nothing), keys it read, indexes it had to
    rebuild.
    """

    tokens: torch.Tensor | None
    keys_read: int
    rebuilds: int


class Retriever:
    """The indexes of one layer, and its searches, one after the other in the worker pool.

    Parameters
    ----------
    layer
        for messages.
    index
        [B][Hkv].
    submit
        of a `Batch`.
    options
        when an answer is used.
    count_read
        called with how many keys were read.
    log
        counts what happens.
    waiting
        the span of the time in which an answer is waited for.
    """

    def __init__(
        self,
        layer: int,
        index: Sequence[Sequence[KeyIndex]],
        submit: Callable[..., Future[Any]],
        options: RACCOptions,
        count_read: Callable[[int], None],
        log: Log,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.layer, self.index = layer, index
        self.options, self.log = options, log
        self._waiting = waiting
        self._submit, self._count_read = submit, count_read
        self._pending: deque[tuple[int, Future[_JobResult]]] = deque()
        self._last: Future[_JobResult] | None = None
        self._answer: RetrievedTokens | None = None
        self._device = torch.device("cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> Retriever:
        """A copy of what the jobs that were started have made of the indexes."""
        self._finish()
        memo[id(self)] = twin = object.__new__(Retriever)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def _finish(self) -> None:
        """Wait for the job at work, and so for all before it."""
        if self._last is not None:
            wait([self._last])

    @property
    def _free(self) -> bool:
        return self.options.mode == "free"

    @property
    def foreign_bytes(self) -> int:
        """Bytes of the indexes in faiss's own memory; waits for the job at work."""
        self._finish()
        return sum(index.nbytes for row in self.index for index in row)

    @property
    def busy(self) -> bool:
        """A job is still to be done."""
        return self._last is not None and not self._last.done()

    def cover(self, step: int, tokens: Sequence[Sequence[Tokens]]) -> None:
        """Index the evicted tokens [B][Hkv] that are not there yet."""
        self._enqueue(step, tokens, None, ())

    def request(self, step: int, queries: torch.Tensor, counts: Sequence[int]) -> None:
        """Ask for the nearest `counts[b]` tokens to queries [B, Hkv, D]."""
        if self._free and self.busy:
            self.log.late += 1
            return
        self.log.requests += 1
        self._device = queries.device
        self._enqueue(step, None, Queries(queries), counts)

    def latest(self, step: int) -> RetrievedTokens | None:
        """The answer to use at `step`, if there is one.

        Raises
        ------
        FloatingPointError
            a key is not finite (deterministic).
        """
        while self._pending and self._due(*self._pending[0], step):
            request_step, job = self._pending.popleft()
            if not job.done():
                with self._waiting():
                    wait([job])
            try:
                result = job.result()
            except Exception:
                if not self._free:
                    raise
                self.log.failed += 1
                continue
            self._count_read(result.keys_read)
            self.log.rebuilds += result.rebuilds
            if result.tokens is not None:
                tokens = result.tokens.to(self._device, non_blocking=True)
                self._answer = RetrievedTokens(request_step, tokens)
        if self._answer is not None:
            self.log.use(step - self._answer.step)
        return self._answer

    def _due(self, request_step: int, job: Future[_JobResult], step: int) -> bool:
        return job.done() if self._free else request_step <= step - self.options.lag

    def _enqueue(
        self,
        step: int,
        tokens: Sequence[Sequence[Tokens]] | None,
        queries: Queries | None,
        counts: Sequence[int],
    ) -> None:
        self._last = self._submit(self._work, self._last, tokens, queries, counts)
        self._pending.append((step, self._last))

    def _work(
        self,
        before: Future[_JobResult] | None,
        tokens: Sequence[Sequence[Tokens]] | None,
        queries: Queries | None,
        counts: Sequence[int],
    ) -> _JobResult:
        if before is not None:
            # one thread at a time in an index; what the other raised it reports itself
            wait([before])
        faiss.omp_set_num_threads(1)
        read, rebuilds = self._counted()
        if tokens is not None:
            self._cover(tokens)
        nearest = None if queries is None else self._search(queries.read(), counts)
        now_read, now_rebuilt = self._counted()
        return _JobResult(nearest, now_read - read, now_rebuilt - rebuilds)

    def _counted(self) -> tuple[int, int]:
        """Keys that all indexes have read so far, and how often one was made anew."""
        indexes = [index for row in self.index for index in row]
        read = sum(index.keys_read for index in indexes)
        return read, sum(index.rebuilds for index in indexes)

    def _cover(self, tokens: Sequence[Sequence[Tokens]]) -> None:
        for evicted, row in zip(tokens, self.index, strict=True):
            for head, index in enumerate(row):
                try:
                    index.cover(evicted[head])
                except ValueError as error:
                    place = f"layer {self.layer}, KV head {head}"
                    raise FloatingPointError(f"{place}: {error}") from error

    def _search(self, queries: Floats, counts: Sequence[int]) -> torch.Tensor:
        ids = np.full((*queries.shape[:2], max(counts)), -1)
        for row, heads in enumerate(self.index):
            for head, index in enumerate(heads):
                nearest = index.search(queries[row, head], counts[row])
                ids[row, head, : len(nearest)] = nearest
        tokens = torch.from_numpy(ids)
        return tokens.pin_memory() if self._device.type == "cuda" else tokens


@dataclass
class Retrieval:
    """The retrievers of all layers of one generation.

    Attributes
    ----------
    layers
        the retriever of each layer whose tokens are indexed.
    log
        see `Log`.
    """

    options: RACCOptions
    shape: Shape
    view: View
    context: Context

    def __post_init__(self) -> None:
        self.layers: dict[int, Retriever] = {}
        self.log = Log()
        self._jobs = Batch(self.context.pool.submit, torch.get_num_threads())

    def cover(self, layer: int, step: int, evicted: Sequence[Sequence[Tokens]], anew: bool) -> None:
        """Index the evicted tokens [B][Hkv] that are not there yet; `anew`: in place of all that
        was there.
        """
        if anew or layer not in self.layers:
            self.layers[layer] = self._retriever(layer)
        self.layers[layer].cover(step, evicted)

    def ask(self, layer: int, step: int, query: torch.Tensor, counts: Sequence[int]) -> None:
        """Ask for the nearest `counts[b]` tokens to the mean query of each group; `query`: [B, Hq,
        1, D].
        """
        means = query.unflatten(1, (self.shape.kv_heads, -1)).mean(dim=2)[:, :, 0]
        self.layers[layer].request(step, means, counts)
        if self.options.lag == 0:
            self.flush()

    def flush(self) -> None:
        """Start the jobs that were collected."""
        self._jobs.flush()

    def _retriever(self, layer: int) -> Retriever:
        rows, heads = range(self.shape.batch), range(self.shape.kv_heads)
        index = [[self._index(layer, row, head) for head in heads] for row in rows]
        count_read = partial(self.view.count_read, layer)
        waiting = partial(self.context.spans, "waiting")
        settings = self.options, count_read, self.log, waiting
        return Retriever(layer, index, self._jobs.submit, *settings)

    def _index(self, layer: int, row: int, head: int) -> KeyIndex:
        read = partial(_keys, self.view, layer, row, head)
        return KeyIndex(self.options, read, self.context.layer_seed(layer, row) + head)


def _keys(view: View, layer: int, row: int, head: int, tokens: Tokens) -> Floats:
    """Keys [n, D] of tokens on the host."""
    keys: Floats = view.host_keys(layer)[row, head, torch.from_numpy(tokens)].float().numpy()
    return keys
