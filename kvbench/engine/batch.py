"""The one decode loop: sequences whose next tokens come from one forward pass a step.

A `Sequence` is a generation of one or more rows with its engine; a `Batch` decodes a token of every
row. Alone is a batch of one sequence with a clock. The linear layers of a pass read the weights
once for all rows; attention, and all that a method does, is every engine's by itself. Sequences
join and leave between two passes, and what fails one of them touches no other.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.config import ConfigError
from kvbench.engine.engine import Engine
from kvbench.engine.passes import (
    DecodePasses,
    EngineGroup,
    Errors,
    PrefillSource,
    Runner,
    TokenRows,
)
from kvbench.engine.request import GenerationRequest, QuestionTokens, chosen_tokens
from kvbench.spans import PARTS

MOST_ROWS = 128  # of one pass; more make a row hardly quicker


@dataclass
class Generation:
    """What one sequence generated, and what it cost.

    Attributes
    ----------
    tokens
        new token ids of each row, a stop token included.
    ttft_s, tt2t_s
        seconds from the start to the first new token (prefill, index build, question), without the
        prefill where that was shared; to the second one, if there is one.
    step_ms
        milliseconds of each decode step.
    prefill_ms, breakdown_ms
        milliseconds by span, of the prefill in all, and of a decode step: the mean over the steps
        after the warm-up, whose parts add up to its time.
    audit, probe
        reports of `kvbench.engine.audit.Audit` and, where there are probes, with which times mean
        nothing, of `kvbench.engine.probes.Probe`.
    shared_prefill
        the prefill was made once for several methods.
    together
        it shared its passes with others: no time but the engine's own parts of a step is of this
        generation, and only these are here.
    """

    tokens: list[list[int]]
    ttft_s: float = 0.0
    tt2t_s: float | None = None
    step_ms: list[float] = field(default_factory=list)
    prefill_ms: dict[str, float] = field(default_factory=dict)
    breakdown_ms: dict[str, float] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    shared_prefill: bool = False
    together: bool = False


class Sequence:
    """A generation between two forward passes: prompts that are read, and once something is asked
    of it (`ask`), what it reads next and what it has generated.

    Parameters
    ----------
    runner, engine
        the model's, and a fresh one that was made for the prompts.
    prompts
        token ids of each row.
    prefilled
        begin from this prefill of the prompts; None: from a prefill of their own.
    chunk, progress
        prompt columns in one forward pass, None: all; called with the columns read after each.

    Attributes
    ----------
    tokens
        what the next pass reads, [B] on the CPU.
    generated
        new token ids of each row.
    active
        rows that still generate.
    steps
        passes since the first new token.
    timed
        it decodes alone, so that what a step takes is its time.
    """

    _request: GenerationRequest

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        engine: Engine,
        prompts: TokenRows,
        prefilled: PrefillSource | None = None,
        chunk: int | None = None,
        progress: Callable[[int], object] = lambda done: None,
    ) -> None:
        self.engine, self._runner = engine, runner
        began = time.perf_counter()
        with engine.spans("other"):
            self._logits = (
                runner.prefill(engine, prompts, chunk, progress)
                if prefilled is None
                else prefilled.lend(engine)
            )
        seconds = time.perf_counter() - began
        self._question, self.timed = list[Tensor](), False
        self.generated: list[list[int]] = [[] for _ in engine.shape.lengths]
        self.active, self.steps = [True] * engine.shape.batch, 0
        shared = prefilled is not None
        self._generation = Generation(self.generated, ttft_s=seconds, shared_prefill=shared)
        self.tokens = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def copy(self) -> Sequence:
        """One that goes on from here by itself, of a sequence that waits to be asked.

        Raises
        ------
        ConfigError
            the method cannot be copied.
        """
        try:
            return copy.deepcopy(self, {id(part): part for part in (self._runner, self._logits)})
        except TypeError as error:
            raise ConfigError(
                f"{type(self.engine.method).__name__}: several questions about one context need a"
                f" copy of what the method has made of it, and it has none ({error}); expected a"
                " method that copy.deepcopy can copy"
            ) from error

    @torch.inference_mode()
    def ask(self, request: GenerationRequest, timed: bool = False) -> Sequence:
        """Have it generate, and read a question that is read at once; returns itself."""
        self._request, self.timed = request, timed
        began, question, logits = time.perf_counter(), request.question, self._logits
        with self.engine.spans("other"):
            first = chosen_tokens(logits) if question else request.first(logits)
            if question.at_once and len(question) > 1:
                turn = self._runner.passes(self.engine).turn(torch.tensor(question.rows))
                first, question = request.first(turn), QuestionTokens()
        self._generation.ttft_s += time.perf_counter() - began
        self._generation.together = not timed
        if question:
            self._question = [*torch.tensor(question.rows).T]
            self.tokens = self._question[0]
        else:
            self.tokens = first
            self._begin_answer()
        return self

    def decode(self) -> Sequence:
        """Go on alone, to the end; returns itself.

        Raises
        ------
        FloatingPointError
            NaN or inf in the logits, or in a query or key that a method would be shown.
        """
        batch = Batch(self._runner)
        if not self.over:
            batch.join(self)
        while batch.rows:
            for _, error in batch.step():
                if error is not None:
                    raise error
        return self

    @property
    def over(self) -> bool:
        """Whether no row generates another token."""
        return not self._question and (self.to_come == 0 or not any(self.active))

    @property
    def to_come(self) -> int:
        """Passes to come, at most."""
        return len(self._question) + self._request.max_new_tokens - 1 - self.steps

    def choose(self, logits: Tensor) -> None:
        """Take the logits [B, vocabulary] of the pass: they say the tokens of the next one.

        Raises
        ------
        FloatingPointError
            they are NaN or infinite.
        """
        if not self._question:
            self.tokens = self._request.following(logits, self.steps + 1)
        elif len(self._question) > 1:
            chosen_tokens(logits)
            self.tokens = self._question[1]
        else:
            self.tokens = self._request.first(logits)

    def settle(self, logits: Tensor, seconds: float) -> None:
        """Count the pass that `choose` was given, and its time; outside the times."""
        self.engine.settle()
        if self._question:
            self._question.pop(0)
            self._generation.ttft_s += seconds
            if not self._question:
                self._begin_answer()
            return
        self.steps += 1
        if self._request.watch:
            self._request.watch(logits)
        self._add(self.tokens)
        if self.timed:
            self._generation.step_ms.append(seconds * 1e3)
            if self.steps == self._request.warmup:
                self.engine.spans.reset()
            longest = max(self.engine.shape.lengths)
            self._request.note(longest, longest + len(self._request.question) + self.steps + 1)

    def _add(self, tokens: Tensor) -> None:
        for row, token in enumerate(tokens.tolist()):
            if self.active[row]:
                self.generated[row].append(token)
                self.active[row] = self._request.goes_on(row, self.generated[row])

    def _begin_answer(self) -> None:
        """The first new token is there, and the times of the prefill are over."""
        self._add(self.tokens)
        if self.timed:
            self._generation.prefill_ms = _milliseconds(self.engine.spans.reset(), 1)

    def conclude(self) -> Generation:
        """What it has come to, once it is over."""
        generation, engine = self._generation, self.engine
        if not self.timed:
            generation.ttft_s = 0.0
            spent, steps = engine.spans.reset(), max(1, engine.audit.steps)
            generation.breakdown_ms = {
                name: 1e3 * seconds / steps for name, seconds in sorted(spent.items())
            }
        elif generation.step_ms:
            generation.tt2t_s = generation.ttft_s + generation.step_ms[0] / 1e3
            measured = len(generation.step_ms) - self._request.warmup
            if measured > 0:
                generation.breakdown_ms = _milliseconds(engine.spans.reset(), measured)
        generation.audit = engine.report()
        generation.probe = engine.probe.report() if engine.probe else {}
        return generation


def _milliseconds(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """Spans per step; the standard parts always, a method's own spans beside them."""
    names = *PARTS, *sorted(set(seconds) - set(PARTS))
    return {name: seconds.get(name, 0.0) * 1e3 / steps for name in names}


