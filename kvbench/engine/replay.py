"""What a model reads when it reads prompts once more, for methods that ask what it looks at then
(`Needs.replay`): token ids, made of the prompts and of a tokenizer's template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from kvbench.config import ConfigError
from kvbench.method import Prompt, Replay
from kvbench.models.prompts import chat_text, raw_ids

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

TEXTS = ("One.", "Two.")  # of two users: what the template makes of both begins alike
PLAIN_SUFFIX = "\n"  # between a question and its answer where there is no template, as in kvpress


class Pass(NamedTuple):
    """One forward pass of a replay, see `kvbench.method.Replayed`; `ids` are what it reads."""

    row: int
    start: int
    stop: int
    ids: list[int]


@dataclass(frozen=True)
class Template:
    """How a tokenizer reads text, and what it puts around a user's.

    Attributes
    ----------
    encode
        token ids of a text, none added.
    header, suffix
        token ids before and after a user's text; () without a chat template.
    bos
        that a raw text begins with; None: none.
    """

    encode: Callable[[str], list[int]]
    header: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    bos: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, name: str) -> Template:
        """That of a tokenizer.

        Raises
        ------
        ConfigError
            there is none; `name` says what needs it.
        """
        if tokenizer is None:
            raise ConfigError(
                f"tokenizer=None: {name} needs the chat template and the ids of texts; pass the"
                " tokenizer"
            )

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids

        bos = tokenizer.bos_token_id if tokenizer.bos_token_id in raw_ids("", tokenizer) else None
        if not tokenizer.chat_template:
            return cls(encode, bos=bos)
        wrapped = [chat_text(content, tokenizer) for content in TEXTS]
        header = commonprefix([encode(text) for text in wrapped])
        suffix = encode(wrapped[0].rpartition(TEXTS[0])[2])
        return cls(encode, tuple(header), tuple(suffix), bos)

    def prefix(self, ids: Sequence[int]) -> int:
        """How many tokens come before the context of a row."""
        return self._wrapped(ids) or int(ids[0] == self.bos)

    def prefixes(self, prompt: Prompt) -> tuple[int, ...]:
        """`prefix` of every row of a prompt."""
        first = prompt.token_ids[:, : max(1, len(self.header))].tolist()
        return tuple(
            self.prefix(ids[:length]) for ids, length in zip(first, prompt.lengths, strict=True)
        )

    def passes(self, rows: Sequence[Sequence[int]], replay: Replay) -> Iterator[Pass]:
        """All passes over rows of token ids, row by row."""
        for row, ids in enumerate(rows):
            begin = self.prefix(ids)
            suffix = [*self.suffix] if self._wrapped(ids) else self.encode(PLAIN_SUFFIX)
            for start in range(begin, len(ids), replay.chunk or len(ids)):
                stop = min(start + (replay.chunk or len(ids)), len(ids))
                first = start == begin
                instruction = self.encode(replay.ask if first else replay.go_on)
                before = [] if first else ids[max(start - replay.overlap, begin) : start]
                yield Pass(row, start, stop, [*instruction, *before, *suffix, *ids[start:stop]])

    def _wrapped(self, ids: Sequence[int]) -> int:
        """Tokens of the header that a row begins with, or 0; the last one may have become one with
        the text's first.
        """
        whole = len(self.header)
        common = len(commonprefix([tuple(ids[:whole]), self.header]))
        return common if common == whole or common == whole - 1 >= 2 else 0
