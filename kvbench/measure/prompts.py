"""Samples as the model reads them: their prompts and questions in tokens, and in batches."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.config import ConfigError
from kvbench.measure.arm import Arm
from kvbench.measure.render import Rendered, render
from kvbench.models import hub
from kvbench.models.prompts import tokenizing
from kvbench.tasks import Sample

MOST_EXCERPTS, MARGIN = 3, 160  # answers in an excerpt, and characters on each side of one
LONGER = 64  # tokens by which another question about a context may be longer


@dataclass(frozen=True)
class TokenizedSample:
    """A sample as the model reads it, the same for every arm of one protocol.

    Attributes
    ----------
    ids
        token ids to prefill, of a batch the first row's; [] where the sample cannot run.
    question
        token ids to read after it, unless `protocol.question` is "with".
    name
        what a method's randomness derives from: the sample's id, or the context's, which its
        questions share.
    record
        what samples.jsonl says of it before anything is generated.
    """

    sample: Sample
    ids: list[int]
    question: list[int]
    record: dict[str, Any]
    name: str = ""

    @property
    def can_run(self) -> bool:
        """Whether it can be generated for."""
        return not self.record["error"]

    @property
    def new_tokens(self) -> int:
        """Tokens that follow the prompt, at most."""
        return self.sample.max_new_tokens + len(self.question)

    @property
    def room(self) -> int:
        """Tokens to have room for after the prompt, other questions about it included."""
        return self.new_tokens + (LONGER if self.question else 0)

    def failure(self, metric: str, error: str = "") -> dict[str, Any]:
        """The record of a sample that scores 0 for a reason of its own: `error`, unless it cannot
        run.
        """
        error = self.record["error"] or error
        return {**self.record, "output": "", "scores": {metric: 0.0}, "error": error}


def excerpt(sample: Sample) -> str:
    """What a reader needs of a prompt: around its answers, where these stand in it, and its end,
    which asks.
    """
    text, cuts = sample.prompt, []
    for answer in filter(None, sample.answers[:MOST_EXCERPTS]):
        if match := re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text):
            cuts.append(text[max(0, match.start() - MARGIN) : match.end() + MARGIN])
    return "\n...\n".join([*cuts, text[-MARGIN:]])


def prompt_of(arm: Arm, sample: Sample) -> TokenizedSample:
    """The prompt of a sample under an arm's protocol.

    Raises
    ------
    ConfigError
        what the protocol asks for cannot be done with it, or it does not fit the window.
    """
    tokenizer, window = arm.loaded.tokenizer, arm.loaded.card.context_length
    chat = _token_ids(sample) is None and arm.protocol.uses_chat(sample, tokenizer)
    record: dict[str, Any] = {
        "id": sample.id,
        **({"sample": sample.of} if sample.of else {}),
        "group": sample.group,
        "meta": dict(sample.meta),
        "answers": list(sample.answers),
        **({"excerpt": excerpt(sample)} if sample.prompt and not arm.task.secret else {}),
        "chat": chat,
        "prompt_tokens": 0,
        "error": sample.error or None,
    }
    if sample.error:
        return TokenizedSample(sample, [], [], record)
    try:
        ready = _token_ids(sample)
        with tokenizing(str(tokenizer.name_or_path)):
            rendered = render(sample, tokenizer, chat, window) if ready is None else Rendered(ready)
    except ValueError as error:
        raise ConfigError(f"{sample.id}: {error}") from error
    ids, question = rendered.ids, []
    record |= {"prompt_tokens": len(rendered.ids), "cut_tokens": rendered.cut}
    last = max([*ids, *(sample.forced.tokens if sample.forced else ())], default=0)
    if last >= (vocabulary := arm.loaded.card.vocabulary):
        raise ConfigError(
            f"{sample.id}: the tokenizer of {arm.loaded.name} makes token {last} of it, and the"
            f" model has {vocabulary} tokens; expected the tokenizer that belongs to its weights"
        )
    if (how := arm.protocol.question) != "with":
        if not rendered.question_start or sample.question == sample.prompt:
            raise ConfigError(
                f"protocol.question={how}: {sample.id} has no question apart from its context; use"
                " with"
            )
        ids, question = ids[: rendered.question_start], ids[rendered.question_start :]
        record["question_tokens"] = len(question)
    if window is not None and len(rendered.ids) + sample.max_new_tokens > window:
        key = "task.lengths" if "lengths" in arm.config.task.options else "task"
        raise ConfigError(
            f"{key}: {sample.id} takes {len(rendered.ids)} tokens and {sample.max_new_tokens} new"
            f" ones, more than the {window} of {arm.loaded.name}; choose a shorter prompt or"
            " another model" + hub.how_to_stretch(arm.loaded.revision.startswith("dummy-"))
        )
    name = hashlib.sha256(str(ids).encode()).hexdigest() if question else sample.base_id
    return TokenizedSample(sample, ids, question, record, name)


def _token_ids(sample: Sample) -> list[int] | None:
    """The prompt of a sample that is no text, in a batch the first row's; None for a text."""
    if sample.timed:
        return list(sample.timed.rows[0])
    return list(sample.forced.prompt) if sample.forced else None


def batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Samples in batches of at most `size` that one generation can serve: alike in new tokens and
    in what ends them.

    Of two prompts of a batch, which is padded to the longest, none has twice the other's letters.

    Raises
    ------
    ConfigError
        a sample cannot be in a batch.
    """
    waiting: dict[Any, list[Sample]] = {}
    for sample in samples:
        if size > 1 and (sample.timed or sample.forced):
            raise ConfigError(f"batch={size}: {sample.id} is measured by itself; expected 1")
        key = (
            sample.max_new_tokens,
            sample.stop,
            sample.end_token,
            len(sample.prompt).bit_length(),
        )
        batch = waiting.setdefault(key, [])
        batch.append(sample)
        if len(batch) == size:
            yield waiting.pop(key)
    yield from waiting.values()


def read(arm: Arm, samples: Iterable[Sample]) -> Iterator[list[list[TokenizedSample]]]:
    """Samples as the model reads them, in batches whose questions are equally long: those together
    that one prefill can serve, questions about the same contexts or answers to the same prompts.

    Raises
    ------
    ConfigError
        a sample cannot run as the protocol asks, or not in a batch; after all before it.
    """
    waiting: list[list[TokenizedSample]] = []
    try:
        for batch in _by_question_length(arm, batches(samples, arm.config.batch)):
            of = contexts(batch)
            if waiting and (of is None or of != contexts(waiting[0])):
                yield waiting
                waiting = []
            waiting.append(batch)
    except ConfigError:
        if waiting:
            yield waiting
        raise
    if waiting:
        yield waiting


def _by_question_length(
    arm: Arm, groups: Iterable[list[Sample]]
) -> Iterator[list[TokenizedSample]]:
    for group in groups:
        by_length: dict[int, list[TokenizedSample]] = {}
        for prompt in (prompt_of(arm, sample) for sample in group):
            by_length.setdefault(len(prompt.question), []).append(prompt)
        yield from by_length.values()


def contexts(prompts: Sequence[TokenizedSample]) -> list[tuple[str, list[int]]] | None:
    """What a prefill of prompts is of; None where no other prompts can have the same."""
    if not (prompts[0].question or prompts[0].sample.of):
        return None
    return [(prompt.name, prompt.ids) for prompt in prompts]
