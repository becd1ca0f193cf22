"""Forward passes after the prompt: over one engine's rows, or over those of several at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvbench.engine.captured import Forward
from kvbench.engine.engine import Engine, KeptMemory, surely_finite
from kvbench.engine.request import chosen_tokens
from kvbench.memory.transfer import uploaded
from kvbench.method import Method
from kvbench.spans import Spans

Answer = TypeVar("Answer")
TokenRows = Sequence[Sequence[int]]


class Errors(dict[int, Exception]):
    """What some of a batch have raised, by their places in it."""

    def ask(self, place: int, ask: Callable[..., Answer], *arguments: object) -> Answer | None:
        """What one answers; None of one that has failed, now or before."""
        if place not in self:
            try:
                return ask(*arguments)
            except Exception as error:
                self[place] = error
        return None


class EngineGroup:
    """What a forward pass asks of an engine in decode steps, answered by several of one model that
    have read their prompts: rows of the batch are theirs in turn.

    Where one of them raises an error its rows are zeros from there on, and it is asked nothing
    more. All rows fill the layers with a window, and end in the last column.

    Attributes
    ----------
    shape
        sizes of the model; lengths and batch are the first engine's alone.
    offsets
        columns of padding before each row, where layers have a window.
    """

    prefilled = True

    def __init__(
        self, engines: Sequence[Engine], windowed: Mapping[int, KeptMemory], errors: Errors
    ) -> None:
        self._engines, self.windowed, self._errors = engines, windowed, errors
        self._rows = [engine.shape.batch for engine in engines]
        self.shape, self.method = engines[0].shape, Method()
        self.spans = Spans(self.shape.device)
        lengths = self.lengths
        self.offsets = [max(lengths) - length if windowed else 0 for length in lengths]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far."""
        return [length for engine in self._engines for length in engine.lengths]

    def start_step(self, tokens: Tensor, active: Sequence[bool]) -> None:
        """A decode forward begins, see `Engine.start_step`."""
        at = 0
        for index, row_tokens in enumerate(tokens.split(self._rows)):
            row_active, at = active[at : at + len(row_tokens)], at + len(row_tokens)
            self._errors.ask(index, self._engines[index].start_step, row_tokens, row_active)

    def run(self, inputs: Tensor, forward: Forward) -> Tensor:
        """Logits of the decode step that was started, see `Engine.run`.

        None is captured: sequences join and leave, and each time all graphs would be captured
        anew, to save the model's launches alone, where every engine launches its own.
        """
        return forward(*uploaded(inputs, self.shape.device))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention [B, Hq, 1, D] of one layer, see `Engine.attend`."""
        valid, out = surely_finite(query, key), list[Tensor]()  # all at once
        parts = zip(*(part.split(self._rows) for part in (query, key, value)), strict=True)
        for index, (engine, row_parts) in enumerate(zip(self._engines, parts, strict=True)):
            attend = partial(engine.attend, valid=valid)
            attended = self._errors.ask(index, attend, layer, *row_parts, sinks)
            out.append(torch.zeros_like(row_parts[0]) if attended is None else attended)
        return torch.cat(out)


class DecodePasses:
    """Passes over the rows of an engine, or of several, after their prompts.

    `forward` is the model's: from token ids and their positions, [B, q] each, and how many tokens
    each row has before them, to the logits [B, vocabulary] after the last ones.
    """

    def __init__(
        self,
        rows: Engine | EngineGroup,
        forward: Callable[[Tensor, Tensor, Sequence[int]], Tensor],
    ) -> None:
        self.rows, self._forward = rows, forward

    def __call__(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        """One step: tokens [B] on the CPU in, the logits [B, vocabulary] of the next ones out."""
        lengths = self.rows.lengths
        self.rows.start_step(tokens, active)

        def forward(ids: Tensor, positions: Tensor) -> Tensor:
            return self._forward(ids[:, None], positions[:, None], lengths)

        return self.rows.run(torch.stack([tokens, torch.tensor(lengths)]), forward)

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """One step of rows that all generate: the likeliest tokens [B] after tokens [B], on the
        CPU.
        """
        return chosen_tokens(self(tokens, [True] * len(tokens)))

    def turn(self, ids: Tensor) -> Tensor:
        """Read tokens [B, q] on the CPU of an engine at once; the logits of the next ones."""
        lengths = self.rows.lengths
        positions = torch.tensor(lengths)[:, None] + torch.arange(ids.shape[1])
        self.rows.start_turn(ids)  # type: ignore[union-attr]
        ids, positions = uploaded(torch.stack([ids, positions]), self.rows.shape.device)
        return self._forward(ids, positions, lengths)


class PrefillSource(Protocol):
    """A prefill that was made before the generation, from which an engine may begin."""

    def lend(self, engine: Engine) -> Tensor:
        """Let a fresh engine begin here; the logits [B, vocabulary] of what comes next."""


class Runner(Protocol):
    """The forward passes of a model."""

    def prefill(
        self,
        engine: Engine,
        prompts: TokenRows,
        chunk: int | None,
        progress: Callable[[int], object],
    ) -> Tensor:
        """Read the prompts of a fresh engine; the logits [B, vocabulary] of what comes after each
        row. Arguments as of `kvbench.engine.batch.Sequence`.
        """

    def passes(self, rows: Engine | EngineGroup) -> DecodePasses:
        """Further passes over what has read its prompts."""

    def joined(self, engines: Sequence[Engine]) -> Mapping[int, KeptMemory]:
        """The layers with a window of several engines as those of one batch, by their index."""

    def alone(self) -> str | None:
        """Why sequences of this model cannot share a pass, or None."""