def generate(
    runner: Runner,
    prompts: TokenRows,
    engine: Engine,
    *,
    prefilled: PrefillSource | None = None,
    prefill_chunk: int | None = None,
    **options: Any,
) -> Generation:
    """Generate for a batch of prompts, alone and with a clock; arguments as of `Sequence` and
    `GenerationRequest`. A step makes the host wait for the device once, for its tokens.

    Raises
    ------
    FloatingPointError
        NaN or inf in the logits, or in a query or key that a method would be shown.
    """
    request = GenerationRequest(**options)
    note = partial(request.note, max(map(len, prompts)))
    sequence = Sequence(runner, engine, prompts, prefilled, prefill_chunk, note)
    return sequence.ask(request, timed=True).decode().conclude()


# Called with a sequence that is over, or None and why there is none. Its engine holds keys and
# values for this call alone.
Ended = Callable[[Sequence | None, Exception | None], object]


class Admission(NamedTuple):
    """What is called once a sequence has ended, when it joins a batch or later; whose it is (see
    `Batch.drop`); and what it holds in memory, with its bytes, which what several share takes once.
    """

    ended: Ended
    owner: object = None
    memory: Mapping[Any, float] = {}


class Batch:
    """Sequences that decode in one pass, as many as have room in so many bytes; a single one where
    the model's cannot share a pass. `stepped` is called after each with its rows and its seconds.
    """

    def __init__(
        self,
        runner: Runner,
        room: float = math.inf,
        stepped: Callable[[int, float], object] = lambda rows, seconds: None,
    ) -> None:
        self._runner, self._stepped = runner, stepped
        self._room, self._most = room, 1 if runner.alone() else MOST_ROWS
        self._running: dict[Sequence, Admission | None] = {}
        # None: sequences have joined or left since the last pass
        self._passes: DecodePasses | None = None
        self._errors = Errors()  # of sequences, by their places in the pass

    @property
    def rows(self) -> int:
        """Rows of the next pass."""
        return sum(len(sequence.generated) for sequence in self._running)

    def join(self, sequence: Sequence, admission: Admission | None = None) -> None:
        """A sequence, not over, goes on here from the next pass on."""
        if not sequence.timed:
            sequence.engine.spans.reset()  # what it has spent on its prompt
        self._running[sequence] = admission
        self._passes = None

    def admit(self, begin: Callable[[], Sequence], rows: int, admission: Admission) -> None:
        """Begin a sequence of so many rows and have it join, once there is room for it; where
        `begin` takes more memory than there is, which no estimate knows for sure, again when others
        have left.
        """
        memory, held = admission.memory, self._memory()
        self.clear(sum(size for part, size in memory.items() if part not in held), rows)
        while True:
            try:
                sequence = begin()
                break
            except Exception as error:
                if not (is_out_of_memory(error) and self._running):
                    admission.ended(None, error)
                    return
            before = self.rows
            while self.rows == before:
                self.step()
        self.join(sequence, admission)
        if sequence.over:
            self._end(sequence, None)

    def clear(self, required_bytes: float = math.inf, rows: int = 0) -> None:
        """Go on until there is room for so many bytes and rows, or nothing is left."""
        while self._running and (
            self.rows + rows > self._most
            or sum(self._memory().values()) + required_bytes >= self._room
        ):
            self.step()

    def _memory(self) -> dict[Any, float]:
        admissions = [admission for admission in self._running.values() if admission is not None]
        return {part: size for each in admissions for part, size in each.memory.items()}

    def step(self) -> list[tuple[Sequence, Exception | None]]:
        """Decode a token of every row; the sequences that left, over or with their error."""
        rows, began = self.rows, time.monotonic()
        finished = self._decode()
        for sequence, error in finished:
            self._end(sequence, error)
        self._stepped(rows, time.monotonic() - began)
        return finished

    def drop(self, owner: object) -> None:
        """Nothing of an owner goes on; what did has ended for no reason of its own."""
        for sequence, admission in [*self._running.items()]:
            if admission is not None and admission.owner == owner:
                self._end(sequence, CancelledError())

    def _end(self, sequence: Sequence, error: Exception | None) -> None:
        """A sequence leaves, unless an earlier one has dropped it."""
        admission = self._running.pop(sequence, None)
        self._passes = None
        if admission is not None:
            try:
                admission.ended(None if error else sequence, error)
            finally:
                sequence.engine.release()

    def _compose(self) -> DecodePasses:
        engines, self._errors = [sequence.engine for sequence in self._running], Errors()
        if next(iter(self._running)).timed:
            return self._runner.passes(engines[0])
        joined = self._runner.joined(engines)
        return self._runner.passes(EngineGroup(engines, joined, self._errors))

    def _decode(self) -> list[tuple[Sequence, Exception | None]]:
        self._passes = passes = self._passes or self._compose()
        sequences, errors = [*self._running], self._errors
        tokens = torch.cat([sequence.tokens for sequence in sequences])
        active = [is_active for sequence in sequences for is_active in sequence.active]
        with torch.inference_mode(), collecting_later():
            began = time.perf_counter()
            with passes.rows.spans("other"):
                logits = passes(tokens, active).split([len(seq.active) for seq in sequences])
                for index, sequence in enumerate(sequences):
                    errors.ask(index, sequence.choose, logits[index])
            seconds = time.perf_counter() - began
            for index, sequence in enumerate(sequences):
                errors.ask(index, sequence.settle, logits[index], seconds)
        pairs = [(sequence, errors.get(index)) for index, sequence in enumerate(sequences)]
        return [(sequence, error) for sequence, error in pairs if error or sequence.over]


@contextmanager
def collecting_later() -> Iterator[None]:
    """Leave garbage that refers to itself for later: to find it Python looks at every object of
    every engine.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no more memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator, and CUDA's for pinned host memory, say it in words only
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("can't allocate memory", "out of memory")
    )
