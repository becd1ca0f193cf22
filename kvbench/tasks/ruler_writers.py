"""RULER's prompts of any size: needles, variables, common and frequent words, after NVIDIA/RULER's own generators.

A writer knows one task's text and nothing of models or lengths in tokens; `ruler_fit` finds the size that a length has
room for, `ruler_texts` has the texts that are no list of words.
"""

from __future__ import annotations

import functools
import random
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml

from kvbench.tasks.ruler_texts import GENERATED, Corpus, Essay, sentences

Kind = Literal["words", "numbers", "uuids"]
Count = Callable[[str], int]

STRINGS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("data").joinpath("ruler.yaml").read_text())
_NIAH, _VT, _CWE, _FWE, _QA = (STRINGS[family] for family in ("niah", "vt", "cwe", "fwe", "qa"))
ADJECTIVES: list[str] = STRINGS["words"]["adjectives"].split()
NOUNS: list[str] = STRINGS["words"]["nouns"].split()
SINGLE_WORDS = sorted({*ADJECTIVES, *NOUNS})

SUBSETS: tuple[str, ...] = tuple(_NIAH["subsets"])
NEW_TOKENS: int = _NIAH["new_tokens"]
WORDS: str = STRINGS["words"]["name"]

# 40 even points from 0 to 100 %, rounded, as numpy's linspace and round give them.
DEPTHS = tuple(round(100 * point / 39) for point in range(40))
SMALL_LENGTH = 4096


@dataclass(frozen=True)
class Written:
    """A prompt in one of its possible sizes.

    Attributes:
        prompt: the question at its end.
        question: that end.
        answer_prefix: what RULER lets the model continue.
        meta: facts about it for a report; JSON values.
    """

    prompt: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All that a model without a chat template reads."""
        return self.prompt + self.answer_prefix


Draft = Callable[[int], Written]  # a sample that waits for its size


@dataclass(frozen=True)
class Cell:
    """Where a sample stands.

    Attributes:
        name: the subset.
        length: tokens of prompt and answer together, at most.
        count: tokens of a text.
    """

    name: str
    length: int
    seed: int
    count: Count

    @property
    def small(self) -> bool:
        """Whether RULER makes its smaller samples."""
        return self.length < SMALL_LENGTH

    def stream(self, index: int) -> str:
        """Names the random numbers of a sample, which no other shares."""
        return f"{self.seed}/{self.name}/{self.length}/{index}"


class Writer(ABC):
    """One of RULER's tasks, as the length fit sees it: prompts that grow with a number of words, lines or documents.

    Attributes:
        new_tokens: tokens to generate.
    """

    new_tokens: int

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest size that a sample may be shrunk to."""

    @property
    @abstractmethod
    def smallest(self) -> int:
        """The smallest size that a length must have room for: some more, so that no sample fails by its luck."""

    @abstractmethod
    def unit(self, length: int) -> int:
        """What a sample of `length` tokens gives up at a time until it fits."""

    @abstractmethod
    def draft(self, cell: Cell, index: int) -> Draft:
        """Sample `index` of a cell, to be written in any size from `least` on."""

    def official(self, size: int, length: int) -> int:
        """The size that RULER takes where `size` is the largest that fits."""
        return size

    @property
    def hardest(self) -> int:
        """The sample whose shortest prompt is longest; any where they hardly differ."""
        return 0

    def shortest(self, cell: Cell) -> Written:
        """A prompt that a length must have room for; one for all seeds and samples."""
        stand_in = replace(cell, seed=0, length=1 if cell.small else SMALL_LENGTH)
        return self.draft(stand_in, self.hardest)(self.smallest)


