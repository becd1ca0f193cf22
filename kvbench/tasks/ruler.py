"""RULER: needles hidden in a long text, after NVIDIA/RULER's own generator (`scripts/data/synthetic/niah.py`).

A sample is a function of the seed and of its own cell. Prompts are raw text that ends in RULER's answer prefix; for
chat models RULER puts that prefix after the assistant's header, which a prompt given as one user message cannot.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import yaml

from kvbench.tasks import Sample, prose

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["words", "numbers", "uuids"]
Essay = Callable[[str, int], list[str]]

_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("data").joinpath("ruler.yaml").read_text())
_NIAH: dict[str, Any] = _DATA["niah"]
ADJECTIVES: list[str] = _DATA["words"]["adjectives"].split()
NOUNS: list[str] = _DATA["words"]["nouns"].split()

SUBSETS: tuple[str, ...] = tuple(_NIAH["subsets"])
NEW_TOKENS: int = _NIAH["new_tokens"]
WORDS: str = _DATA["words"]["name"]
GENERATED = "generated"

# 40 even points from 0 to 100 %, rounded, as numpy's linspace and round give them.
DEPTHS = tuple(round(100 * point / 39) for point in range(40))
SMALL_LENGTH = 4096

_SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["'”’)])\s+""")
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Written:
    """A prompt in one of its possible lengths.

    Attributes:
        text: the whole prompt, the question at its end.
        depths: of each answer, in percent of the haystack.
    """

    text: str
    question: str
    answers: tuple[str, ...]
    depths: tuple[float, ...]


class Writer(Protocol):
    """One of RULER's tasks, as the length fit sees it: prompts that grow with a number of words, lines or documents.

    Attributes:
        new_tokens: tokens to generate.
        least: the smallest haystack that a sample may be shrunk to.
        smallest: the smallest haystack that a length must have room for.
    """

    @property
    def new_tokens(self) -> int: ...

    @property
    def least(self) -> int: ...

    @property
    def smallest(self) -> int: ...

    def unit(self, length: int) -> int:
        """What a sample of `length` tokens gives up at a time until it fits."""

    def write(self, cell: str, seed: int, size: int) -> Written:
        """The prompt of `cell` with a haystack of `size`."""


