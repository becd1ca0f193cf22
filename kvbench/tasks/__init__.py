"""Tasks: load samples, score outputs.

One file a family; a task knows no model, no method and no results folder.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvbench.config import ConfigError, TargetConfig
from kvbench.tasks.sources import DataFile

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

Keys = Literal["model", "synthetic_attention"]


@dataclass(frozen=True)
class Timed:
    """A timed sample: token ids in place of a text, and no end before the last step.

    Attributes
    ----------
    rows
        token ids of each row of the batch, all of one length.
    warmup
        first decode steps, which the time per token leaves out.
    keys
        whose keys and queries are stored and asked: the model's, or those of
        `kvbench.measure.synthetic`.
    prefill
        the model reads the prompt; else every layer's store is filled with synthetic keys and
        values.
    """

    rows: Sequence[Sequence[int]]
    warmup: int = 0
    keys: Keys = "model"
    prefill: bool = True


@dataclass(frozen=True)
class ForcedOutput:
    """What a sample is whose output is given to the model: all methods see the same tokens.

    Attributes
    ----------
    prompt
        token ids to prefill.
    tokens
        token ids that follow, each read in a decode step of its own but for the last, which is only
        predicted.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    Attributes
    ----------
    id
        unique within the task and stable across runs; resume goes by it.
    prompt
        the raw text, before any chat template and without `answer_prefix`.
    answers
        accepted answers.
    max_new_tokens
        tokens to generate at most.
    question
        the end of `prompt` that asks, or "" where the task has no such part.
    answer_prefix
        begins the answer: after the prompt, or after the assistant's header of a chat template.
    group
        the subset or cell it counts towards.
    meta
        what a report may group by (length, depth, ...); JSON values.
    chat
        the benchmark puts it through the chat template; `protocol.chat` may say otherwise.
    stop
        texts; generation ends once the decoded output holds one of them. Cutting there is the
        task's affair.
    end_token
        a text whose last token ends the output as the model's own stop tokens do; then none of them
        comes first.
    truncate
        a prompt that is too long loses its middle, and is no error.
    max_length
        with `truncate`, tokens of the longest raw prompt; None: what the model's window has room
        for.
    keep_ids
        its score goes by token ids: those of the output are kept in `meta` as "output_ids".
    timed
        its generation is timed, and it has no prompt but this.
    forced
        its output is given, and compared with full attention's; it has no prompt but this.
    error
        why it cannot run (a bad line in a data file), or ""; it then counts as failed.
    of
        where several answers to a prompt are asked for, the id of the task's sample; `id` is then
        the answer's.
    answer
        which of them it is, from 0 on.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    question: str = ""
    answer_prefix: str = ""
    group: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    stop: tuple[str, ...] = ()
    end_token: str = ""
    truncate: bool = False
    max_length: int | None = None
    keep_ids: bool = False
    timed: Timed | None = None
    forced: ForcedOutput | None = None
    error: str = ""
    of: str = ""
    answer: int = 0

    @property
    def base_id(self) -> str:
        """The id that the task gave it, whichever of several answers it is."""
        return self.of or self.id


class Task(ABC):
    """What the harness asks of a task.

    Subclass it, set `name` and `metric`, and say what the samples and scores are.

    A constructor checks its options and neither reads nor fetches anything, so that bad values are
    refused at once and stored outputs can be scored where the data is not.

    Attributes
    ----------
    name
        what results call it.
    metric
        the main one of the scores that `score` returns, each 0..1.
    sources
        files that the samples are read from; their content is part of a result's identity.
    secret
        nobody may pass its prompts on, so results hold no word of them.
    stored
        samples are read from files, cheap to have all at once: the longest run first.
    notes
        what else decides a score (the version of a library), kept with every result.
    permissions
        options by which scoring may do more than compute, such as run what a model wrote; that a
        stored run had them is no permission to have them again.
    """

    name: str
    metric: str
    sources: Sequence[DataFile] = ()
    secret: bool = False
    stored: bool = False
    notes: Mapping[str, str] = MappingProxyType({})
    permissions: Sequence[str] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples that `samples` yields."""

    @abstractmethod
    def samples(self, tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
        """All samples, in an order whose every prefix is a fair smaller run.

        Raises
        ------
        ValueError
            something is wrong that shows only with the tokenizer or the data.
        """

    @abstractmethod
    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Scores of one decoded output, each in 0..1.

        Of the sample it uses id, answers, group and meta alone.
        """

    def questions(self, sample: Sample, output: str) -> dict[str, str]:
        """What a judge, another model, is to be asked about an output, by name; {}: nothing.

        A question "" has no part of the output to ask about, and counts as answered with no.
        """
        return {}


def task_of(config: TargetConfig) -> Task:
    """The task that the `task` group of a run asks for.

    Raises
    ------
    ConfigError
        it cannot be built, or is no `Task`.
    """
    task = config.build()
    if not isinstance(task, Task):
        raise ConfigError(
            f"_target_={config.target}: no task; expected a subclass of kvbench.tasks.Task"
        )
    return task


def take(samples: Iterable[Sample], limit: int | None) -> Iterator[Sample]:
    """The first `limit` samples (None: all), and no other is made."""
    return itertools.islice(samples, limit)


def several(samples: Iterable[Sample], count: int) -> Iterator[Sample]:
    """Each sample as often as answers to it are asked for, one after the other.

    A single answer is the sample.
    """
    for sample in samples:
        for answer in range(count):
            yield (
                sample
                if count == 1
                else replace(sample, id=f"{sample.id}#{answer + 1}", of=sample.id, answer=answer)
            )


class Shard(NamedTuple):
    """One of several jobs that share out the samples of a run: it has every `of`-th, from place
    `number` on.
    """

    number: int = 0
    of: int = 1

    def has(self, place: int) -> bool:
        """Whether the sample at this place, counted from 0, is one of its own."""
        return place % self.of == self.number

    def share(self, samples: int) -> int:
        """How many of so many samples are its own."""
        return len(range(self.number, samples, self.of))

    def __str__(self) -> str:
        return f"{self.number + 1} of {self.of}"


WHOLE = Shard()  # one job has all samples