@dataclass(frozen=True)
class Needles(Writer):
    """How one task of the niah family hides and asks; field names follow RULER's `type_*` and `num_needle_*`.

    Attributes:
        haystack: noise, essay, or needle: lines that look like the needle.
        key, value: what they are drawn from.
        keys, values, queries: keys hidden, values of each key, keys asked for.
        essay: gives the first n words of a sample's essay.
        source: what results call the essays.
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

    @property
    def least(self) -> int:
        """As many words or lines as there are needles: each line has at most one before it."""
        return self.keys * self.values

    @property
    def smallest(self) -> int:
        """One small unit, or a word or line for each needle."""
        return max(self.least, self.unit(0))

    def unit(self, length: int) -> int:
        """Words or lines."""
        return _unit(_NIAH["units"][self.haystack], length)

    def draft(self, cell: Cell, index: int) -> Draft:
        """See `write`."""
        writer = replace(self, essay=_kept(self.essay))
        return functools.partial(writer.write, cell.stream(index), cell.seed)

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
        frame, question, prefix = self._asking([keys[key] for key in asked])
        meta: dict[str, Any] = {"depths": [depth_of[answer] for answer in answers]}
        meta["haystack"] = self.source if self.haystack == "essay" else self.haystack
        if "words" in (self.key, self.value):
            meta["words"] = WORDS
        return Written(frame.format(context=context) + question, question, prefix, answers, meta)

    def needle(self, key: str, value: str) -> str:
        """The sentence that hides a value."""
        return str(_NIAH["needle"]).format(type=self.value, key=key, value=value)

    def asking(self, queries: Sequence[str]) -> tuple[str, str]:
        """The text around `{context}`, and the question with the answer prefix, in the right number."""
        frame, question, prefix = self._asking(queries)
        return frame, question + prefix

    def _lines(self, cell: str, size: int, keys: Sequence[str], values: Sequence[str]) -> list[str]:
        """`size` lines of haystack; those that look like needles have keys and values of their own."""
        if self.haystack == "noise":
            return [_NIAH["noise"]] * size
        rng = random.Random(f"ruler/{cell}/haystack")
        others = zip(draw(self.key, size, rng, keys), draw(self.value, size, rng, values), strict=True)
        return [self.needle(key, value) for key, value in others]

    def _asking(self, queries: Sequence[str]) -> tuple[str, str, str]:
        """The text around `{context}`, the question and the answer prefix.

        The number is set in RULER's own strings, before any other text is near: neither a haystack nor a chat template
        has its "are" replaced.
        """
        texts, kind = [_NIAH[key] for key in ("template", "question", "answer_prefix")], str(self.value)
        if self.queries * self.values == 1:
            kind = kind.removesuffix("s")
            for many, one in _NIAH["singular"]:
                texts = [text.replace(many, one) for text in texts]
        query = queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        frame, question, prefix = (text.format(type=kind, query=query, context="{context}") for text in texts)
        return frame, question, prefix


@dataclass(frozen=True)
class Variables(Writer):
    """vt: which variables hold a value, by a chain of assignments scattered over lines of noise."""

    new_tokens: int = _VT["new_tokens"]

    @property
    def least(self) -> int:
        """A line of noise for each variable, as an assignment stands before a line."""
        return int(_VT["hops"]) + 1

    @property
    def smallest(self) -> int:
        return self.least + 1

    def unit(self, length: int) -> int:
        """Lines of noise."""
        return _unit(_VT["units"], length)

    def draft(self, cell: Cell, index: int) -> Draft:
        """See `Writer.draft`; the solved example before the task differs in names and value only."""
        rng = random.Random(f"ruler/{cell.stream(index)}/example")
        places = random.Random(f"ruler/{cell.seed}/{cell.name}/{cell.length}/example")
        solved = self._task(_VT["example"]["letters"], _example_lines(cell.count), rng, places)
        example = f"{solved.text} {' '.join(solved.answers)}\n\n"

        def write(size: int) -> Written:
            rng = random.Random(f"ruler/{cell.stream(index)}")
            task = self._task(_VT["letters"], size, rng, rng)
            return replace(task, prompt=example + task.prompt)

        return write

    @staticmethod
    def _task(letters: int, lines: int, rng: random.Random, places: random.Random) -> Written:
        names = _coded(string.ascii_uppercase, letters, _VT["hops"] + 1, rng, taken=("VAR",))
        value = str(rng.randint(10_000, 99_998))
        chain = [_VT["first"].format(name=names[0], value=value)]
        chain += [_VT["next"].format(name=name, before=before) for before, name in zip(names, names[1:], strict=False)]
        above = sorted(places.sample(range(lines), len(chain)))
        context = [_NIAH["noise"]] * lines
        for already, (place, line) in enumerate(zip(above, chain, strict=True)):
            context.insert(place + already, line)
        question = _VT["question"].format(query=value)
        return Written(
            prompt=_VT["template"].format(context="\n".join(context)) + question,
            question=question,
            answer_prefix=_VT["answer_prefix"].format(count=len(names), query=value),
            answers=tuple(names),
            meta={"depths": [round(100 * place / lines, 2) for place in above]},
        )


@functools.lru_cache(maxsize=1)
def _example_lines(count: Count) -> int:
    """Lines of noise in vt's example: as many as fit its tokens, as RULER has it, at least one small unit."""
    lines, letters, tokens = _VT["units"][0], _VT["example"]["letters"], _VT["example"]["tokens"]

    def fits(lines: int) -> bool:
        return count(Variables._task(letters, lines, random.Random(0), random.Random(0)).text) <= tokens

    while lines < tokens and fits(lines + 1):
        lines += 1
    return int(lines)


