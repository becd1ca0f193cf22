"""Texts that RULER's prompts are made of: essays, and documents with questions about them.

Generated texts need no download and are other ones for each sample. Files are SQuAD's and
HotpotQA's own JSON, read as RULER reads them, and any text for essays.
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
from typing import Any, NamedTuple, Protocol

import yaml

from kvbench.tasks.ruler import prose
from kvbench.tasks.sources import LocalFile, parsed_json

GENERATED = "generated"

Essay = Callable[[str, int], list[str]]  # the first n words of a sample's essay

_SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["'”’)])\s+""")
_DATA: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("texts.yaml").read_text()
)


# -- essays ----------------------------------------------------------------------------------------


def essays(file: LocalFile | None) -> tuple[str, Essay]:
    """What results call them, and the essays.

    Generated prose, or a text file from its start, repeated where short.

    Raises
    ------
    ValueError
        the file holds no text.
    """
    if file is None:
        return GENERATED, prose.words
    name, words = _words(file)
    if not words:
        raise ValueError(f"{file.key}={file.file}: an empty file; expected text, or generated")
    return name, functools.partial(_first_words, words)


def vocabulary(file: LocalFile, least: int) -> tuple[str, tuple[str, ...]]:
    """What results call the different words of a text file, and these.

    Raises
    ------
    ValueError
        there are fewer than `least`.
    """
    name, words = _words(file)
    different = tuple(dict.fromkeys(words))
    if len(different) < least:
        raise ValueError(
            f"{file.key}={file.file}: {len(different)} different words; expected {least} at least"
        )
    return name, different


def sentences(text: str) -> list[str]:
    """The sentences of a text, by their full stops."""
    return _SENTENCE_END.split(text)