@dataclass(frozen=True)
class Needles:
    """How one task of the niah family hides and asks; field names follow RULER's `type_*` and `num_needle_*`.

    Attributes:
        haystack: noise, essay, or needle: lines that look like the needle.
        key, value: what they are drawn from.
        keys, values, queries: keys hidden, values of each key, keys asked for.
        essay: gives the first n words of a cell's essay.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Kind
    value: Kind
    keys: int
    values: int
    queries: int
    essay: Essay
    new_tokens: int = NEW_TOKENS

    @property
    def least(self) -> int:
        """As many words or lines as there are needles: each line has at most one before it."""
        return self.keys * self.values

    @property
    def smallest(self) -> int:
        """One small unit: some slack, so that a length which the first sample fits is not too short for the next."""
        return max(self.least, self.unit(0))

    def unit(self, length: int) -> int:
        """Words or lines that a sample of `length` tokens gives up at a time."""
        small, large = _NIAH["units"][self.haystack]
        return int(small if length < SMALL_LENGTH else large)

    def write(self, cell: str, seed: int, size: int) -> Written:
        """The prompt of `cell` around `size` words (essay) or lines; its needles do not change with the size."""
        rng = random.Random(f"ruler/{cell}")
        keys = draw(self.key, self.keys, rng)
        drawn = draw(self.value, self.keys * self.values, rng)
        values = [drawn[first : first + self.values] for first in range(0, len(drawn), self.values)]
        asked = rng.sample(range(self.keys), self.queries)

        needles = [(self.needle(key, value), value) for key, own in zip(keys, values, strict=True) for value in own]
        random.Random(seed).shuffle(needles)  # RULER: the same permutation in every sample
        if self.haystack == "essay":
            context, depths = _in_sentences(self.essay(cell, size), [text for text, _ in needles], rng)
        else:
            context, depths = _in_lines(self._lines(cell, size, keys, drawn), [text for text, _ in needles], rng)
        depth_of = {value: depth for (_, value), depth in zip(needles, depths, strict=True)}

        answers = tuple(value for key in asked for value in values[key])
        frame, question = self.asking([keys[key] for key in asked])
        text = frame.format(context=context) + question
        return Written(text, question, answers, tuple(depth_of[answer] for answer in answers))

    def needle(self, key: str, value: str) -> str:
        """The sentence that hides a value."""
        return str(_NIAH["needle"]).format(type=self.value, key=key, value=value)

    def _lines(self, cell: str, size: int, keys: Sequence[str], values: Sequence[str]) -> list[str]:
        """`size` lines of haystack; those that look like needles have keys and values of their own."""
        if self.haystack == "noise":
            return [_NIAH["noise"]] * size
        rng = random.Random(f"ruler/{cell}/haystack")
        others = zip(draw(self.key, size, rng, keys), draw(self.value, size, rng, values), strict=True)
        return [self.needle(key, value) for key, value in others]

    def asking(self, queries: Sequence[str]) -> tuple[str, str]:
        """The text around `{context}`, and the question with the answer prefix, in the right number."""
        frame, question, kind = _NIAH["template"], _NIAH["question"] + _NIAH["answer_prefix"], str(self.value)
        if self.queries * self.values == 1:
            kind = kind.removesuffix("s")
            for many, one in _NIAH["singular"]:
                frame, question = frame.replace(many, one), question.replace(many, one)
        query = queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        return frame.format(type=kind, context="{context}"), question.format(type=kind, query=query)


class Niah:
    """`samples` prompts for each subset and length.

    Attributes:
        subsets: names such as niah_single_2, of `SUBSETS`.
        lengths: tokens of a prompt and its answer together, as RULER counts them, and with the special tokens that the
            tokenizer adds (RULER leaves them out): what fits `length` fits a model's window of that length.
        count: samples per subset and length.
        haystack: of essays: "generated" (`prose`, another text for each sample), or a text file, read from its start
            and repeated where it is short.
    """

    name = "niah"
    metric = "string_match_all"

    def __init__(
        self, subsets: Sequence[str], lengths: Sequence[int], samples: int = 20, haystack: str = GENERATED
    ) -> None:
        unknown = [name for name in subsets if name not in SUBSETS]
        if unknown or not subsets or len(set(subsets)) < len(subsets):
            raise ValueError(f"task.subsets={list(subsets)}: different ones of {', '.join(SUBSETS)}")
        if not lengths or any(length < 1 for length in lengths) or len(set(lengths)) < len(lengths):
            raise ValueError(f"task.lengths={list(lengths)}: different positive numbers, at least one")
        if samples < 1:
            raise ValueError(f"task.samples={samples}: at least 1")
        self.subsets, self.lengths, self.count = tuple(subsets), tuple(lengths), samples
        self.haystack, essay = _essay(haystack)
        self.writers = {name: Needles(**_NIAH["subsets"][name], essay=essay) for name in subsets}

    def __len__(self) -> int:
        return len(self.subsets) * len(self.lengths) * self.count

    def samples(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Sample]:
        """One sample of every subset and length, then the next; each prefix is a fair smaller run.

        Raises:
            ValueError: a length is too short for a subset.
        """

        def count(text: str) -> int:
            return len(tokenizer(text, verbose=False)["input_ids"])

        cells = [
            Cell(name, length, seed, self.writers[name], count) for length in self.lengths for name in self.subsets
        ]
        for cell in cells:
            cell.check()
        for index in range(self.count):
            for cell in cells:
                yield self._sample(cell, index)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The share of the answers that the output contains, in either case."""
        text = cleaned(output).lower()
        return {self.metric: sum(answer.lower() in text for answer in sample.answers) / len(sample.answers)}

    def _sample(self, cell: Cell, index: int) -> Sample:
        written, size = cell.fitted(index)
        writer = self.writers[cell.name]
        meta: dict[str, Any] = {"subset": cell.name, "length": cell.length, "depths": list(written.depths)}
        meta |= {"size": size, "haystack": self.haystack if writer.haystack == "essay" else writer.haystack}
        if "words" in (writer.key, writer.value):
            meta["words"] = WORDS
        return Sample(
            id=f"{cell.name}-{cell.length}-{index}",
            prompt=written.text,
            answers=written.answers,
            max_new_tokens=writer.new_tokens,
            question=written.question,
            group=f"{cell.name}/{cell.length}",
            meta=meta,
        )


def cleaned(output: str) -> str:
    """RULER's post-processing of an output: stripped, control characters turned into newlines, stripped again."""
    return _CONTROL.sub("\n", output.strip()).strip()


