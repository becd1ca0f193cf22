"""Texts that RULER's prompts are made of: essays, and documents with questions about them; generated, or from files.

Generated texts need no download and are other ones for each sample. Files are SQuAD's and HotpotQA's own JSON, read as
RULER reads them, and any text for essays.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import yaml

from kvbench.tasks.ruler import prose
from kvbench.tasks.sources import LocalFile, parsed_json

GENERATED = "generated"

Essay = Callable[[str, int], list[str]]  # the first n words of a sample's essay

_SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["'”’)])\s+""")
_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("data").joinpath("texts.yaml").read_text())


# -- essays ------------------------------------------------------------------------------------------------------------


def essays(file: LocalFile | None) -> tuple[str, Essay]:
    """What results call them, and the essays: generated prose, or a text file from its start, repeated where short.

    Raises:
        ValueError: the file holds no text.
    """
    if file is None:
        return GENERATED, prose.words
    name, words = _words(file)
    if not words:
        raise ValueError(f"{file.key}={file.file}: an empty file; expected text, or generated")
    return name, functools.partial(_first_words, words)


def vocabulary(file: LocalFile, least: int) -> tuple[str, tuple[str, ...]]:
    """What results call the different words of a text file, and these.

    Raises:
        ValueError: there are fewer than `least`.
    """
    name, words = _words(file)
    different = tuple(dict.fromkeys(words))
    if len(different) < least:
        raise ValueError(f"{file.key}={file.file}: {len(different)} different words; expected {least} at least")
    return name, different


def sentences(text: str) -> list[str]:
    """The sentences of a text, by their full stops."""
    return _SENTENCE_END.split(text)


def _first_words(words: list[str], cell: str, count: int) -> list[str]:
    """The first `count` words of a corpus, the same for every cell, and over again where it is short."""
    return (words * (count // len(words) + 1))[:count]


def _words(file: LocalFile) -> tuple[str, list[str]]:
    name, content = _read(file)
    try:
        return name, content.decode().split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.key}={file.file}: {error}; expected a text file") from error


def _read(file: LocalFile) -> tuple[str, bytes]:
    """A file's name in results, and its content. The hash: two files of one name are two sources."""
    content = file.path().read_bytes()
    return f"{file.label}@{hashlib.sha256(content).hexdigest()[:8]}", content


# -- questions about documents -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question about documents.

    Attributes:
        answers: any of them is right.
        needed: which of the documents hold the answer, from 0 on.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]


class Corpus(Protocol):
    """Questions with documents."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def needed(self) -> int:
        """Documents that a question needs."""

    @property
    def hardest(self) -> int:
        """Index of a question whose needed documents are longest."""

    def ask(self, stream: str, first: int, count: int) -> tuple[list[Question], Iterator[str]]:
        """So many questions from the first on, and the documents of all; `stream` names the random numbers.

        The documents are without end, those needed first, then the nearest; those of a file come again.
        """


@dataclass(frozen=True)
class Asked:
    """A question of a data set.

    Attributes:
        needed: indices of the documents that hold the answer.
        near: of others that belong to it, the same article's or those it was published with.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """Questions of SQuAD or HotpotQA, in their order, about documents of the whole file."""

    name: str
    needed: int
    documents: Sequence[str]
    asked: Sequence[Asked]

    @property
    def hardest(self) -> int:
        """The question that is longest with its documents."""

        def letters(index: int) -> int:
            question = self.asked[index]
            return len(question.text) + sum(len(self.documents[place]) for place in question.needed)

        return max(range(len(self.asked)), key=letters)

    def ask(self, stream: str, first: int, count: int) -> tuple[list[Question], Iterator[str]]:
        """The needed documents, then the near ones and after them all others in random order, then all again."""
        asked, rng = self.asked[first : first + count], random.Random(f"ruler/{stream}")
        needed = list(dict.fromkeys(place for one in asked for place in one.needed))
        near = [place for one in asked for place in rng.sample(one.near, len(one.near))]
        taken = dict.fromkeys([*needed, *near])
        others = (place for place in _shuffled(len(self.documents), rng) if place not in taken)
        order = chain(taken, others, _again(len(self.documents)))
        documents = (self.documents[place] for place in order)
        return [Question(one.text, one.answers, tuple(map(needed.index, one.needed))) for one in asked], documents


