"""Prefill, then a timed decode loop, greedy or sampled: the measured path of every run.

Plain functions from token ids to a `Generation`. Prompts of unequal length stand right-padded in one batch, each row
with its own positions; causality keeps padding out of every real token's sight. Where layers have a window, which
counts columns, the padding is on the left, and a mask keeps it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from kvbench.backends.hf.hooks import Call, CountingCache, windowed_layers
from kvbench.backends.hf.residuals import residuals_watched
from kvbench.backends.hf.rotary import angles_of
from kvbench.engine.engine import Engine
from kvbench.memory.transfer import uploaded
from kvbench.spans import PARTS

Progress = Callable[[int, int], None]  # (tokens done, tokens in all) of this generation
Draw = Callable[[torch.Tensor], torch.Tensor]  # from logits [B, vocabulary] to tokens [B], such as `sampling.Sampler`


class EngineCache(CountingCache):
    """The measured loop's cache: that loop itself says which phase each forward pass belongs to."""

    def __init__(self, engine: Engine) -> None:
        engine.windowed = engine.windowed or windowed_layers(
            engine.shape.windows
        )  # of the generation that goes on here
        super().__init__(engine.shape.layers, engine.windowed)
        self.engine, self.scaling = engine, engine.shape.scaling

    def attend(self, call: Call, query: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Attention of one layer by the engine, in the phase that the loop is in; see `Engine.attend`."""
        return self.engine.attend(call.layer, query, call.key, call.value, call.sinks)


class Lender(Protocol):
    """A prefill made before the generation, which an engine may begin from (`kvbench.backends.hf.prefilled`)."""

    def first_tokens(self, draw: Draw | None) -> torch.Tensor:
        """The first new token of each row, [B] on the CPU: the likeliest, or drawn."""

    def lend(self, engine: Engine) -> None:
        """Let a fresh engine begin here."""


def _never(tokens: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True)
class Stops:
    """Where a row ends.

    Attributes:
        stop_ids: after the first of these tokens.
        ends: whether it ends with these new tokens; asked after every step, outside the times.
        not_first: tokens that no row may begin with.
    """

    stop_ids: Collection[int] = ()
    ends: Callable[[Sequence[int]], bool] = _never
    not_first: Collection[int] = ()


class Choice:
    """What the new tokens are: the likeliest, drawn ones, or those given.

    Args:
        draw: draws every new token, fresh for one generation.
        given: for each row the tokens that it generates, whatever the model says: their end is the row's, and nothing
            else.
    """

    def __init__(self, draw: Draw | None = None, given: Sequence[Sequence[int]] | None = None) -> None:
        self.draw, self._lengths = draw, None if given is None else list(map(len, given))
        self._given = None if given is None else pad_sequence([torch.tensor(row) for row in given], batch_first=True)

    def first(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first ones, [B], where those of the prefill are `tokens`."""
        return tokens if self._given is None else self._given[:, 0]

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Those of a decode step, [B] on the CPU, of its logits [B, vocabulary]."""
        return chosen_tokens(logits, draw=self.draw) if self._given is None else self._given[:, step]

    def goes_on(self, row: int, tokens: Sequence[int], stops: Stops) -> bool:
        """Whether a row that has these new tokens generates another."""
        if self._lengths is not None:
            return len(tokens) < self._lengths[row]
        return tokens[-1] not in stops.stop_ids and not stops.ends(tokens)


@dataclass
class Generation:
    """What one batch generated, and what it cost.

    Attributes:
        tokens: new token ids of each row, a stop token included.
        ttft_s: seconds from the start to the first new token (prefill, index build, question); without the prefill
            where that was shared.
        tt2t_s: seconds from the start to the second new token, or None.
        step_ms: milliseconds of each decode step.
        prefill_ms: breakdown of the prefill by span, in all.
        breakdown_ms: breakdown of a decode step by span, mean over the steps after the warm-up; the parts add up to
            its mean time.
        audit: see `kvbench.engine.audit.Audit.report`.
        probe: see `kvbench.engine.probes.Probe.report`; {} without probes. With them the timings mean nothing.
        shared_prefill: the prefill was made once for several methods.
    """

    tokens: list[list[int]]
    ttft_s: float
    tt2t_s: float | None = None
    step_ms: list[float] = field(default_factory=list)
    prefill_ms: dict[str, float] = field(default_factory=dict)
    breakdown_ms: dict[str, float] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    shared_prefill: bool = False


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
    question: Sequence[int] = (),
    prefilled: Lender | None = None,
    watch: Callable[[torch.Tensor], object] | None = None,
    warmup: int = 0,
    progress: Progress | None = None,
) -> Generation:
    """Generate for a batch of prompts. A step makes the host wait for the device once, for its tokens.

    Args:
        model: with "kvbench" attention.
        prompts: token ids of each row.
        engine: fresh, made for this batch.
        max_new_tokens: new tokens of each row at most, at least 1.
        stops: where rows end.
        choice: what the new tokens are; None: the likeliest.
        prefill_chunk: prompt columns in one forward pass; None: all.
        question: token ids that follow every prompt and are read as decode steps, so through the method.
        prefilled: begin from this prefill of the prompts instead of one of its own.
        watch: called after every step with its logits [B, vocabulary], outside the times.
        warmup: first decode steps that the breakdown leaves out.
        progress: called after every chunk and step.

    Raises:
        FloatingPointError: NaN or inf in the logits, or in a query or key that a method would be shown.
    """
    choice, read = choice or Choice(), max(map(len, prompts)) + len(question)

    def done(columns: int) -> None:
        if progress:
            progress(columns, read + max_new_tokens)

    cache = EngineCache(engine)
    tokens, generation = _read(model, prompts, cache, question, prefilled, prefill_chunk, stops, choice, done)
    active = [choice.goes_on(row, own, stops) for row, own in enumerate(generation.tokens)]
    for step in range(1, max_new_tokens):
        if not any(active):
            break
        logits, tokens, took = _step(model, tokens, cache, active, choice, step)
        generation.step_ms.append(took * 1e3)
        engine.settle()
        if watch:
            watch(logits)
        if step == warmup:
            engine.spans.reset()
        for row in (row for row, going in enumerate(active) if going):
            generation.tokens[row].append(int(tokens[row]))
            active[row] = choice.goes_on(row, generation.tokens[row], stops)
        done(read + step + 1)
    return _concluded(generation, engine, warmup)


def _read(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    cache: EngineCache,
    question: Sequence[int],
    prefilled: Lender | None,
    chunk: int | None,
    stops: Stops,
    choice: Choice,
    done: Callable[[int], object],
) -> tuple[torch.Tensor, Generation]:
    """Read prompts and question: each row's first new token, [B] on the CPU, and a generation that begins with them."""
    start, engine, counting = time.perf_counter(), cache.engine, 0.0
    banned, draw = ((), None) if question else (stops.not_first, choice.draw)
    with engine.spans("other"):
        if prefilled is None:
            tokens = prefill(model, prompts, cache, chunk, done, banned, draw)
        else:
            prefilled.lend(engine)
            tokens = prefilled.first_tokens(draw)
    for index, token in enumerate(question, 1):
        banned, draw = (stops.not_first, choice.draw) if index == len(question) else ((), None)
        with engine.spans("other"):
            tokens = decode_step(model, torch.full_like(tokens, token), cache, [True] * len(prompts), banned, draw)
        stopped = time.perf_counter()
        engine.settle()
        counting += time.perf_counter() - stopped
    tokens = choice.first(tokens)
    generation = Generation([[token] for token in tokens.tolist()], time.perf_counter() - start - counting)
    generation.shared_prefill = prefilled is not None
    generation.prefill_ms = _milliseconds(engine.spans.reset(), 1)
    return tokens, generation


def _step(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    cache: EngineCache,
    active: Sequence[bool],
    choice: Choice,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One timed decode step: its logits [B, vocabulary], the tokens that follow, [B] on the CPU, and its seconds."""
    began = time.perf_counter()
    with cache.engine.spans("other"):
        logits = step_logits(model, tokens, cache, active)
        tokens = choice(logits, step)
    return logits, tokens, time.perf_counter() - began


def _concluded(generation: Generation, engine: Engine, warmup: int) -> Generation:
    """A generation that has ended, with what it cost."""
    if generation.step_ms:
        generation.tt2t_s = generation.ttft_s + generation.step_ms[0] / 1e3
        measured = len(generation.step_ms) - warmup
        generation.breakdown_ms = _milliseconds(engine.spans.reset(), measured) if measured > 0 else {}
    generation.audit = engine.report()
    generation.probe = engine.probe.report() if engine.probe else {}
    return generation


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
            ending = [row for row, own in enumerate(ends) if column < own <= end]
            columns = sorted({ends[row] - 1 - column for row in ending})
            engine.start_chunk(part)
            first, length = uploaded(torch.tensor([engine.offsets, [*engine.shape.lengths]]), ids.device)[..., None]
            positions = (torch.arange(column, end, device=ids.device) - first).clamp(min=0).minimum(length - 1)
            logits = _forward(model, part, positions, cache, columns, end)
            for row in ending:
                last[row] = logits[row, columns.index(ends[row] - 1 - column)].clone()  # and no more of the chunk's
            progress(end)
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
    ids, positions = uploaded(torch.stack([tokens, torch.tensor(lengths)]), model.device)
    logits = _forward(model, ids[:, None], positions[:, None], cache, None, max(lengths) + 1)
    return logits[:, -1]


def _forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: EngineCache,
    columns: list[int] | None,
    end: int,
) -> torch.Tensor:
    """Logits [B, len(columns), vocabulary]; None or [] = the last column, which is column end - 1 of all so far."""
    spread = bool(cache.engine.shape.elsewhere)  # the last layer's device is another one than that of the ids
    keep = torch.tensor(columns, device="cpu" if spread else ids.device) if columns else 1
    padding, offsets = None, cache.engine.offsets
    if any(offsets):
        padding = torch.arange(end, device=ids.device) >= uploaded(torch.tensor(offsets), ids.device)[:, None]
    engine = cache.engine
    lengths = [length + 1 for length in engine.lengths] if engine.prefilled else engine.shape.lengths
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


def chosen_tokens(logits: torch.Tensor, banned: Collection[int] = (), draw: Draw | None = None) -> torch.Tensor:
    """Tokens [B] of logits [B, vocabulary], on the CPU: the likeliest, or drawn.

    Raises:
        FloatingPointError: NaN or inf in the logits; both reach the maximum, so one test finds them.
    """
    if banned:
        logits = logits.index_fill(-1, uploaded(torch.tensor(sorted(banned)), logits.device), -torch.inf)
    best, tokens = logits.max(dim=-1)
    if draw is not None:
        tokens = draw(logits)
    tokens, finite = torch.stack([tokens, torch.isfinite(best).long()]).cpu()
    if not bool(finite.all()):
        raise FloatingPointError("the model's logits are NaN or infinite")
    return tokens


def _milliseconds(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """Spans per step; the standard parts always, a method's own spans beside them."""
    return {name: seconds.get(name, 0.0) * 1e3 / steps for name in (*PARTS, *sorted(set(seconds) - set(PARTS)))}
