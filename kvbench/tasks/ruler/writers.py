"""RULER's prompts of any size: writers of all tasks but needles, after NVIDIA's generators.

A writer knows one task's text and nothing of models; `fit` finds the size that a length has room
for. Needles are in `needles`, the documents that questions are asked about in `texts`.
"""

from __future__ import annotations

import functools
import json
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from kvbench.tasks.ruler.texts import Corpus, DocumentQuestion

Count = Callable[[str], int]

_DATA = Path(__file__).with_name("data")
STRINGS: dict[str, Any] = yaml.safe_load(_DATA.joinpath("writers.yaml").read_text())
_VT = STRINGS["vt"]
_CWE = STRINGS["cwe"]
_FWE = STRINGS["fwe"]
_QA = STRINGS["qa"]

# The lists that RULER takes from the package wonderwords, as they stand there: keys are
# "adjective-noun", and cwe lists words of all three kinds. RULER names no release of it; the nouns
# of 2.2.0 are four more, the rest is the same.
WONDERWORDS = "wonderwords"
LISTS: dict[str, Any] = json.loads(_DATA.joinpath("wonderwords.json").read_text(encoding="utf-8"))
WORDS: str = LISTS["name"]
ADJECTIVES, NOUNS = (tuple(dict.fromkeys(LISTS[kind])) for kind in ("adjectives", "nouns"))
SINGLE_WORDS: Sequence[str] = tuple(sorted({*ADJECTIVES, *NOUNS, *LISTS["verbs"]}))

SMALL_LENGTH = 4096


@dataclass(frozen=True)
class Written:
    """A prompt in one of its possible sizes.

    Attributes
    ----------
    prompt
        the question at its end.
    question
        that end.
    answer_prefix
        what RULER lets the model continue.
    meta
        facts about it for a report; JSON values.
    others
        the same context with its other questions.
    """

    prompt: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[Written, ...] = ()

    @property
    def text(self) -> str:
        """All that a model without a chat template reads."""
        return self.prompt + self.answer_prefix

    @staticmethod
    def all(questions: Sequence[Written]) -> Written:
        """The first of several questions about one context, with the others."""
        return replace(questions[0], others=tuple(questions[1:]))


@dataclass(frozen=True)
class Draft:
    """A sample that waits for its size.

    Attributes
    ----------
    write
        the sample in a size.
    swap
        takes at a place, from 0 on, a shorter piece of at most so many letters; False if there is
        none.
    """

    write: Callable[[int], Written]
    swap: Callable[[int, int], bool] = lambda index, letters: False


@dataclass(frozen=True)
class RulerCell:
    """Where a sample stands.

    Attributes
    ----------
    name
        the subset.
    length
        tokens of prompt and answer together, at most.
    count
        tokens of a text.
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
    """One of RULER's tasks, as the length fit sees it.

    Its prompts grow with a number of words, lines or documents.

    Attributes
    ----------
    new_tokens
        tokens to generate.
    """

    new_tokens: int

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest size that a sample may be shrunk to."""

    @property
    @abstractmethod
    def smallest(self) -> int:
        """The smallest size that a length must have room for.

        Some more than the least, so that no sample fails by its luck.
        """

    @abstractmethod
    def unit(self, length: int) -> int:
        """What a sample of `length` tokens gives up at a time until it fits."""

    @abstractmethod
    def draft(self, cell: RulerCell, index: int) -> Draft:
        """Sample `index` of a cell, to be written in any size from `least` on."""

    def official(self, size: int, length: int) -> int:
        """The size that RULER takes where `size` is the largest that fits."""
        return size

    @property
    def hardest(self) -> int:
        """The sample whose shortest prompt is longest; any where they hardly differ."""
        return 0

    def shortest(self, cell: RulerCell) -> Written:
        """A prompt that a length must have room for; one for all seeds and samples."""
        stand_in = replace(cell, seed=0, length=1 if cell.small else SMALL_LENGTH)
        return self.draft(stand_in, self.hardest).write(self.smallest)


