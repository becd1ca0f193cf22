"""Prefill, then a timed decode loop, greedy or sampled: the measured path of every run.

Plain functions from token ids to a `Generation`. Prompts of unequal length stand right-padded in
one batch, each row with its own positions; causality keeps padding out of every real token's sight.
Where layers have a window, which counts columns, the padding is on the left, and a mask keeps it
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from kvbench.backends.hf.hooks import Call, CountingCache, windowed_layers
from kvbench.backends.hf.replay import read_again
from kvbench.backends.hf.residuals import residuals_watched
from kvbench.backends.hf.rotary import angles_of
from kvbench.engine.engine import Engine
from kvbench.engine.together import EngineGroup
from kvbench.memory.transfer import uploaded
from kvbench.spans import PARTS

Progress = Callable[[int, int], None]  # (tokens done, tokens in all) of this generation
# from logits [B, vocabulary] to tokens [B], such as `sampling.Sampler`
Draw = Callable[[torch.Tensor], torch.Tensor]


class EngineCache(CountingCache):
    """The measured loop's cache: that loop itself says which phase each forward pass belongs to."""

    def __init__(self, engine: Engine | EngineGroup) -> None:
        super().__init__(engine.shape.layers, windows_of(engine))
        self.engine, self.scaling = engine, engine.shape.scaling
        if engine.prefilled:
            self.count(max(map(sum, zip(engine.offsets, engine.lengths, strict=True))))

    def attend(self, call: Call, query: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Attention of one layer by the engine, in the phase that the loop is in; see
        `Engine.attend`.
        """
        return self.engine.attend(call.layer, query, call.key, call.value, call.sinks)


def windows_of(engine: Engine | EngineGroup) -> Mapping[int, Any]:
    """The layers with a window of a generation, by their index; new ones where it has none yet."""
    engine.windowed = engine.windowed or windowed_layers(engine.shape.windows)
    return engine.windowed


class Lender(Protocol):
    """A prefill made before the generation, which an engine may begin from
    (`kvbench.backends.hf.prefilled`).
    """

    def first_tokens(self, draw: Draw | None) -> torch.Tensor:
        """The first new token of each row, [B] on the CPU: the likeliest, or drawn."""

    def lend(self, engine: Engine) -> None:
        """Let a fresh engine begin here."""


def _never(tokens: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True)
class Stops:
    """Where a row ends.

    Attributes
    ----------
    stop_ids
        after the first of these tokens.
    ends
        whether it ends with these new tokens; asked after every step, outside the times.
    not_first
        tokens that no row may begin with.
    """

    stop_ids: Collection[int] = ()
    ends: Callable[[Sequence[int]], bool] = _never
    not_first: Collection[int] = ()


@dataclass(frozen=True)
class QuestionTokens:
    """What follows the prompts and is read through what the method has made of these.

    Attributes
    ----------
    rows
        token ids of each row, as many of each; (): nothing.
    at_once
        as a later turn of a conversation (`kvbench.engine.turn`); else a decode step for each
        token.
    """

    rows: Sequence[Sequence[int]] = ()
    at_once: bool = False

    def __len__(self) -> int:
        """Tokens of a row."""
        return len(self.rows[0]) if self.rows else 0


class Choice:
    """What the new tokens are: the likeliest, drawn ones, or forced ones.

    Parameters
    ----------
    draw
        draws every new token, fresh for one generation.
    given
        for each row the tokens that it generates, whatever the model says: their end is the row's,
        and nothing else.
    """

    def __init__(
        self, draw: Draw | None = None, forced_tokens: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.draw, self._lengths = (
            draw,
            None if forced_tokens is None else list(map(len, forced_tokens)),
        )
        self._forced_tokens = (
            None
            if forced_tokens is None
            else pad_sequence([torch.tensor(row) for row in forced_tokens], batch_first=True)
        )

    def first(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first ones, [B], where those of the prefill are `tokens`."""
        return tokens if self._forced_tokens is None else self._forced_tokens[:, 0]

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Those of a decode step, [B] on the CPU, of its logits [B, vocabulary]."""
        return (
            chosen_tokens(logits, draw=self.draw)
            if self._forced_tokens is None
            else self._forced_tokens[:, step]
        )

    def goes_on(self, row: int, tokens: Sequence[int], stops: Stops) -> bool:
        """Whether a row that has these new tokens generates another."""
        if self._lengths is not None:
            return len(tokens) < self._lengths[row]
        return tokens[-1] not in stops.stop_ids and not stops.ends(tokens)


@dataclass
class Generation:
    """What one batch generated, and what it cost.

    Attributes
    ----------
    tokens
        new token ids of each row, a stop token included.
    ttft_s
        seconds from the start to the first new token (prefill, index build, question); without the
        prefill where that was shared.
    tt2t_s
        seconds from the start to the second new token, or None.
    step_ms
        milliseconds of each decode step.
    prefill_ms
        breakdown of the prefill by span, in all.
    breakdown_ms
        breakdown of a decode step by span, mean over the steps after the warm-up; the parts add up
        to its mean time.
    audit
        see `kvbench.engine.audit.Audit.report`.
    probe
        see `kvbench.engine.probes.Probe.report`; {} without probes. With them the timings mean
        nothing.
    shared_prefill
        the prefill was made once for several methods.
    together
        it went on beside others (`kvbench.backends.hf.together`): no time but the engine's own
        parts of a step is of this generation, and only these are here.
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

    def conclude(self, engine: Engine, warmup: int = 0) -> None:
        """Take from the engine what it counted, and of its spans those after the first steps."""
        if self.step_ms:
            self.tt2t_s = self.ttft_s + self.step_ms[0] / 1e3
            measured = len(self.step_ms) - warmup
            self.breakdown_ms = (
                _milliseconds(engine.spans.reset(), measured) if measured > 0 else {}
            )
        self.audit, self.probe = engine.report(), engine.probe.report() if engine.probe else {}


class Decoding:
    """A generation whose prompt is read, between two forward passes: what it reads next, and what
    it has made so far.

    Parameters
    ----------
    engine
        that has read the prompt.
    tokens
        the first new token of each row, [B] on the CPU; where a question is left, its logits say
        others.
    question
        what is left to read in decode steps, its tokens [q, B].
    max_new_tokens, stops, choice, watch
        see `generate`.

    Attributes
    ----------
    tokens
        what the next pass reads, [B] on the CPU.
    made
        new token ids of each row.
    active
        rows that still generate.
    steps
        passes since the first new token.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: torch.Tensor,
        *,
        max_new_tokens: int,
        stops: Stops = Stops(),
        choice: Choice | None = None,
        question: Sequence[torch.Tensor] = (),
        watch: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.engine, self._most, self._stops, self._watch = engine, max_new_tokens, stops, watch
        self._choice, self._question = choice or Choice(), list(question)
        self.generated: list[list[int]] = [[] for _ in tokens]
        self.active, self.steps = [True] * len(tokens), 0
        self.tokens = self._question[0] if self._question else self._choice.first(tokens)
        if not self._question:
            self._add(self.tokens)

    @property
    def reading(self) -> bool:
        """Whether the next pass reads a token of the question."""
        return bool(self._question)

    @property
    def over(self) -> bool:
        """Whether no row generates another token."""
        return not self._question and (self.steps + 1 >= self._most or not any(self.active))

    @property
    def to_come(self) -> int:
        """Passes to come, at most."""
        return len(self._question) + self._most - 1 - self.steps

    def choose(self, logits: torch.Tensor) -> None:
        """Take the logits [B, vocabulary] of the pass: they say the tokens of the next one.

        Raises
        ------
        FloatingPointError
            they are NaN or infinite.
        """
        if not self._question:
            self.tokens = self._choice(logits, self.steps + 1)
        elif len(self._question) > 1:
            chosen_tokens(logits)
            self.tokens = self._question[1]
        else:
            self.tokens = self._choice.first(
                chosen_tokens(logits, self._stops.not_first, self._choice.draw)
            )

    def settle(self, logits: torch.Tensor) -> None:
        """Count the pass that `choose` was given; outside the times."""
        self.engine.settle()
        if self._question:
            self._question.pop(0)
            if not self._question:
                self._add(self.tokens)
            return
        self.steps += 1
        if self._watch:
            self._watch(logits)
        self._add(self.tokens)

    def _add(self, tokens: torch.Tensor) -> None:
        for row, token in enumerate(tokens.tolist()):
            if self.active[row]:
                self.generated[row].append(token)
                self.active[row] = self._choice.goes_on(row, self.generated[row], self._stops)


@torch.inference_mode()
def begin(
    model: PreTrainedModel,
    engine: Engine,
    prefilled: Lender,
    *,
    choice: Choice | None = None,
    question: QuestionTokens = QuestionTokens(),
    **ends: Any,
) -> Decoding:
    """A generation that begins from a prefill of its prompts, with a question that is read at once
    read.

    Parameters
    ----------
    engine
        fresh, or one that has begun from this prefill and done nothing since.
    model, choice, question, ends
        see `generate`.
    """
    if not engine.prefilled:
        prefilled.lend(engine)
    draw = choice.draw if choice is not None and not question else None
    return _reading(model, engine, prefilled.first_tokens(draw), question, choice=choice, **ends)


def _reading(
    model: PreTrainedModel,
    engine: Engine,
    tokens: torch.Tensor,
    question: QuestionTokens,
    **ends: Any,
) -> Decoding:
    """The generation of an engine that has read its prompts: `tokens` come first where nothing is
    asked.
    """
    if question.at_once and len(question) > 1:
        logits = turn_logits(model, torch.tensor(question.rows), EngineCache(engine))
        choice, stops = ends["choice"] or Choice(), ends.get("stops", Stops())
        return Decoding(engine, chosen_tokens(logits, stops.not_first, choice.draw), **ends)
    return Decoding(
        engine, tokens, question=[*torch.tensor(question.rows).T] if question else (), **ends
    )


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    engine: Engine,
    *,
    max_new_tokens: int,
    stops: Stops = Stops(),
    choice: Choice | None = None,
    prefill_chunk: int | None = None,
    question: QuestionTokens = QuestionTokens(),
    prefilled: Lender | None = None,
    watch: Callable[[torch.Tensor], object] | None = None,
    warmup: int = 0,
    progress: Progress | None = None,
) -> Generation:
    """Generate for a batch of prompts.

    A step makes the host wait for the device once, for its tokens.

    Parameters
    ----------
    model
        with "kvbench" attention.
    prompts
        token ids of each row.
    engine
        fresh, made for this batch; see `begin`.
    max_new_tokens, stops
        new tokens of each row at most, at least 1, and where it ends before.
    choice
        what the new tokens are; None: the likeliest.
    prefill_chunk
        prompt columns in one forward pass; None: all.
    question
        what follows every prompt, read through the method.
    prefilled
        begin from this prefill of the prompts instead of one of its own.
    watch
        called after every step with its logits [B, vocabulary], outside the times.
    warmup
        first decode steps that the breakdown leaves out.
    progress
        called after every chunk and step.

    Raises
    ------
    FloatingPointError
        NaN or inf in the logits, or in a query or key that a method would be shown.
    """
    choice, read = choice or Choice(), max(map(len, prompts)) + len(question)

    def done(columns: int) -> object:
        return progress and progress(columns, read + max_new_tokens)

    start, cache = time.perf_counter(), EngineCache(engine)
    ends: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stops": stops,
        "choice": choice,
        "watch": watch,
    }
    with engine.spans("other"):
        if prefilled is None:
            banned, draw = ((), None) if question else (stops.not_first, choice.draw)
            tokens = prefill(model, prompts, cache, prefill_chunk, done, banned, draw)
            decoding = _reading(model, engine, tokens, question, **ends)
        else:
            decoding = begin(model, engine, prefilled, question=question, **ends)
    start += _read_question(model, decoding, cache)
    generation = Generation(
        decoding.generated, time.perf_counter() - start, shared_prefill=prefilled is not None
    )
    generation.prefill_ms = _milliseconds(engine.spans.reset(), 1)
    while not decoding.over:
        logits, took = _step(model, decoding, cache)
        generation.step_ms.append(took * 1e3)
        decoding.settle(logits)
        if decoding.steps == warmup:
            engine.spans.reset()
        done(read + decoding.steps + 1)
    generation.conclude(engine, warmup)
    return generation


def _read_question(model: PreTrainedModel, decoding: Decoding, cache: EngineCache) -> float:
    """Read the question's tokens; the seconds that counting has taken meanwhile."""
    counting = 0.0
    while decoding.reading:
        logits, _ = _step(model, decoding, cache)
        stopped = time.perf_counter()
        decoding.settle(logits)
        counting += time.perf_counter() - stopped
    return counting


def _step(
    model: PreTrainedModel, decoding: Decoding, cache: EngineCache
) -> tuple[torch.Tensor, float]:
    """One timed decode step: its logits [B, vocabulary], and its seconds."""
    began = time.perf_counter()
    with decoding.engine.spans("other"):
        logits = step_logits(model, decoding.tokens, cache, decoding.active)
        decoding.choose(logits)
    return logits, time.perf_counter() - began


def prefill(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    cache: EngineCache,
    chunk: int | None = None,
    progress: Callable[[int], object] = lambda done: None,
    not_first: Collection[int] = (),
    draw: Draw | None = None,
) -> torch.Tensor:
    """Read the prompts; returns each row's first new token, [B] on the CPU, none of `not_first`."""
    return chosen_tokens(prefill_logits(model, prompts, cache, chunk, progress), not_first, draw)


def prefill_logits(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    cache: EngineCache,
    chunk: int | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> torch.Tensor:
    """Read the prompts; returns the logits of each row's first new token, [B, vocabulary]."""
    engine = cache.engine
    ends = [offset + len(prompt) for offset, prompt in zip(engine.offsets, prompts, strict=True)]
    ids = torch.zeros(len(prompts), max(ends), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, ends[row] - len(prompt) : ends[row]] = torch.tensor(prompt)
    ids = ids.to(model.device)
    last: dict[int, torch.Tensor] = {}
    with residuals_watched(model, engine.method.needs):
        for column in range(0, ids.shape[1], chunk or ids.shape[1]):
            part = ids[:, column : column + (chunk or ids.shape[1])]
            end = column + part.shape[1]
            ending = [row for row, row_end in enumerate(ends) if column < row_end <= end]
            columns = sorted({ends[row] - 1 - column for row in ending})
            engine.start_chunk(part)
            first, length = uploaded(
                torch.tensor([engine.offsets, [*engine.shape.lengths]]), ids.device
            )[..., None]
            positions = (
                (torch.arange(column, end, device=ids.device) - first)
                .clamp(min=0)
                .minimum(length - 1)
            )
            logits = _forward(model, part, positions, cache, columns, end)
            for row in ending:
                # and no more of the chunk's
                last[row] = logits[row, columns.index(ends[row] - 1 - column)].clone()
            progress(end)
    if engine.waiting:
        read_again(model, engine)
    return torch.stack([last[row] for row in range(len(prompts))])


def decode_step(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    cache: EngineCache,
    active: Sequence[bool],
    banned: Collection[int] = (),
    draw: Draw | None = None,
) -> torch.Tensor:
    """One step: tokens [B] on the CPU in, the next tokens [B] out, none of them banned."""
    return chosen_tokens(step_logits(model, tokens, cache, active), banned, draw)


def step_logits(
    model: PreTrainedModel, tokens: torch.Tensor, cache: EngineCache, active: Sequence[bool]
) -> torch.Tensor:
    """One step: tokens [B] on the CPU in, the logits of the next ones [B, vocabulary] out."""
    lengths = cache.engine.lengths
    cache.engine.start_step(tokens, active)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return _forward(model, ids[:, None], positions[:, None], cache, None, max(lengths) + 1)

    inputs = torch.stack([tokens, torch.tensor(lengths)])
    return cache.engine.run(inputs, forward, cache.count)[:, -1]


def turn_logits(model: PreTrainedModel, ids: torch.Tensor, cache: EngineCache) -> torch.Tensor:
    """Read tokens [B, q] on the CPU as a turn; the logits of the next ones [B, vocabulary]."""
    lengths, width = cache.engine.lengths, ids.shape[1]
    cache.engine.start_turn(ids)
    positions = torch.tensor(lengths)[:, None] + torch.arange(width)
    ids, positions = uploaded(torch.stack([ids, positions]), model.device)
    return _forward(model, ids, positions, cache, None, max(lengths) + width)[:, -1]


def _forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: EngineCache,
    columns: list[int] | None,
    end: int,
) -> torch.Tensor:
    """Logits [B, len(columns), vocabulary]; None or [] = the last column, which is column end - 1
    of all so far.
    """
    # the last layer's device is another one than that of the ids
    spread = bool(cache.engine.shape.elsewhere)
    keep = torch.tensor(columns, device="cpu" if spread else ids.device) if columns else 1
    padding, offsets = None, cache.engine.offsets
    if any(offsets):
        padding = (
            torch.arange(end, device=ids.device)
            >= uploaded(torch.tensor(offsets), ids.device)[:, None]
        )
    engine = cache.engine
    lengths = (
        [length + ids.shape[1] for length in engine.lengths]
        if engine.prefilled
        else engine.shape.lengths
    )
    with engine.spans("model"), angles_of(lengths):
        out = model(
            input_ids=ids,
            attention_mask=padding,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
    logits: torch.Tensor = out.logits
    return logits


def chosen_tokens(
    logits: torch.Tensor, banned: Collection[int] = (), draw: Draw | None = None
) -> torch.Tensor:
    """Tokens [B] of logits [B, vocabulary], on the CPU: the likeliest, or drawn.

    Raises
    ------
    FloatingPointError
        NaN or inf in the logits; both reach the maximum, so one test finds them.
    """
    if banned:
        logits = logits.index_fill(
            -1, uploaded(torch.tensor(sorted(banned)), logits.device), -torch.inf
        )
    best, tokens = logits.max(dim=-1)
    if draw is not None:
        tokens = draw(logits)
    tokens, finite = torch.stack([tokens, torch.isfinite(best).long()]).cpu()
    if not bool(finite.all()):
        raise FloatingPointError("the model's logits are NaN or infinite")
    return tokens


def _milliseconds(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """Spans per step; the standard parts always, a method's own spans beside them."""
    return {
        name: seconds.get(name, 0.0) * 1e3 / steps
        for name in (*PARTS, *sorted(set(seconds) - set(PARTS)))
    }