def _first_words(words: list[str], cell: str, count: int) -> list[str]:
    """The first `count` words of a corpus, the same for every cell; again where it is short."""
    return (words * (count // len(words) + 1))[:count]


def _words(file: LocalFile) -> tuple[str, list[str]]:
    name, content = _read(file)
    try:
        return name, content.decode().split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.key}={file.file}: {error}; expected a text file") from error


def _read(file: LocalFile) -> tuple[str, bytes]:
    """A file's name in results, and its content.

    The hash: two files of one name are two sources.
    """
    content = file.path().read_bytes()
    return f"{file.label}@{hashlib.sha256(content).hexdigest()[:8]}", content


# -- questions about documents ---------------------------------------------------------------------


@dataclass(frozen=True)
class DocumentQuestion:
    """A question about documents.

    Attributes
    ----------
    answers
        any of them is right.
    supporting
        which of the documents hold the answer, from 0 on.
    """

    text: str
    answers: tuple[str, ...]
    supporting: tuple[int, ...]


class Corpus(Protocol):
    """Questions with documents."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def documents_per_question(self) -> int:
        """Documents that a question needs."""

    @property
    def hardest(self) -> int:
        """Index of a question whose needed documents are longest."""

    def ask(
        self, stream: str, first: int, count: int
    ) -> tuple[list[DocumentQuestion], Iterator[str]]:
        """So many questions from the first on, and the documents of all.

        `stream` names the random numbers.

        The documents are without end, those needed first, then the nearest; those of a file come
        again.
        """


@dataclass(frozen=True)
class PublishedQuestion:
    """A question of a data set.

    Attributes
    ----------
    supporting
        indices of the documents that hold the answer.
    near
        of others that belong to it, the same article's or those it was published with.
    """

    text: str
    answers: tuple[str, ...]
    supporting: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """Questions of SQuAD or HotpotQA, in their order, about documents of the whole file."""

    name: str
    documents_per_question: int
    documents: Sequence[str]
    questions: Sequence[PublishedQuestion]

    @property
    def hardest(self) -> int:
        """The question that is longest with its documents."""

        def letters(index: int) -> int:
            question = self.questions[index]
            return len(question.text) + sum(
                len(self.documents[place]) for place in question.supporting
            )

        return max(range(len(self.questions)), key=letters)

    def ask(
        self, stream: str, first: int, count: int
    ) -> tuple[list[DocumentQuestion], Iterator[str]]:
        """The needed documents, the near ones, all others in random order, then all again."""
        questions, rng = self.questions[first : first + count], random.Random(f"ruler/{stream}")
        supporting = list(
            dict.fromkeys(place for question in questions for place in question.supporting)
        )
        near = [
            place
            for question in questions
            for place in rng.sample(question.near, len(question.near))
        ]
        taken = dict.fromkeys([*supporting, *near])
        others = (place for place in _shuffled(len(self.documents), rng) if place not in taken)
        order = chain(taken, others, _again(len(self.documents)))
        documents = (self.documents[place] for place in order)
        return [
            DocumentQuestion(
                question.text, question.answers, tuple(map(supporting.index, question.supporting))
            )
            for question in questions
        ], documents


def squad(file: LocalFile, samples: int, questions: int) -> Published:
    """The first answerable questions of a file with SQuAD's schema, v1.1 or v2.0.

    Raises
    ------
    ValueError
        it has another schema, or too few questions.
    """

    def read(data: Any) -> tuple[list[str], list[PublishedQuestion]]:
        documents = sorted(
            {
                paragraph["context"]
                for article in data["data"]
                for paragraph in article["paragraphs"]
            }
        )
        place = {text: index for index, text in enumerate(documents)}
        answerable = []
        for article in data["data"]:
            near = list(
                dict.fromkeys(place[paragraph["context"]] for paragraph in article["paragraphs"])
            )
            for paragraph in article["paragraphs"]:
                current = place[paragraph["context"]]
                others = tuple(other for other in near if other != current)
                for entry in paragraph["qas"]:
                    texts = (answer["text"] for answer in entry["answers"])
                    answers = tuple(dict.fromkeys(text for text in texts if text.strip()))
                    if answers and not entry.get("is_impossible"):
                        answerable.append(
                            PublishedQuestion(entry["question"], answers, (current,), others)
                        )
        return documents, answerable

    return _published(file, samples, questions, 1, "SQuAD", read)


def hotpotqa(file: LocalFile, samples: int, questions: int) -> Published:
    """The first questions of a file with the schema of HotpotQA in its distractor setting.

    Raises
    ------
    ValueError
        it has another schema, or too few questions.
    """

    def read(data: Any) -> tuple[list[str], list[PublishedQuestion]]:
        documents = sorted(
            {_titled(*paragraph) for entry in data for paragraph in entry["context"]}
        )
        place = {text: index for index, text in enumerate(documents)}
        answerable = []
        for entry in data:
            supporting = {title for title, _ in entry["supporting_facts"]}
            is_supporting = {
                place[_titled(title, text)]: title in supporting for title, text in entry["context"]
            }
            gold, near = (
                [index for index in is_supporting if is_supporting[index] is flag]
                for flag in (True, False)
            )
            if entry["answer"].strip():
                answerable.append(
                    PublishedQuestion(
                        entry["question"], (entry["answer"],), tuple(gold), tuple(near)
                    )
                )
        return documents, answerable

    return _published(file, samples, questions, 2, "HotpotQA", read)


def _titled(title: str, text: Sequence[str]) -> str:
    return f"{title}\n{''.join(text)}"


def _published(
    file: LocalFile,
    samples: int,
    questions: int,
    documents_per_question: int,
    schema: str,
    read: Callable[[Any], tuple[list[str], list[PublishedQuestion]]],
) -> Published:
    name, content = _read(file)
    try:
        documents, usable = read(parsed_json(content))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file.key}={file.file}: not the JSON of {schema} ({problem})") from error
    if len(usable) < samples * questions:
        note = f", task.questions={questions}" if questions > 1 else ""
        raise ValueError(
            f"task.samples={samples}{note}: {file.label} has {len(usable)} questions with an answer"
        )
    return Published(name, documents_per_question, documents, usable[: samples * questions])


def _shuffled(count: int, rng: random.Random) -> Iterator[int]:
    """0 .. count-1 in random order, at the cost of those that are taken.

    HotpotQA has 66,000 paragraphs.
    """
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        place = rng.randrange(last + 1)
        yield moved.get(place, place)
        moved[place] = moved.get(last, last)


def _again(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


# -- generated documents ---------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratedCorpus:
    """Short documents about invented people, without end.

    Each name in them is made up for one sentence alone.

    Attributes
    ----------
    hops
        1: the document that names the person holds the answer. 2: it names another person, whose
        document does.
    """

    hops: int
    name = GENERATED
    hardest = 0

    @property
    def documents_per_question(self) -> int:
        """A document for each hop."""
        return self.hops

    def ask(
        self, stream: str, first: int, count: int
    ) -> tuple[list[DocumentQuestion], Iterator[str]]:
        """Questions of this sample alone."""
        cast = _Cast(random.Random(f"ruler/{stream}"))
        hop, further = (
            (cast.single_hop, cast.paragraphs) if self.hops == 1 else (cast.two_hops, cast.pairs)
        )
        drafts = [hop() for _ in range(count)]
        needed = chain.from_iterable(draft.needed for draft in drafts)
        near = chain.from_iterable(draft.near for draft in drafts)
        places = [range(self.hops * place, self.hops * (place + 1)) for place in range(count)]
        questions = [
            DocumentQuestion(draft.question, draft.answers, tuple(supporting))
            for draft, supporting in zip(drafts, places, strict=True)
        ]
        return questions, chain(needed, near, further())


class QuestionDraft(NamedTuple):
    """A question with its answers, the documents that it needs and those near them."""

    question: str
    answers: tuple[str, ...]
    needed: list[str]
    near: list[str]


class _Profile(NamedTuple):
    """A titled document about a person.

    Attributes
    ----------
    relation
        what the other one whom it names is to the person.
    facts
        questions, their slots, and the slot that answers.
    """

    document: str
    relation: str
    facts: list[tuple[str, Mapping[str, str], str]]


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
            stem = "".join(
                choice(letters["vowels" if place in (1, 4) else "consonants"]) for place in range(5)
            )
            name = stem.capitalize() + choice(letters["ends"][kind])
            if name not in self.taken:
                self.taken.add(name)
                return name

    def slots(self, name: str, **values: str) -> _Slots:
        """The slots of a sentence about a person."""
        return _Slots(self, name=name, surname=name.rpartition(" ")[2], **values)

    def single_hop(self) -> QuestionDraft:
        """A question that one paragraph answers; the person's other paragraphs are near."""
        article = self._article()
        gold = self.rng.randrange(len(article))
        text, questions = article[gold]
        question, answer = self.rng.choice(questions)
        near = [text for place, (text, _) in enumerate(article) if place != gold]
        self.rng.shuffle(near)
        return QuestionDraft(question, _accepted(answer), [text], near)

    def paragraphs(self) -> Iterator[str]:
        """Paragraphs about one person after another, without end."""
        while True:
            yield from (text for text, _ in self._article())

    def _article(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Paragraphs about one person, each with its questions and answers."""
        name = self.invent("person")
        article = []
        for first, *rest in _DATA["topics"].values():
            sentences, questions = [], []
            for text, question, answer in (first, *self.rng.sample(rest, len(rest))):
                slots = self.slots(name)
                sentences.append(text.format_map(slots))
                questions.append((question.format_map(slots), slots[answer]))
            article.append((" ".join(sentences), questions))
        return article

    def two_hops(self) -> QuestionDraft:
        """A question about a person whose document names the one whose document answers it."""
        name, other = self.invent("person"), self.invent("person")
        first = self._profile(name, other)
        second = self._profile(other, self.invent("person"))
        question, slots, answer = self.rng.choice(second.facts)
        text = question.format_map({**slots, "who": first.relation})
        return QuestionDraft(text, _accepted(slots[answer]), [first.document, second.document], [])

    def pairs(self) -> Iterator[str]:
        """The documents of two hops after those of others, without end."""
        while True:
            yield from self.two_hops().needed

    def _profile(self, name: str, other: str) -> _Profile:
        """The document of a person, which names `other`."""
        link, relation = self.rng.choice(_DATA["links"])
        slots = self.slots(name, other=other)
        sentences = [link.format_map(slots)]
        facts: list[tuple[str, Mapping[str, str], str]] = []
        targets = _DATA["targets"]
        for text, question, answer in self.rng.sample(targets, len(targets)):
            fact_slots = self.slots(name)
            sentences.append(text.format_map(fact_slots))
            facts.append((question, fact_slots, answer))
        document = _titled(name, [" ".join(sentences)])
        return _Profile(document, str(relation.format_map(slots)), facts)


class _Slots(dict[str, str]):
    """A sentence's slots; what it does not have it makes up and keeps."""

    def __init__(self, cast: _Cast, **values: str) -> None:
        super().__init__(values)
        self.cast = cast

    def __missing__(self, kind: str) -> str:
        self[kind] = self.cast.invent(kind)
        return self[kind]


def _accepted(answer: str) -> tuple[str, ...]:
    """An answer, and of a person the surname too, which nobody else has."""
    return tuple(dict.fromkeys((answer, answer.rpartition(" ")[2])))