def squad(file: LocalFile, samples: int, questions: int) -> Published:
    """The first answerable questions of a file with SQuAD's schema, v1.1 or v2.0.

    Raises:
        ValueError: it has another schema, or too few questions.
    """

    def read(data: Any) -> tuple[list[str], list[Asked]]:
        documents = sorted({paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"]})
        place = {text: index for index, text in enumerate(documents)}
        asked = []
        for article in data["data"]:
            near = list(dict.fromkeys(place[paragraph["context"]] for paragraph in article["paragraphs"]))
            for paragraph in article["paragraphs"]:
                own = place[paragraph["context"]]
                others = tuple(other for other in near if other != own)
                for entry in paragraph["qas"]:
                    texts = (answer["text"] for answer in entry["answers"])
                    answers = tuple(dict.fromkeys(text for text in texts if text.strip()))
                    if answers and not entry.get("is_impossible"):
                        asked.append(Asked(entry["question"], answers, (own,), others))
        return documents, asked

    return _published(file, samples, questions, 1, "SQuAD", read)


def hotpotqa(file: LocalFile, samples: int, questions: int) -> Published:
    """The first questions of a file with the schema of HotpotQA in its distractor setting.

    Raises:
        ValueError: it has another schema, or too few questions.
    """

    def read(data: Any) -> tuple[list[str], list[Asked]]:
        documents = sorted({_titled(*paragraph) for entry in data for paragraph in entry["context"]})
        place = {text: index for index, text in enumerate(documents)}
        asked = []
        for entry in data:
            supporting = {title for title, _ in entry["supporting_facts"]}
            own = {place[_titled(title, text)]: title in supporting for title, text in entry["context"]}
            needed, near = ([index for index in own if own[index] is wanted] for wanted in (True, False))
            if entry["answer"].strip():
                asked.append(Asked(entry["question"], (entry["answer"],), tuple(needed), tuple(near)))
        return documents, asked

    return _published(file, samples, questions, 2, "HotpotQA", read)


def _titled(title: str, text: Sequence[str]) -> str:
    return f"{title}\n{''.join(text)}"


def _published(
    file: LocalFile,
    samples: int,
    questions: int,
    needed: int,
    schema: str,
    read: Callable[[Any], tuple[list[str], list[Asked]]],
) -> Published:
    name, content = _read(file)
    try:
        documents, asked = read(parsed_json(content))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file.key}={file.file}: not the JSON of {schema} ({problem})") from error
    if len(asked) < samples * questions:
        each = f", task.questions={questions}" if questions > 1 else ""
        raise ValueError(f"task.samples={samples}{each}: {file.label} has {len(asked)} questions with an answer")
    return Published(name, needed, documents, asked[: samples * questions])


def _shuffled(count: int, rng: random.Random) -> Iterator[int]:
    """0 .. count-1 in random order, at the cost of those that are taken: HotpotQA has 66,000 paragraphs."""
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        place = rng.randrange(last + 1)
        yield moved.get(place, place)
        moved[place] = moved.get(last, last)


def _again(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


# -- generated documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """Short documents about invented people, without end; each name in them is made up for one sentence alone.

    Attributes:
        hops: 1: the document that names the person holds the answer. 2: it names another person, whose document does.
    """

    hops: int
    name = GENERATED
    hardest = 0

    @property
    def needed(self) -> int:
        """A document for each hop."""
        return self.hops

    def ask(self, stream: str, first: int, count: int) -> tuple[list[Question], Iterator[str]]:
        """Questions of this sample alone."""
        cast = _Cast(random.Random(f"ruler/{stream}"))
        made = [_one_hop(cast) if self.hops == 1 else _two_hops(cast) for _ in range(count)]
        needed, near = ([text for one in made for text in one[place]] for place in (2, 3))
        asked = [
            Question(text, answers, tuple(range(self.hops * place, self.hops * (place + 1))))
            for place, (text, answers, _, _) in enumerate(made)
        ]
        return asked, chain(needed, near, _paragraphs(cast) if self.hops == 1 else _pairs(cast))


class _Cast:
    """Makes up names, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.taken: set[str] = set()

    def invent(self, kind: str) -> str:
        """A name of a kind, or one of a list's words."""
        if kind == "person":
            return f"{self.invent('first')} {self.invent('surname')}"
        choice = self.rng.choice
        if kind in _DATA["lists"]:
            return str(choice(_DATA["lists"][kind]))
        letters = _DATA["names"]
        while True:
            stem = "".join(choice(letters["vowels" if place in (1, 4) else "consonants"]) for place in range(5))
            name = stem.capitalize() + choice(letters["ends"][kind])
            if name not in self.taken:
                self.taken.add(name)
                return name

    def slots(self, name: str, **given: str) -> _Slots:
        """The slots of a sentence about a person."""
        return _Slots(self, name=name, surname=name.rpartition(" ")[2], **given)


class _Slots(dict[str, str]):
    """A sentence's slots; what it does not have it makes up and keeps."""

    def __init__(self, cast: _Cast, **given: str) -> None:
        super().__init__(given)
        self.cast = cast

    def __missing__(self, kind: str) -> str:
        self[kind] = self.cast.invent(kind)
        return self[kind]


Made = tuple[str, tuple[str, ...], list[str], list[str]]  # a question, its answers, documents needed and near


def _one_hop(cast: _Cast) -> Made:
    rng = cast.rng
    article = _article(cast)
    gold = rng.randrange(len(article))
    text, asked = article[gold]
    question, answer = rng.choice(asked)
    near = [text for place, (text, _) in enumerate(article) if place != gold]
    rng.shuffle(near)
    return question, _accepted(answer), [text], near


def _paragraphs(cast: _Cast) -> Iterator[str]:
    while True:
        yield from (text for text, _ in _article(cast))


def _article(cast: _Cast) -> list[tuple[str, list[tuple[str, str]]]]:
    """Paragraphs about one person, each with its questions and answers."""
    name = cast.invent("person")
    article = []
    for first, *rest in _DATA["topics"].values():
        sentences, asked = [], []
        for text, question, answer in (first, *cast.rng.sample(rest, len(rest))):
            slots = cast.slots(name)
            sentences.append(text.format_map(slots))
            asked.append((question.format_map(slots), slots[answer]))
        article.append((" ".join(sentences), asked))
    return article


def _two_hops(cast: _Cast) -> Made:
    first, second, question, answer = _pair(cast)
    return question, _accepted(answer), [first, second], []


def _pairs(cast: _Cast) -> Iterator[str]:
    while True:
        yield from _pair(cast)[:2]


def _pair(cast: _Cast) -> tuple[str, str, str, str]:
    """The documents of a person and of the one it names; a question about the first, which the second answers."""
    name, other = cast.invent("person"), cast.invent("person")
    first, who, _ = _person(cast, name, other)
    second, _, facts = _person(cast, other, cast.invent("person"))
    question, slots, answer = cast.rng.choice(facts)
    return first, second, question.format_map({**slots, "who": who}), slots[answer]


def _person(cast: _Cast, name: str, other: str) -> tuple[str, str, list[tuple[str, Mapping[str, str], str]]]:
    """A titled document; what `other` is to the person; and its facts: question, slots, the slot that answers."""
    link, who = cast.rng.choice(_DATA["links"])
    slots = cast.slots(name, other=other)
    sentences = [link.format_map(slots)]
    facts: list[tuple[str, Mapping[str, str], str]] = []
    targets = _DATA["targets"]
    for text, question, answer in cast.rng.sample(targets, len(targets)):
        own = cast.slots(name)
        sentences.append(text.format_map(own))
        facts.append((question, own, answer))
    return _titled(name, [" ".join(sentences)]), str(who.format_map(slots)), facts


def _accepted(answer: str) -> tuple[str, ...]:
    """An answer, and of a person the surname too, which nobody else has."""
    return tuple(dict.fromkeys((answer, answer.rpartition(" ")[2])))