@dataclass(frozen=True)
class CommonWords(Writer):
    """cwe: the ten words that stand in a numbered list more often than the others, after a solved example."""

    new_tokens: int = _CWE["new_tokens"]

    @property
    def least(self) -> int:
        """The common words and one other."""
        return int(_CWE["common"]) + 1

    @property
    def smallest(self) -> int:
        return int(_CWE["example"]["words"][0])

    def unit(self, length: int) -> int:
        """Different words."""
        return _unit(_CWE["units"], length)

    def draft(self, cell: Cell, index: int) -> Draft:
        """See `Writer.draft`."""
        regime, example = int(not cell.small), _CWE["example"]
        solved = _Vocabulary(random.Random(f"ruler/{cell.stream(index)}/example"))
        shown = self._task(solved, example["words"][regime], example["repeats"][regime], cell.seed)
        before = f"{shown.text} {_numbered(shown.answers)}\n"
        vocabulary = _Vocabulary(random.Random(f"ruler/{cell.stream(index)}"))

        def write(size: int) -> Written:
            task = self._task(vocabulary, size, _CWE["repeats"][regime], cell.seed)
            return replace(task, prompt=before + task.prompt)

        return write

    @staticmethod
    def _task(vocabulary: _Vocabulary, size: int, repeats: Sequence[int], seed: int) -> Written:
        common, others = vocabulary.words(size)
        listed = common * repeats[0] + others * repeats[1]
        random.Random(seed).shuffle(listed)  # RULER: the same permutation in every sample of a size
        name = WORDS if size <= len(SINGLE_WORDS) else f"{WORDS} and made-up words"
        prompt = _CWE["template"].format(context=_numbered(listed)) + _CWE["question"]
        return Written(prompt, _CWE["question"], _CWE["answer_prefix"], tuple(common), {"words": name})


