"""What is asked of a generation: its question, what the new tokens are, and where a row ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.memory.transfer import uploaded

Progress = Callable[[int, int], object]  # (tokens done, tokens in all) of a generation
# from logits [B, vocabulary] to tokens [B], such as `kvbench.backends.hf.sampling.Sampler`
Draw = Callable[[Tensor], Tensor]


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
        as a later turn of a conversation (`Engine.start_turn`); else a decode step for each token.
    """

    rows: Sequence[Sequence[int]] = ()
    at_once: bool = False

    def __len__(self) -> int:
        """Tokens of a row."""
        return len(self.rows[0]) if self.rows else 0


@dataclass(frozen=True)
class GenerationRequest:
    """What is generated after prompts.

    Attributes
    ----------
    max_new_tokens, stops
        new tokens of each row at most, at least 1, and where it ends before.
    draw
        draws every new token, fresh for one generation; None: the likeliest.
    forced_tokens
        what each row generates, whatever the model says, and nothing else ends it; (): nothing is
        forced.
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
    draw: Draw | None = None
    forced_tokens: Sequence[Sequence[int]] = ()
    question: QuestionTokens = QuestionTokens()
    watch: Callable[[Tensor], object] | None = None
    warmup: int = 0
    progress: Progress | None = None

    def first(self, logits: Tensor) -> Tensor:
        """The first new tokens [B], of the logits [B, vocabulary] of all that was read before."""
        tokens = chosen_tokens(logits, self.stops.not_first, self.draw)
        return self._forced(0) if self.forced_tokens else tokens

    def following(self, logits: Tensor, step: int) -> Tensor:
        """Those of a decode step, [B] on the CPU, of its logits [B, vocabulary]."""
        return self._forced(step) if self.forced_tokens else chosen_tokens(logits, draw=self.draw)

    def _forced(self, step: int) -> Tensor:
        # a row that has ended reads any token
        return torch.tensor([row[step] if step < len(row) else 0 for row in self.forced_tokens])

    def goes_on(self, row: int, tokens: Sequence[int]) -> bool:
        """Whether a row that has these new tokens generates another."""
        if self.forced_tokens:
            return len(tokens) < len(self.forced_tokens[row])
        return tokens[-1] not in self.stops.stop_ids and not self.stops.ends(tokens)

    def note(self, longest: int, done: int) -> None:
        """Report `done` tokens, of a row whose prompt has `longest`."""
        if self.progress:
            self.progress(done, longest + len(self.question) + self.max_new_tokens)


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
