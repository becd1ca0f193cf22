"""Tasks: load samples, score outputs. One file a family; a task knows no model, no method and no results folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    Attributes:
        id: unique within the task and stable across runs; resume goes by it.
        prompt: the raw text, before any chat template.
        answers: accepted answers.
        max_new_tokens: tokens to generate at most.
        question: the end of `prompt` that asks, or "" where the task has no such part.
        group: the subset or cell it counts towards.
        meta: what a report may group by (length, depth, ...); JSON values.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    question: str = ""
    group: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """What the harness asks of a task. `metric` names the main one of the scores that `score` returns, each 0..1."""

    name: str
    metric: str

    def __len__(self) -> int:
        """Number of samples `samples` yields."""

    def samples(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Sample]:
        """All samples, in an order whose every prefix is a fair smaller run."""

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Scores of one decoded output, each in 0..1."""


def take(samples: Iterable[Sample], limit: int | None) -> Iterator[Sample]:
    """The first `limit` samples (None: all)."""
    for count, sample in enumerate(samples):
        if limit is not None and count >= limit:
            return
        yield sample