@dataclass(frozen=True)
class Variables(Writer):
    """vt: which variables hold a value, by a chain of assignments scattered over lines of noise.

    Attributes
    ----------
    questions
        chains, of different values and variables, each asked about.
    """

    questions: int = 1
    new_tokens: int = _VT["new_tokens"]

    @property
    def least(self) -> int:
        """A line of noise for each variable of a chain, as an assignment stands before a line."""
        return int(_VT["hops"]) + 1

    @property
    def smallest(self) -> int:
        """A line of noise beside the chain."""
        return self.least + 1

    def unit(self, length: int) -> int:
        """Lines of noise."""
        return unit_of(_VT["units"], length)

    def draft(self, cell: RulerCell, index: int) -> Draft:
        """See `Writer.draft`.

        The solved example before the task differs in names and value only.
        """
        rng = random.Random(f"ruler/{cell.stream(index)}/example")
        order = random.Random(f"ruler/{cell.seed}/{cell.name}/{cell.length}/example")
        [solved] = self._tasks(1, _VT["example"]["letters"], _example_lines(cell.count), rng, order)
        example = f"{solved.text} {' '.join(solved.answers)}\n\n"

        def write(size: int) -> Written:
            rng = random.Random(f"ruler/{cell.stream(index)}")
            tasks = self._tasks(self.questions, _VT["letters"], size, rng, rng)
            return Written.all([replace(task, prompt=example + task.prompt) for task in tasks])

        return Draft(write)

    @staticmethod
    def _tasks(
        chains: int, letters: int, lines: int, rng: random.Random, order: random.Random
    ) -> list[Written]:
        """The questions about the chains of one context."""
        taken, before = ["VAR"], [""] * lines  # the assignments before each line of noise
        values: dict[str, tuple[list[str], list[int]]] = {}
        while len(values) < chains:
            names = _coded(string.ascii_uppercase, letters, _VT["hops"] + 1, rng, taken)
            if (value := str(rng.randint(10_000, 99_998))) in values:
                continue
            chain = [_VT["first"].format(name=names[0], value=value)]
            chain += [
                _VT["next"].format(name=name, before=last)
                for last, name in zip(names, names[1:], strict=False)
            ]
            above = sorted(order.sample(range(lines), len(chain)))
            for index, line in zip(above, chain, strict=True):
                before[index] += f"{line}\n"
            taken, values[value] = taken + names, (names, above)
        context = _VT["template"].format(
            context="\n".join(above + STRINGS["niah"]["noise"] for above in before)
        )
        return [
            Written(
                prompt=context + (question := _VT["question"].format(query=value)),
                question=question,
                answer_prefix=_VT["answer_prefix"].format(count=len(names), query=value),
                answers=tuple(names),
                meta={"depths": [round(100 * index / lines, 2) for index in above]},
            )
            for value, (names, above) in values.items()
        ]


@functools.lru_cache(maxsize=1)
def _example_lines(count: Count) -> int:
    """Lines of noise in vt's example: as many as fit its tokens, at least one small unit.

    Its own tokens alone: those of a chat template and special ones, which stand around any text,
    are no part of it.
    """
    template_tokens = count("")
    lines = _VT["units"][0]
    letters = _VT["example"]["letters"]
    tokens = _VT["example"]["tokens"]

    def fits(lines: int) -> bool:
        [solved] = Variables._tasks(1, letters, lines, random.Random(0), random.Random(0))
        return count(solved.text) <= tokens + template_tokens

    while lines < tokens and fits(lines + 1):
        lines += 1
    return int(lines)


@dataclass(frozen=True)
class CommonWords(Writer):
    """cwe: the ten words that a numbered list has most often, after a solved example.

    Attributes
    ----------
    source
        what results call the words.
    singles
        the words; where a list is longer, made-up ones follow, where RULER opens a larger
        dictionary.
    """

    source: str = WORDS
    singles: Sequence[str] = SINGLE_WORDS
    new_tokens: int = _CWE["new_tokens"]

    @property
    def least(self) -> int:
        """The common words and one other."""
        return int(_CWE["common"]) + 1

    @property
    def smallest(self) -> int:
        """As many different words as the solved example."""
        return int(_CWE["example"]["words"][0])

    def unit(self, length: int) -> int:
        """Different words."""
        return unit_of(_CWE["units"], length)

    def draft(self, cell: RulerCell, index: int) -> Draft:
        """See `Writer.draft`."""
        regime, example = int(not cell.small), _CWE["example"]
        solved = _Vocabulary(self.singles, random.Random(f"ruler/{cell.stream(index)}/example"))
        shown = self._task(solved, example["words"][regime], example["repeats"][regime], cell.seed)
        before = f"{shown.text} {_numbered(shown.answers)}\n"
        vocabulary = _Vocabulary(self.singles, random.Random(f"ruler/{cell.stream(index)}"))

        def write(size: int) -> Written:
            task = self._task(vocabulary, size, _CWE["repeats"][regime], cell.seed)
            return replace(task, prompt=before + task.prompt)

        return Draft(write)

    def _task(
        self, vocabulary: _Vocabulary, size: int, repeats: Sequence[int], seed: int
    ) -> Written:
        common, others = vocabulary.words(size)
        listed = common * repeats[0] + others * repeats[1]
        random.Random(seed).shuffle(listed)  # RULER: the same permutation in every sample of a size
        name = self.source if size <= len(self.singles) else f"{self.source} and made-up words"
        prompt = _CWE["template"].format(context=_numbered(listed)) + _CWE["question"]
        return Written(
            prompt, _CWE["question"], _CWE["answer_prefix"], tuple(common), {"words": name}
        )


