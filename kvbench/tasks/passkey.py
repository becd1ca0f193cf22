"""Passkey retrieval: one number hidden at a known depth of repeated filler text.

Strings, cutting and scoring follow mit-han-lab/Quest, `evaluation/passkey/passkey.py`, or ArkVale,
whose test IceCache runs; positions follow ArkVale and IceCache, 0, 5, ..., 95 % of the filler. No
chat template, no data to download: a sample is a function of the seed and of its own cell, never of
the samples before it.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import yaml

from kvbench.tasks import Sample, Task

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

Unit = Literal["tokens", "characters", "words"]
Variant = Literal["quest", "arkvale"]
Frame = Callable[[str, int, str], str]  # the prompt of prefix, key and suffix

_STRINGS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("passkey.yaml").read_text()
)
DESCRIPTION = _STRINGS["description"]
FILLER = _STRINGS["filler"]
INFORMATION = _STRINGS["information"]
QUESTION = _STRINGS["question"]

LARGEST_KEY = 50_000
NEW_TOKENS = 10


class Passkey(Task):
    """`len(lengths) * positions * keys` prompts, each with one key.

    Attributes
    ----------
    lengths
        of the whole prompt, all five parts; exact in characters and words, in tokens the longest
        filler that stays within, counting the special tokens that the tokenizer adds.
    unit
        what `lengths` counts. Filler is cut mid-word, as published, unless the unit is words.
    keys
        keys hidden per length and position.
    positions
        depths, position i lies at i / positions of the filler.
    variant
        "quest": the question on a line of its own, ten new tokens, of which the first number shall
        be the key; "arkvale": the question where the filler ends, as many new tokens as the key has
        and one before them, and the last ids shall be the key's.
    """

    name = "passkey"
    metric = "accuracy"

    def __init__(
        self,
        lengths: Sequence[int],
        unit: Unit = "tokens",
        keys: int = 1,
        positions: int = 20,
        variant: Variant = "quest",
    ) -> None:
        if unit not in get_args(Unit):
            raise ValueError(f"task.unit={unit!r}: one of {', '.join(get_args(Unit))}")
        if not lengths or any(length < 1 for length in lengths) or len(set(lengths)) < len(lengths):
            raise ValueError(
                f"task.lengths={list(lengths)}: different positive numbers, at least one"
            )
        if keys < 1 or positions < 1:
            raise ValueError(f"task.keys={keys}, task.positions={positions}: both at least 1")
        if variant not in get_args(Variant):
            raise ValueError(f"task.variant={variant!r}: one of {', '.join(get_args(Variant))}")
        self.lengths = tuple(lengths)
        self.unit = unit
        self.keys = keys
        self.positions = positions
        self.variant = variant
        self.frame = prompt if variant == "quest" else prompt_of_arkvale

    def __len__(self) -> int:
        return len(self.lengths) * self.positions * self.keys

    def samples(self, tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
        """All cells once per key.

        A prefix covers all lengths and spreads over the depths before it fills them in.

        Raises
        ------
        ValueError
            a length is too short for the text around the filler.
        """
        fitted = {length: self._fitting(length, tokenizer) for length in self.lengths}
        for index in range(self.keys):
            for position in _spread(self.positions):
                for length in self.lengths:
                    sample = self._sample(length, position, index, seed, fitted[length])
                    yield sample if self.variant == "quest" else _as_arkvale(sample, tokenizer)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """1 if the first number in the output is the key, as Quest counts it.

        ArkVale's wants its ids at the end.
        """
        if self.variant == "arkvale":
            key, ids = sample.meta["key_ids"], sample.meta["output_ids"]
            return {"accuracy": float(ids[-len(key) :] == key)}
        number = re.search(r"\d+", output)
        return {
            "accuracy": float(number is not None and int(number.group()) == int(sample.answers[0]))
        }

    def _fitting(self, length: int, tokenizer: Tokenizer) -> Callable[[Fraction, int], str]:
        """How to write a prompt of `length` around a key at a depth.

        What can be worked out once per length is.
        """
        if self.unit == "words":
            return functools.partial(_prompt_of_words, self.frame, length)
        if self.unit == "characters":
            return functools.partial(_prompt_of_characters, self.frame, length)

        def count(text: str) -> int:
            return len(tokenizer(text, verbose=False)["input_ids"])

        size = _filler_within(self.frame, length, count)
        return functools.partial(_prompt_of_tokens, self.frame, length, count, size)

    def _sample(
        self,
        length: int,
        position: int,
        index: int,
        seed: int,
        write: Callable[[Fraction, int], str],
    ) -> Sample:
        depth = Fraction(position, self.positions)
        # The depth, not its number in the list: a finer grid keeps the keys of the cells it shares
        # with a coarser one.
        key = _key(f"{seed}/{length}/{depth}/{index}")
        percent = round(100 * float(depth), 4)
        return Sample(
            id=f"passkey-{length}-{percent:g}-{index}",
            prompt=write(depth, key),
            answers=(str(key),),
            max_new_tokens=NEW_TOKENS,
            question=QUESTION,
            group=str(length),
            meta={"length": length, "depth": percent, "key": key},
        )


def prompt(prefix: str, key: int, suffix: str) -> str:
    """The five parts, joined by newlines."""
    return "\n".join((DESCRIPTION, prefix, INFORMATION.format(key=key), suffix, QUESTION))


def prompt_of_arkvale(prefix: str, key: int, suffix: str) -> str:
    """The five parts, without a newline before the question."""
    return prompt(prefix, key, suffix).removesuffix(f"\n{QUESTION}") + QUESTION


def _as_arkvale(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """A sample with ArkVale's output, scored by ids: a token, such as a space, and the key's."""
    ids = list(tokenizer(sample.answers[0], add_special_tokens=False)["input_ids"])
    return replace(
        sample, max_new_tokens=len(ids) + 1, meta={**sample.meta, "key_ids": ids}, keep_ids=True
    )


def _prompt_of_characters(frame: Frame, length: int, depth: Fraction, key: int) -> str:
    # The same minimum for every key, so that a length is accepted or refused whatever the seed.
    minimum = len(frame("", LARGEST_KEY, ""))
    if length < minimum:
        raise _too_short(length, minimum, "characters")
    return _prompt_of_size(frame, length - len(frame("", key, "")), depth, key)


def _prompt_of_words(frame: Frame, length: int, depth: Fraction, key: int) -> str:
    """Whole words of filler.

    A newline separates words as a space does, and without one two are one.
    """
    minimum = len(frame("", key, "").split())
    if length < minimum:
        raise _too_short(length, minimum, "words")
    size = length - (len(frame("before", key, "after").split()) - 2)
    before = int(size * depth)
    words = FILLER.split()
    text = (words * (size // len(words) + 1))[:size]
    return frame(" ".join(text[:before]), key, " ".join(text[: size - before]))


def _prompt_of_tokens(
    frame: Frame, length: int, count: Callable[[str], int], size: int, depth: Fraction, key: int
) -> str:
    """`size` characters of filler fit at depth 0.

    Another cut or key may tip over, and then gives up a few more.
    """
    text = _prompt_of_size(frame, size, depth, key)
    while (over := count(text) - length) > 0:
        if not size:
            raise _too_short(length, length + over, "tokens")
        size = max(0, size - over)
        text = _prompt_of_size(frame, size, depth, key)
    return text


def _filler_within(frame: Frame, length: int, count: Callable[[str], int]) -> int:
    """Most characters of filler for a prompt, key at depth 0, of at most `length` tokens."""

    def tokens(size: int) -> int:
        return count(_prompt_of_size(frame, size, Fraction(0), LARGEST_KEY))

    if length < (minimum := tokens(0)):
        raise _too_short(length, minimum, "tokens")
    period = len(FILLER) + 1
    few, more = 10 * period, 30 * period
    few_tokens, more_tokens = tokens(few), tokens(more)
    characters_per_token = (more - few) / (more_tokens - few_tokens)
    guess = few + round((length - few_tokens) * characters_per_token)
    return _largest(lambda size: tokens(size) <= length, max(0, guess))


def _largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest n >= 0 with fits(n), where fits(0) holds.

    Gallops away from a good guess, then bisects.
    """
    step = 4
    if fits(guess):
        low, high = guess, guess + step
        while fits(high):
            step *= 2
            low, high = high, high + step
    else:
        low, high = max(0, guess - step), guess
        while low and not fits(low):
            step *= 2
            low, high = max(0, low - step), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _prompt_of_size(frame: Frame, size: int, depth: Fraction, key: int) -> str:
    """The prompt with `size` characters of filler, `depth` of them before the key.

    The rest starts the filler anew.
    """
    before = int(size * depth)
    filler = " ".join([FILLER] * (size // (len(FILLER) + 1) + 1))
    return frame(filler[:before], key, filler[: size - before])


def _spread(count: int) -> list[int]:
    """0 .. count-1 in the order of the van der Corput sequence 0, 1/2, 1/4, 3/4, ...

    Every prefix of it is spread out.
    """
    bits = (count - 1).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits))
    return list(dict.fromkeys(number * count >> bits for number in reversed_bits))


def _key(cell: str) -> int:
    """A key, uniform in 1..50000, that depends on the cell's name alone."""
    seed = int.from_bytes(hashlib.sha256(f"passkey/{cell}".encode()).digest()[:8], "big")
    return random.Random(seed).randint(1, LARGEST_KEY)


def _too_short(length: int, minimum: int, unit: Unit) -> ValueError:
    return ValueError(
        f"task.lengths: {length} {unit} are too few, a passkey prompt needs at least {minimum}"
    )
