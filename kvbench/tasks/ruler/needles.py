"""RULER's needles: one or several values hidden in a long text, to be found by their keys.

After NVIDIA/RULER's own generator (`scripts/data/synthetic/niah.py`).
"""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvbench.tasks.ruler.texts import GENERATED, Essay, sentences
from kvbench.tasks.ruler.writers import (
    ADJECTIVES,
    NOUNS,
    STRINGS,
    WORDS,
    Draft,
    RulerCell,
    Writer,
    Written,
    different,
    unit_of,
)

Kind = Literal["words", "numbers", "uuids"]

_NIAH = STRINGS["niah"]
SUBSETS: tuple[str, ...] = tuple(_NIAH["subsets"])
NEW_TOKENS: int = _NIAH["new_tokens"]

# 40 even points from 0 to 100 %, rounded, as numpy's linspace and round give them.
DEPTHS = tuple(round(100 * point / 39) for point in range(40))


class Asking(NamedTuple):
    """RULER's strings around a text: the frame has `{context}` where it stands."""

    frame: str
    question: str
    answer_prefix: str


@dataclass(frozen=True)
class Needles(Writer):
    """How one task of the niah family hides and asks.

    Field names follow RULER's `type_*` and `num_needle_*`.

    Attributes
    ----------
    haystack
        noise, essay, or needle: lines that look like the needle.
    key, value
        what they are drawn from.
    keys, values, queries
        keys hidden, values of each key, keys asked for.
    essay
        gives the first n words of a sample's essay.
    source
        what results call the essays.
    questions
        about the needles of a sample, each for other keys; where there are too few, more are
        hidden.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Kind
    value: Kind
    keys: int
    values: int
    queries: int
    essay: Essay
    new_tokens: int = NEW_TOKENS
    source: str = GENERATED
    questions: int = 1

    @property
    def hidden(self) -> int:
        """Keys in a text."""
        return max(self.keys, self.queries * self.questions)

    @property
    def least(self) -> int:
        """As many words or lines as there are needles: each line has at most one before it."""
        return self.hidden * self.values

    @property
    def smallest(self) -> int:
        """One small unit, or a word or line for each needle."""
        return max(self.least, self.unit(0))

    def unit(self, length: int) -> int:
        """Words or lines."""
        return unit_of(_NIAH["units"][self.haystack], length)

    def draft(self, cell: RulerCell, index: int) -> Draft:
        """See `write`."""
        writer = replace(self, essay=_cached_essay(self.essay))
        return Draft(functools.partial(writer.write, cell.stream(index), cell.seed))

    def write(self, cell: str, seed: int, size: int) -> Written:
        """The prompt of `cell` around `size` words (essay) or lines.

        Its needles do not change with the size.
        """
        rng = random.Random(f"ruler/{cell}")
        keys = draw(self.key, self.hidden, rng)
        drawn = draw(self.value, self.hidden * self.values, rng)
        values = [drawn[first : first + self.values] for first in range(0, len(drawn), self.values)]
        queried = rng.sample(range(self.hidden), self.queries * self.questions)

        needles = [
            (self.needle(key, value), value)
            for key, row in zip(keys, values, strict=True)
            for value in row
        ]
        random.Random(seed).shuffle(needles)  # RULER: the same permutation in every sample
        if self.haystack == "essay":
            context, depths = _in_sentences(
                self.essay(cell, size), [text for text, _ in needles], rng
            )
        else:
            context, depths = _in_lines(
                self._lines(cell, size, keys, drawn), [text for text, _ in needles], rng
            )
        depth_of = {value: depth for (_, value), depth in zip(needles, depths, strict=True)}

        meta: dict[str, Any] = {
            "haystack": self.source if self.haystack == "essay" else self.haystack
        }
        if "words" in (self.key, self.value):
            meta["words"] = WORDS

        def ask(queries: Sequence[int]) -> Written:
            answers = tuple(value for key in queries for value in values[key])
            asking = self._asking([keys[key] for key in queries])
            return Written(
                asking.frame.format(context=context) + asking.question,
                asking.question,
                asking.answer_prefix,
                answers,
                {"depths": [depth_of[answer] for answer in answers], **meta},
            )

        return Written.all(
            [ask(queried[first :: self.questions]) for first in range(self.questions)]
        )

    def needle(self, key: str, value: str) -> str:
        """The sentence that hides a value."""
        return str(_NIAH["needle"]).format(type=self.value, key=key, value=value)

    def asking(self, queries: Sequence[str]) -> tuple[str, str]:
        """The text around `{context}`, and question with answer prefix, in the right number."""
        asking = self._asking(queries)
        return asking.frame, asking.question + asking.answer_prefix

    def _lines(self, cell: str, size: int, keys: Sequence[str], values: Sequence[str]) -> list[str]:
        """`size` lines of haystack.

        Those that look like needles have keys and values of their own.
        """
        if self.haystack == "noise":
            return [_NIAH["noise"]] * size
        rng = random.Random(f"ruler/{cell}/haystack")
        others = zip(
            draw(self.key, size, rng, keys), draw(self.value, size, rng, values), strict=True
        )
        return [self.needle(key, value) for key, value in others]

    def _asking(self, queries: Sequence[str]) -> Asking:
        """The strings for these keys.

        The number is set in RULER's own strings, before any other text is near: neither a haystack
        nor a chat template has its "are" replaced.
        """
        texts = [_NIAH[key] for key in ("template", "question", "answer_prefix")]
        kind = str(self.value)
        if self.queries * self.values == 1:
            kind = kind.removesuffix("s")
            for many, singular in _NIAH["singular"]:
                texts = [text.replace(many, singular) for text in texts]
        query = (
            queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        )
        return Asking(*(text.format(type=kind, query=query, context="{context}") for text in texts))


# -- keys and values -------------------------------------------------------------------------------


def draw(kind: Kind, count: int, rng: random.Random, taken: Iterable[str] = ()) -> list[str]:
    """`count` different ones of a kind, none of them `taken`.

    Raises
    ------
    ValueError
        so many that drawing different ones would take for ever.
    """
    make, variety = _DRAWS[kind]
    return different(make, variety, kind, count, rng, taken)


def _word(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


# Each kind: how to draw one, and how many there are.
_DRAWS: dict[Kind, tuple[Callable[[random.Random], str], int]] = {
    "words": (_word, len(ADJECTIVES) * len(NOUNS)),
    "numbers": (_number, 9 * 10**6),
    "uuids": (_uuid, 2**122),
}


# -- haystacks -------------------------------------------------------------------------------------


def _cached_essay(essay: Essay) -> Essay:
    """An essay whose words stay for the next size.

    Making them takes as long as counting their tokens.
    """
    words: list[str] = []

    def first(cell: str, count: int) -> list[str]:
        if count > len(words):
            words[:] = essay(cell, count + count // 50)
        return words[:count]

    return first


def _in_sentences(
    words: Sequence[str], needles: Sequence[str], rng: random.Random
) -> tuple[str, list[float]]:
    """Needles between the sentences of an essay, at distinct ones of `DEPTHS`.

    The text, and each needle's depth.
    """
    essay_sentences = sentences(" ".join(words))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    cuts = [
        0,
        *(int(len(essay_sentences) * (depth / 100)) for depth in depths),
        len(essay_sentences),
    ]
    pieces = []
    for index, needle in enumerate(needles):
        pieces += [" ".join(essay_sentences[cuts[index] : cuts[index + 1]]), needle]
    pieces.append(" ".join(essay_sentences[cuts[-2] :]))
    # An empty piece leaves its space, as in RULER: a needle at depth 0 starts with one.
    return " ".join(pieces), [float(depth) for depth in depths]


def _in_lines(
    lines: list[str], needles: Sequence[str], rng: random.Random
) -> tuple[str, list[float]]:
    """Needles before distinct random lines, the first needle lowest.

    The text, and each needle's depth in percent.
    """
    indices = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    depths = [round(100 * index / len(lines), 2) for index in indices]
    lines = list(lines)
    for index, needle in zip(indices, needles, strict=True):
        lines.insert(index, needle)
    return "\n".join(lines), depths