@dataclass(frozen=True)
class FrequentWords(Writer):
    """fwe: the three most frequent of many coded words.

    One more frequent than they are is shown as dots.
    """

    new_tokens: int = _FWE["new_tokens"]

    @property
    def least(self) -> int:
        """From here on the last word of the answer is more frequent than the next one."""
        return _CERTAIN

    @property
    def smallest(self) -> int:
        """Half as many words again as are certain to be enough."""
        return self.least + self.least // 2

    def unit(self, length: int) -> int:
        """Words, a share of the prompt's tokens."""
        return max(1, (length - self.new_tokens) // 32)

    def official(self, size: int, length: int) -> int:
        """RULER starts at a sixth of the prompt's tokens and goes on by units."""
        start, unit = (length - self.new_tokens) // _FWE["letters"], self.unit(length)
        return max(self.least, start + (size - start) // unit * unit)

    def draft(self, cell: RulerCell, index: int) -> Draft:
        """See `Writer.draft`."""
        ranks = max(cell.length // 50, _FWE["asked"] + 2)
        rng = random.Random(f"ruler/{cell.stream(index)}")
        words = [_FWE["noise"], *_coded(string.ascii_lowercase, _FWE["letters"], ranks - 1, rng)]
        answers = tuple(words[1 : 1 + _FWE["asked"]])

        def write(size: int) -> Written:
            text = [
                word for rank, word in enumerate(words, 1) for _ in range(_frequency(size, rank))
            ]
            random.Random(cell.seed).shuffle(text)
            prompt = _FWE["template"].format(context=" ".join(text)) + _FWE["question"]
            return Written(prompt, _FWE["question"], _FWE["answer_prefix"], answers)

        return Draft(write)


def _frequency(size: int, rank: int) -> int:
    """How often the word of a rank appears among about `size`.

    A zeta distribution, whose sum at 2 is pi^2 / 6.
    """
    return int(size * rank ** -_FWE["alpha"] / _FWE["zeta"])


def _certain(size: int) -> bool:
    last = 1 + _FWE["asked"]
    return _frequency(size, last) > _frequency(size, last + 1)


_CERTAIN = 1 + max(size for size in range(1000) if not _certain(size))


_AHEAD = 50  # documents among which a short one is looked for


@dataclass(frozen=True)
class Documents(Writer):
    """qa_1 and qa_2: questions that one or two of many documents answer.

    Attributes
    ----------
    questions
        about the documents of a sample.
    """

    corpus: Corpus
    questions: int = 1
    new_tokens: int = _QA["new_tokens"]

    @property
    def least(self) -> int:
        """What the questions need, whatever else is left out."""
        return self.corpus.documents_per_question * self.questions

    @property
    def smallest(self) -> int:
        """A document beside those needed."""
        return self.least + 1

    def unit(self, length: int) -> int:
        """Documents."""
        return unit_of(_QA["units"], length)

    @property
    def hardest(self) -> int:
        """That with the question whose needed documents are longest."""
        return self.corpus.hardest // self.questions

    def draft(self, cell: RulerCell, index: int) -> Draft:
        """See `Writer.draft`."""
        questions, document_stream = self.corpus.ask(
            cell.stream(index), index * self.questions, self.questions
        )
        texts: list[str] = []

        def read(count: int) -> None:
            texts.extend(islice(document_stream, max(0, count - len(texts))))

        def write(size: int) -> Written:
            read(size)
            order = list(range(size))
            # RULER: the same permutation in every sample of a size
            random.Random(cell.seed).shuffle(order)
            documents = (
                _QA["document"].format(number=number, text=texts[index])
                for number, index in enumerate(order, 1)
            )
            context = _QA["template"].format(context="\n\n".join(documents))
            repeated = (
                {"different_documents": different}
                if (different := len(set(texts[:size]))) < size
                else {}
            )

            def ask(entry: DocumentQuestion) -> Written:
                question = _QA["question"].format(query=entry.text)
                depths = sorted(
                    round(100 * order.index(index) / size, 2) for index in entry.supporting
                )
                meta = {"documents": self.corpus.name, "depths": depths, **repeated}
                return Written(
                    context + question, question, _QA["answer_prefix"], entry.answers, meta
                )

            return Written.all([ask(entry) for entry in questions])

        def swap(index: int, letters: int) -> bool:
            """A long document may be next where a shorter one still fits."""
            read(index + _AHEAD)
            shorter = (
                other for other in range(index + 1, index + _AHEAD) if len(texts[other]) <= letters
            )
            if (place := next(shorter, None)) is None:
                return False
            texts[index], texts[place] = texts[place], texts[index]
            return True

        return Draft(write, swap)


def unit_of(units: Sequence[int], length: int) -> int:
    """RULER's unit below 4096 tokens and from there on."""
    small, large = units
    return int(small if length < SMALL_LENGTH else large)


# -- words -----------------------------------------------------------------------------------------


def different(
    make: Callable[[random.Random], str],
    variety: int,
    kind: str,
    count: int,
    rng: random.Random,
    taken: Iterable[str],
) -> list[str]:
    """`count` different ones of a kind of which there are `variety`, none of them `taken`.

    Raises
    ------
    ValueError
        so many that drawing different ones would take for ever.
    """
    distinct = dict.fromkeys(taken)
    total = len(distinct) + count
    if 2 * total > variety:
        raise ValueError(
            f"task.lengths: {total} different {kind} are needed, of {variety}; choose shorter"
            " lengths"
        )
    while len(distinct) < total:
        distinct[make(rng)] = None
    return list(distinct)[total - count :]


def _coded(
    alphabet: str, letters: int, count: int, rng: random.Random, taken: Iterable[str] = ()
) -> list[str]:
    """`count` different random strings of letters."""

    def make(rng: random.Random) -> str:
        return "".join(rng.choices(alphabet, k=letters))

    return different(make, len(alphabet) ** letters, "coded words", count, rng, taken)


_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"
_CLUSTERS = ("b", "d", "g", "k", "l", "m", "n", "r", "s", "st", "nd")
_STARTS = [first + vowel for first in _CONSONANTS for vowel in _VOWELS]
_ENDS = [vowel + cluster for vowel in _VOWELS for cluster in _CLUSTERS]


class _Vocabulary:
    """The words of a list that may grow; its common words hardly ever change with it.

    Made-up words follow where the single ones are too few, and then are common in the same
    proportion. Never "adjective-noun": with many of them a noun alone would be more frequent than
    any common word.
    """

    def __init__(self, singles: Sequence[str], rng: random.Random) -> None:
        self.singles = rng.sample(singles, len(singles))
        self.lots = [rng.random() for _ in range(_CWE["common"])]
        self.coined: list[str] = []
        self.rng = rng

    def words(self, size: int) -> tuple[list[str], list[str]]:
        """The common and the other words, `size` together."""
        count, more = len(self.lots), size - len(self.singles)
        if more <= 0:
            return self.singles[:count], self.singles[count:size]
        if more > len(self.coined):
            variety, taken = (
                len(_STARTS) ** 2 * len(_CLUSTERS) * len(_CONSONANTS) * len(_ENDS),
                (*self.singles, *self.coined),
            )
            self.coined += different(
                _coined_word, variety, "made-up words", more - len(self.coined), self.rng, taken
            )
        common, others = self.singles[:count], self.singles[count:] + self.coined[:more]
        for index, lot in enumerate(self.lots[:more]):
            if lot * size >= len(self.singles):
                # Where this made-up word lies among the others.
                other = len(self.singles) - count + index
                common[index], others[other] = others[other], common[index]
        return common, others


def _coined_word(rng: random.Random) -> str:
    """A word that could be one: dorbalen, misuket."""
    choice = rng.choice
    return (
        choice(_STARTS) + choice(_CLUSTERS) + choice(_STARTS) + choice(_CONSONANTS) + choice(_ENDS)
    )


def _numbered(words: Iterable[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