# -- the length fit ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The samples of one task and length, and how large their haystacks may be.

    Attributes:
        length: tokens of prompt and answer together, at most.
        count: tokens of a text.
    """

    name: str
    length: int
    seed: int
    writer: Writer
    count: Callable[[str], int]

    def check(self) -> None:
        """Refuse a length that leaves no room for a small haystack, before any sample is made.

        Raises:
            ValueError: names the smallest length that does.
        """
        # One prompt stands for all lengths and seeds, so that none is refused by the luck of its keys.
        text = self.writer.write(self.name, 0, self.writer.smallest).text
        minimum = self.count(text) + self.writer.new_tokens
        if self.length < minimum:
            raise self._too_short(minimum)

    def fitted(self, index: int) -> tuple[Written, int]:
        """Sample `index` and the size of its haystack: what fits the first sample, and a unit less until it fits.

        Raises:
            ValueError: not even the least haystack fits.
        """
        size, least = self._size, self.writer.least
        while True:
            written, tokens = self._written(index, size)
            if tokens <= self.length:
                return written, size
            if size <= least:
                raise self._too_short(tokens)
            # RULER subtracts a unit however small the rest, and below one unit tries for ever. Where a word takes many
            # tokens, 500 words may be nearly all of the prompt.
            size = max(least, size - min(self.writer.unit(self.length), max(1, size // 4)))

    @functools.cached_property
    def _size(self) -> int:
        """The largest haystack that fits the first sample."""
        smallest = self.writer.smallest
        few, more = (self._written(0, size)[1] for size in (smallest, 4 * smallest))
        guess = smallest + (self.length - few) * 3 * smallest // max(1, more - few)
        return _largest(lambda size: self._written(0, size)[1] <= self.length, smallest, guess)

    def _written(self, index: int, size: int) -> tuple[Written, int]:
        """Sample `index` with a haystack of `size`, and the tokens of prompt and answer."""
        written = self.writer.write(f"{self.seed}/{self.name}/{self.length}/{index}", self.seed, size)
        return written, self.count(written.text) + self.writer.new_tokens

    def _too_short(self, minimum: int) -> ValueError:
        return ValueError(f"task.lengths: {self.length} tokens are too few, {self.name} needs at least {minimum}")


def _largest(fits: Callable[[int], bool], least: int, guess: int) -> int:
    """The largest size that fits, where `least` does: from a good guess in growing steps, then by halves."""
    low, step = max(least, guess), max(1, guess // 128)
    while low > least and not fits(low):
        low, step = max(least, low - step), 2 * step
    high = low + step
    while fits(high):
        step *= 2
        low, high = high, high + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- keys, values, haystacks -------------------------------------------------------------------------------------------


def draw(kind: Kind, count: int, rng: random.Random, taken: Iterable[str] = ()) -> list[str]:
    """`count` different ones of a kind, none of them `taken`.

    Raises:
        ValueError: so many that drawing different ones would take for ever.
    """
    one, variety = _DRAWS[kind]
    found = dict.fromkeys(taken)
    wanted = len(found) + count
    if 2 * wanted > variety:
        raise ValueError(f"task.lengths: {wanted} different {kind} are needed, of {variety}; choose shorter lengths")
    while len(found) < wanted:
        found[one(rng)] = None
    return list(found)[wanted - count :]


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


def _in_sentences(words: Sequence[str], needles: Sequence[str], rng: random.Random) -> tuple[str, list[float]]:
    """Needles between the sentences of an essay, at distinct ones of `DEPTHS`; the text, and each needle's depth."""
    sentences = _SENTENCE_END.split(" ".join(words))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    cuts = [0, *(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    pieces = []
    for place, needle in enumerate(needles):
        pieces += [" ".join(sentences[cuts[place] : cuts[place + 1]]), needle]
    pieces.append(" ".join(sentences[cuts[-2] :]))
    # An empty piece leaves its space, as in RULER: a needle at depth 0 starts with one.
    return " ".join(pieces), [float(depth) for depth in depths]


def _in_lines(lines: list[str], needles: Sequence[str], rng: random.Random) -> tuple[str, list[float]]:
    """Needles before distinct random lines, the first needle lowest; the text, and each needle's depth in percent."""
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    depths = [round(100 * place / len(lines), 2) for place in places]
    lines = list(lines)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines), depths


def _essay(haystack: str) -> tuple[str, Essay]:
    """The name of a haystack in results, and its essays."""
    if haystack == GENERATED:
        return GENERATED, prose.words
    path = Path(haystack).expanduser()
    try:
        content = path.read_bytes()
        words = content.decode().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.haystack={haystack}: {error}; expected a text file, or generated") from error
    if not words:
        raise ValueError(f"task.haystack={haystack}: an empty file; expected text, or generated")
    # The hash: two files of one name are two haystacks.
    return f"{path.name}@{hashlib.sha256(content).hexdigest()[:8]}", functools.partial(_first_words, words)


def _first_words(words: list[str], cell: str, count: int) -> list[str]:
    """The first `count` words of a corpus, the same for every cell, and over again where it is short."""
    return (words * (count // len(words) + 1))[:count]
