"""What is asked of a generation: its questions, what the new tokens are, and where a row ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.engine.engine import Engine
from kvbench.memory.transfer import uploaded

Progress = Callable[[int, int], object]  # (tokens done, tokens in all) of a generation
# from logits [B, vocabulary] to tokens [B], such as `kvbench.backends.hf.sampling.Sampler`
Draw = Callable[[Tensor], Tensor]


class PrefillSource(Protocol):
    """A prefill that was made before the generation, from which an engine may begin."""

    def lend(self, engine: Engine) -> Tensor:
        """Let a fresh engine begin here; the logits [B, vocabulary] of what comes next."""


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
        whether it ends with these new tokens; called after every step, outside the times.
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
    forced_tokens
        what each row generates, whatever the model says; nothing else ends a row.
    """

    def __init__(
        self, draw: Draw | None = None, forced_tokens: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.draw, self._lengths = draw, list[int]()
        self._forced_tokens = torch.empty(0)
        if forced_tokens is not None:
            self._lengths = list(map(len, forced_tokens))
            self._forced_tokens = pad_sequence(list(map(torch.tensor, forced_tokens)), True)

    def first(self, tokens: Tensor) -> Tensor:
        """The first ones, [B], where those of the prefill are `tokens`."""
        return self._forced_tokens[:, 0] if self._lengths else tokens

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        """Those of a decode step, [B] on the CPU, of its logits [B, vocabulary]."""
        if self._lengths:
            return self._forced_tokens[:, step]
        return chosen_tokens(logits, draw=self.draw)

    def goes_on(self, row: int, tokens: Sequence[int], stops: Stops) -> bool:
        """Whether a row that has these new tokens generates another."""
        if self._lengths:
            return len(tokens) < self._lengths[row]
        return tokens[-1] not in stops.stop_ids and not stops.ends(tokens)


@dataclass(frozen=True)
class GenerationRequest:
    """What is generated after prompts.

    Attributes
    ----------
    max_new_tokens, stops
        new tokens of each row at most, at least 1, and where it ends before.
    choice
        what the new tokens are.
    question
        what follows every prompt, read through the method.
    watch
        called after every step with its logits [B, vocabulary], outside the times.
    warmup
        first decode steps that the breakdown leaves out.
    progress
        of a generation that is alone, called after every chunk and step.
    """

    max_new_tokens: int
    stops: Stops = Stops()
    choice: Choice = field(default_factory=Choice)
    question: QuestionTokens = QuestionTokens()
    watch: Callable[[Tensor], object] | None = None
    warmup: int = 0
    progress: Progress | None = None

    def first(self, logits: Tensor) -> Tensor:
        """The first new tokens [B], of the logits [B, vocabulary] of all that was read before."""
        return chosen_tokens(logits, self.stops.not_first, self.choice.draw)

    def note(self, longest: int, done: int) -> None:
        """Report `done` tokens, of a row whose prompt has `longest`."""
        if self.progress:
            self.progress(done, longest + len(self.question) + self.max_new_tokens)


NOTHING = GenerationRequest(max_new_tokens=1)


def chosen_tokens(logits: Tensor, banned: Collection[int] = (), draw: Draw | None = None) -> Tensor:
    """Tokens [B] of logits [B, vocabulary], on the CPU: the likeliest, or drawn.

    Raises
    ------
    FloatingPointError
        NaN or inf in the logits; both reach the maximum, so one test finds them.
    """
    if banned:
        ids = uploaded(torch.tensor(sorted(banned)), logits.device)
        logits = logits.index_fill(-1, ids, -torch.inf)
    best, tokens = logits.max(dim=-1)
    if draw is not None:
        tokens = draw(logits)
    tokens, finite = torch.stack([tokens, torch.isfinite(best).long()]).cpu()
    if not bool(finite.all()):
        raise FloatingPointError("the model's logits are NaN or infinite")
    return tokens
