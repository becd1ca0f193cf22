"""A sample's prompt becomes token ids, raw or through the chat template, the same way for every
method.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.models.prompts import appended, chat_text

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer
    from kvbench.tasks import Sample


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model sees it.

    Attributes
    ----------
    ids
        token ids, special tokens included, BOS at most once.
    question_start
        index of the token that holds the first character of `Sample.question`; None where the
        sample has no question or the tokenizer (a slow one) keeps no offsets.
    cut
        tokens that the middle of the raw prompt lost.
    """

    ids: list[int]
    question_start: int | None = None
    cut: int = 0


def render(sample: Sample, tokenizer: Tokenizer, chat: bool, window: int | None = None) -> Rendered:
    """Token ids of a sample's prompt.

    Parameters
    ----------
    sample
        its prompt is used as it is, or as the one user message of the chat template.
    tokenizer
        adds its own special tokens to a raw prompt; a template's text brings its own, so there it
        adds none.
    chat
        what `Protocol.uses_chat` says.
    window
        tokens that the model's positions reach; a prompt that may be cut, is cut until it and the
        new tokens fit. None: no end.

    Raises
    ------
    ValueError
        the template does not keep the question as it was, or the window has no room for any prompt.
    """
    whole = _rendered(sample, sample.prompt, tokenizer, chat)
    if not sample.truncate:
        return whole
    # LongBench cuts the raw prompt, special tokens counted, before it meets the template.
    raw: list[int] = tokenizer(sample.prompt, verbose=False)["input_ids"]
    room = math.inf if window is None else window - sample.max_new_tokens
    most = min(
        len(raw), sample.max_length or len(raw), room - (len(whole.ids) - len(raw) if chat else 0)
    )
    rendered = whole if most == len(raw) else None
    # Two halves of a text may make a few tokens more than they were.
    while rendered is None or len(rendered.ids) > room:
        if rendered is not None:
            most -= len(rendered.ids) - room
        if most < 2:
            raise ValueError(
                f"the model's window of {window} tokens has no room for a prompt beside"
                f" {sample.max_new_tokens} new tokens; choose another model"
            )
        half = int(most) // 2
        rendered = _rendered(
            sample, _halves(raw, half, tokenizer), tokenizer, chat, len(raw) - 2 * half
        )
    return rendered


def _halves(ids: list[int], half: int, tokenizer: Tokenizer) -> str:
    """The text of the first and the last `half` tokens."""
    parts = (ids[:half], ids[len(ids) - half :])
    return "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in parts)


def _rendered(
    sample: Sample, prompt: str, tokenizer: Tokenizer, chat: bool, cut: int = 0
) -> Rendered:
    text = (chat_text(prompt, tokenizer) if chat else prompt) + sample.answer_prefix
    locate = bool(sample.question) and tokenizer.is_fast
    encoded = tokenizer(
        text, add_special_tokens=not chat, return_offsets_mapping=locate, verbose=False
    )
    ids = list(encoded["input_ids"])
    if not chat:
        ids = ids[: len(ids) - appended(tokenizer)]
    start = _question_character(text, sample.question) if locate else None
    if start is None and locate and not cut:
        raise ValueError(
            f"the chat template changed the question {sample.question!r}: use protocol.chat=off"
        )
    if start is None:
        return Rendered(ids, cut=cut)
    # Special tokens have empty offsets: they hold no character and are passed over.
    offsets = enumerate(encoded["offset_mapping"])
    question = next((index for index, (_, end) in offsets if end > start), None)
    if question is None:
        raise ValueError(
            f"the tokenizer drops the question {sample.question!r}; expected a tokenizer that keeps"
            " texts"
        )
    return Rendered(ids, question, cut)


def _question_character(text: str, question: str) -> int | None:
    """Where the question starts in the rendered text; the last place, since a prompt may repeat it
    (few-shot).
    """
    start = text.rfind(question)
    if start < 0:  # many templates trim the message
        start = text.rfind(question.strip())
    return None if start < 0 else start
