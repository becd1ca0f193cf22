"""The samples that a start of a run has before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from kvbench.config import ConfigError
from kvbench.measure.arm import Arm
from kvbench.models.prompts import tokenizing
from kvbench.tasks import WHOLE, Sample, Shard, several, take


class Work(NamedTuple):
    """The samples that a start has before it.

    Attributes
    ----------
    samples
        in the order to run them.
    ids
        of all samples of the run, finished ones included; complete once `samples` is used up.
    whole
        samples of the run in all.
    total
        those of this shard, finished ones included.
    done
        of these, finished by an earlier start.
    everything
        no limit leaves samples of the task out.
    share
        of a sample in the work of this start; they add up to 1.
    """

    samples: Iterable[Sample]
    ids: list[str]
    whole: int
    total: int
    done: int
    everything: bool
    share: Callable[[Sample], float]


def work_of(arm: Arm, limit: int | None, done: Collection[str], shard: Shard = WHOLE) -> Work:
    """What is left to do: stored samples longest first, so that what does not fit fails early;
    generated ones as made.

    What is wrong with a task's settings or data shows here or at the first sample.
    """
    ids: list[str] = []
    answers = arm.protocol.samples
    pending = _pending(samples(arm, limit), ids, done, shard, answers)
    if not arm.task.stored:
        prompts = min(len(arm.task), limit or len(arm.task))
        whole, total = answers * prompts, answers * shard.share(prompts)
        # Whose a finished sample is shows only when it is made anew: of those there this shard has
        # its share.
        finished = total * min(len(done), whole) // max(1, whole)
        remaining = max(1, total - finished)
        return Work(
            pending,
            ids,
            whole,
            total,
            finished,
            prompts < (limit or math.inf),
            lambda sample: 1 / remaining,
        )
    # by the contexts
    longest_first = sorted(pending, key=lambda sample: len(sample.question) - len(sample.prompt))
    work = sum(map(_length, longest_first))
    total = answers * shard.share(len(ids) // answers)
    return Work(
        longest_first,
        ids,
        len(ids),
        total,
        total - len(longest_first),
        len(ids) // answers < (limit or math.inf),
        lambda sample: _length(sample) / work,
    )


def _length(sample: Sample) -> int:
    """How much there is to read, 1 or more: characters of a prompt, or its tokens and the forced
    ones.
    """
    forced = sample.forced
    return max(1, len(forced.prompt) + len(forced.tokens) if forced else len(sample.prompt))


def _pending(
    samples: Iterable[Sample], ids: list[str], done: Collection[str], shard: Shard, answers: int
) -> Iterator[Sample]:
    """The samples of a shard that are not done; the ids of all are noted as they come.

    Parameters
    ----------
    answers
        so many of them, one after the other, are answers to one prompt, which one shard has.
    """
    for place, sample in enumerate(samples):
        ids.append(sample.id)
        if shard.has(place // answers) and sample.id not in done:
            yield sample


def samples(arm: Arm, limit: int | None) -> Iterator[Sample]:
    """The samples of this run, as the task orders them, and each answer to one."""
    try:
        with tokenizing(str(arm.loaded.tokenizer.name_or_path)):
            taken = take(arm.task.samples(arm.loaded.tokenizer, arm.config.seed), limit)
            yield from several(taken, arm.protocol.samples)
    except ValueError as error:
        raise ConfigError(str(error)) from error