@dataclass(frozen=True)
class FrequentWords(Writer):
    """fwe: the three most frequent of many coded words; one more frequent than they are is shown as dots."""

    new_tokens: int = _FWE["new_tokens"]

    @property
    def least(self) -> int:
        """From here on the last word asked for is more frequent than the next, so that the answer is certain."""
        return _CERTAIN

    @property
    def smallest(self) -> int:
        return self.least + self.least // 2

    def unit(self, length: int) -> int:
        """Words."""
        return max(1, length // 32)

    def official(self, size: int, length: int) -> int:
        """RULER starts at a sixth of the length and goes on by units."""
        start, unit = length // _FWE["letters"], self.unit(length)
        return max(self.least, start + (size - start) // unit * unit)

    def draft(self, cell: Cell, index: int) -> Draft:
        """See `Writer.draft`."""
        ranks = max(cell.length // 50, _FWE["asked"] + 2)
        rng = random.Random(f"ruler/{cell.stream(index)}")
        words = [_FWE["noise"], *_coded(string.ascii_lowercase, _FWE["letters"], ranks - 1, rng)]
        answers = tuple(words[1 : 1 + _FWE["asked"]])

        def write(size: int) -> Written:
            text = [word for rank, word in enumerate(words, 1) for _ in range(_frequency(size, rank))]
            random.Random(cell.seed).shuffle(text)
            prompt = _FWE["template"].format(context=" ".join(text)) + _FWE["question"]
            return Written(prompt, _FWE["question"], _FWE["answer_prefix"], answers)

        return write


def _frequency(size: int, rank: int) -> int:
    """How often the word of a rank appears among about `size`: a zeta distribution, whose sum at 2 is pi^2 / 6."""
    return int(size * rank ** -_FWE["alpha"] / _FWE["zeta"])


def _certain(size: int) -> bool:
    last = 1 + _FWE["asked"]
    return _frequency(size, last) > _frequency(size, last + 1)


_CERTAIN = 1 + max(size for size in range(1000) if not _certain(size))


@dataclass(frozen=True)
class Documents(Writer):
    """qa_1 and qa_2: a question that one or two of many documents answer."""

    corpus: Corpus
    new_tokens: int = _QA["new_tokens"]

    @property
    def least(self) -> int:
        """What the question needs, whatever else is left out."""
        return self.corpus.needed

    @property
    def smallest(self) -> int:
        return self.least + 1

    def unit(self, length: int) -> int:
        """Documents."""
        return _unit(_QA["units"], length)

    @property
    def hardest(self) -> int:
        """The question whose needed documents are longest."""
        return self.corpus.hardest

    def draft(self, cell: Cell, index: int) -> Draft:
        """See `Writer.draft`."""
        asked = self.corpus.question(cell.stream(index), index)
        texts: list[str] = []

        def write(size: int) -> Written:
            texts.extend(islice(asked.documents, max(0, size - len(texts))))
            places = list(range(size))
            random.Random(cell.seed).shuffle(places)  # RULER: the same permutation in every sample of a size
            documents = (
                _QA["document"].format(number=number, text=texts[place]) for number, place in enumerate(places, 1)
            )
            question = _QA["question"].format(query=asked.text)
            depths = sorted(round(100 * places.index(place) / size, 2) for place in range(asked.needed))
            meta: dict[str, Any] = {"documents": self.corpus.name, "depths": depths}
            if asked.different is not None and size > asked.different:
                meta["different_documents"] = asked.different
            prompt = _QA["template"].format(context="\n\n".join(documents)) + question
            return Written(prompt, question, _QA["answer_prefix"], asked.answers, meta)

        return write


def _unit(units: Sequence[int], length: int) -> int:
    small, large = units
    return int(small if length < SMALL_LENGTH else large)


# -- keys, values, words -----------------------------------------------------------------------------------------------


def draw(kind: Kind, count: int, rng: random.Random, taken: Iterable[str] = ()) -> list[str]:
    """`count` different ones of a kind, none of them `taken`.

    Raises:
        ValueError: so many that drawing different ones would take for ever.
    """
    one, variety = _DRAWS[kind]
    return _different(one, variety, kind, count, rng, taken)


def _different(
    one: Callable[[random.Random], str], variety: int, kind: str, count: int, rng: random.Random, taken: Iterable[str]
) -> list[str]:
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


def _coded(alphabet: str, letters: int, count: int, rng: random.Random, taken: Iterable[str] = ()) -> list[str]:
    """`count` different random strings of letters."""

    def one(rng: random.Random) -> str:
        return "".join(rng.choices(alphabet, k=letters))

    return _different(one, len(alphabet) ** letters, "coded words", count, rng, taken)


_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"
_CLUSTERS = ("b", "d", "g", "k", "l", "m", "n", "r", "s", "st", "nd")
_STARTS = [first + vowel for first in _CONSONANTS for vowel in _VOWELS]
_ENDS = [vowel + cluster for vowel in _VOWELS for cluster in _CLUSTERS]


class _Vocabulary:
    """The words of a list that may grow; its common words hardly ever change with it.

    Made-up words follow where the single ones are too few, and then are common in the same proportion. Never
    "adjective-noun": with many of them a noun alone would be more frequent than any common word.
    """

    def __init__(self, rng: random.Random) -> None:
        self.singles = rng.sample(SINGLE_WORDS, len(SINGLE_WORDS))
        self.lots = [rng.random() for _ in range(_CWE["common"])]
        self.made_up: list[str] = []
        self.rng = rng

    def words(self, size: int) -> tuple[list[str], list[str]]:
        """The common and the other words, `size` together."""
        count, more = len(self.lots), size - len(self.singles)
        if more <= 0:
            return self.singles[:count], self.singles[count:size]
        if more > len(self.made_up):
            variety, known = (
                len(_STARTS) ** 2 * len(_CLUSTERS) * len(_CONSONANTS) * len(_ENDS),
                (*self.singles, *self.made_up),
            )
            self.made_up += _different(_made_up, variety, "made-up words", more - len(self.made_up), self.rng, known)
        common, others = self.singles[:count], self.singles[count:] + self.made_up[:more]
        for place, lot in enumerate(self.lots[:more]):
            if lot * size >= len(self.singles):
                # Where this made-up word lies among the others.
                other = len(self.singles) - count + place
                common[place], others[other] = others[other], common[place]
        return common, others


def _made_up(rng: random.Random) -> str:
    """A word that could be one: dorbalen, misuket."""
    choice = rng.choice
    return choice(_STARTS) + choice(_CLUSTERS) + choice(_STARTS) + choice(_CONSONANTS) + choice(_ENDS)


def _numbered(words: Iterable[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


# -- haystacks ---------------------------------------------------------------------------------------------------------


def _kept(essay: Essay) -> Essay:
    """An essay whose words stay for the next size, as making them takes as long as counting their tokens."""
    words: list[str] = []

    def first(cell: str, count: int) -> list[str]:
        if count > len(words):
            words[:] = essay(cell, count + count // 50)
        return words[:count]

    return first


def _in_sentences(words: Sequence[str], needles: Sequence[str], rng: random.Random) -> tuple[str, list[float]]:
    """Needles between the sentences of an essay, at distinct ones of `DEPTHS`; the text, and each needle's depth."""
    found = sentences(" ".join(words))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    cuts = [0, *(int(len(found) * (depth / 100)) for depth in depths), len(found)]
    pieces = []
    for place, needle in enumerate(needles):
        pieces += [" ".join(found[cuts[place] : cuts[place + 1]]), needle]
    pieces.append(" ".join(found[cuts[-2] :]))
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
