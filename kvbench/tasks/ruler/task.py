"""RULER: needles, variables, words and documents in a long text, after NVIDIA's generators.

Thirteen subsets, generated for any length and tokenizer, or read from files that RULER made. A
generated sample is a function of the seed and of its own cell. Chat models get RULER's answer
prefix after the assistant's header, as RULER has it. `needles` and `writers` have the prompts,
`fit` their sizes, `texts` essays and documents, `files` ready-made sets.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from kvbench.models.prompts import chat_text
from kvbench.tasks import Sample, Task
from kvbench.tasks.ruler import files as ruler_files
from kvbench.tasks.ruler import texts as ruler_texts
from kvbench.tasks.ruler.files import HUB, MEGABYTES
from kvbench.tasks.ruler.fit import Fit, Rule
from kvbench.tasks.ruler.needles import DEPTHS, NEW_TOKENS, SUBSETS, Needles, draw
from kvbench.tasks.ruler.texts import GENERATED
from kvbench.tasks.ruler.writers import (
    ADJECTIVES,
    NOUNS,
    STRINGS,
    WONDERWORDS,
    CommonWords,
    Count,
    Documents,
    FrequentWords,
    RulerCell,
    Variables,
    Writer,
)
from kvbench.tasks.sources import DataFile, LocalFile

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

__all__ = [
    "ADJECTIVES",
    "DEPTHS",
    "NEW_TOKENS",
    "NOUNS",
    "SUBSETS",
    "Needles",
    "Niah",
    "Ruler",
    "cleaned",
    "draw",
]

ALL_SUBSETS = (*SUBSETS, "vt", "cwe", "fwe", "qa_1", "qa_2")
# Options that name a file of RULER's own, and the subsets that read it.
READERS = {
    "haystack": {
        name
        for name, settings in STRINGS["niah"]["subsets"].items()
        if settings["haystack"] == "essay"
    },
    "squad": {"qa_1"},
    "hotpotqa": {"qa_2"},
    "words": {"cwe"},
}
ANY_ANSWER_COUNTS = ("qa_1", "qa_2")  # whose answers say the same; of all others each is wanted

_CONTROL = re.compile(r"[\x00-\x1f]")


class Ruler(Task):
    """`samples` contexts for each subset and length, with `questions` prompts each in a row.

    Attributes
    ----------
    subsets
        names such as niah_single_2, of `valid_subsets`.
    lengths
        tokens of a prompt and its answer together, as RULER counts them, and with the special
        tokens that the tokenizer adds and those of its chat template (RULER leaves out the former):
        what fits `length` fits a model's window of that length.
    count
        contexts per subset and length.
    questions
        about each context: of needles each about other ones, which are all hidden in it; of vt each
        about a chain of its own; of qa_1 and qa_2 about one set of documents.
    fit
        "official": RULER's units, so that all samples of a cell but some are of one size; "tight":
        each sample as large as fits.
    max_new_tokens
        of an answer at most, where that is less than RULER's own; prompts leave room for RULER's.
    haystack, squad, hotpotqa
        essays, and documents of qa_1 and qa_2: "generated" (others for each sample), or a file:
        text, SQuAD's JSON, HotpotQA's JSON in the distractor setting.
    words
        of cwe: "wonderwords" (those of RULER), or a text file of others; made-up ones where a list
        is longer.
    data_dir
        None: generate samples. A folder with `<length>/<subset>.jsonl`, or with what RULER's
        scripts write (`<length>/data/<subset>/validation.jsonl`), or "hub": read them; then `fit`
        and the texts have no effect.
    """

    name = "ruler"
    metric = "score"
    valid_subsets: tuple[str, ...] = ALL_SUBSETS

    def __init__(
        self,
        subsets: Sequence[str],
        lengths: Sequence[int],
        samples: int = 20,
        fit: Rule = "official",
        max_new_tokens: int | None = None,
        haystack: str = GENERATED,
        squad: str = GENERATED,
        hotpotqa: str = GENERATED,
        words: str = WONDERWORDS,
        data_dir: str | None = None,
        questions: int = 1,
    ) -> None:
        unknown = [name for name in subsets if name not in self.valid_subsets]
        if unknown or not subsets or len(set(subsets)) < len(subsets):
            raise ValueError(
                f"task.subsets={list(subsets)}: different ones of {', '.join(self.valid_subsets)}"
            )
        if not lengths or any(length < 1 for length in lengths) or len(set(lengths)) < len(lengths):
            raise ValueError(
                f"task.lengths={list(lengths)}: different positive numbers, at least one"
            )
        if data_dir == HUB and not set(lengths) <= MEGABYTES.keys():
            raise ValueError(
                f"task.lengths={list(lengths)}: the hub has {', '.join(map(str, MEGABYTES))}"
            )
        if samples < 1:
            raise ValueError(f"task.samples={samples}: at least 1")
        _check_questions(questions, subsets, data_dir)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"task.max_new_tokens={max_new_tokens}: at least 1, or null")
        if fit not in get_args(Rule):
            raise ValueError(f"task.fit={fit}: one of {', '.join(get_args(Rule))}")
        self.subsets = tuple(subsets)
        self.lengths = tuple(lengths)
        self.count = samples
        self.fit = fit
        self.max_new_tokens = max_new_tokens
        self.per_context = questions
        self.data_dir = None if data_dir is None else str(data_dir)
        self.stored = data_dir is not None
        choices = {"haystack": haystack, "squad": squad, "hotpotqa": hotpotqa, "words": words}
        self.files = {
            key: LocalFile(Path(str(value)).expanduser(), f"task.{key}")
            for key, value in choices.items()
            if value != (WONDERWORDS if key == "words" else GENERATED)
        }
        self.sources = self._sources()

    def __len__(self) -> int:
        return len(self.subsets) * len(self.lengths) * self.count * self.per_context

    def _sources(self) -> Sequence[DataFile]:
        """The files that samples are made from."""
        if self.data_dir is not None:
            cells = [(name, length) for length in self.lengths for name in self.subsets]
            # The hub has all subsets of a length in one file.
            return list(dict.fromkeys(self._stored_file(*cell) for cell in cells))
        return [
            file for key, file in self.files.items() if not READERS[key].isdisjoint(self.subsets)
        ]

    def _stored_file(self, name: str, length: int) -> ruler_files.File:
        return ruler_files.source(
            str(self.data_dir), name, self.lengths, length, self.count, self.valid_subsets
        )

    @functools.cached_property
    def writers(self) -> dict[str, Writer]:
        """How to write each subset.

        Raises
        ------
        ValueError
            a file is not what it should be.
        """
        return {name: self._writer(name) for name in self.subsets}

    def samples(self, tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
        """The samples of a context of every subset and length, then of the next.

        Each prefix is a fair smaller run.

        Raises
        ------
        ValueError
            a length is too short for a subset, or a file is not what it should be.
        """
        cells = [(name, length) for length in self.lengths for name in self.subsets]
        samples = (
            self._read(cells)
            if self.data_dir is not None
            else self._generated(cells, counter(tokenizer), seed)
        )
        yield from samples

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The share of the answers that the output contains, in either case.

        Of a question's, whether there is any.
        """
        text = cleaned(output).lower()
        matches = [answer.lower() in text for answer in sample.answers]
        subset = sample.group.partition("/")[0]
        if subset in ANY_ANSWER_COUNTS:
            part = float(any(matches))
            return {self.metric: part, "string_match_part": part}
        share = sum(matches) / len(matches) if matches else 0.0
        return {self.metric: share, "string_match_all": share}

    def _writer(self, name: str) -> Writer:
        if name == "qa_1":
            file = self.files.get("squad")
            read = ruler_texts.squad
            return Documents(
                (
                    read(file, self.count, self.per_context)
                    if file
                    else ruler_texts.GeneratedCorpus(1)
                ),
                self.per_context,
            )
        if name == "qa_2":
            file = self.files.get("hotpotqa")
            read = ruler_texts.hotpotqa
            return Documents(
                (
                    read(file, self.count, self.per_context)
                    if file
                    else ruler_texts.GeneratedCorpus(2)
                ),
                self.per_context,
            )
        if name == "cwe" and "words" in self.files:
            return CommonWords(
                *ruler_texts.vocabulary(
                    self.files["words"], max(STRINGS["cwe"]["example"]["words"])
                )
            )
        if name in _OTHERS:
            return _OTHERS[name]()
        if name == "vt":
            return Variables(self.per_context)
        source, essay = self._essays if name in READERS["haystack"] else ruler_texts.essays(None)
        return Needles(
            **STRINGS["niah"]["subsets"][name],
            essay=essay,
            source=source,
            questions=self.per_context,
        )

    @functools.cached_property
    def _essays(self) -> tuple[str, ruler_texts.Essay]:
        return ruler_texts.essays(self.files.get("haystack"))

    def _generated(self, cells: list[tuple[str, int]], count: Count, seed: int) -> Iterator[Sample]:
        fits = [
            Fit(RulerCell(name, length, seed, count), self.writers[name], self.fit)
            for name, length in cells
        ]
        for fit in fits:
            fit.check()
        for index in range(self.count):
            for fit in fits:
                yield from self._samples(fit, index)

    def _samples(self, fit: Fit, index: int) -> Iterator[Sample]:
        """The questions of a context."""
        first, size = fit.fitted(index)
        name, length = fit.cell.name, fit.cell.length
        for number, written in enumerate((first, *first.others), 1):
            yield Sample(
                id=f"{name}-{length}-{index}" + (f"-q{number}" if self.per_context > 1 else ""),
                prompt=written.prompt,
                answers=written.answers,
                max_new_tokens=self._new_tokens(fit.writer.new_tokens),
                question=written.question,
                answer_prefix=written.answer_prefix,
                group=f"{name}/{length}",
                meta={
                    "subset": name,
                    "length": length,
                    "size": size,
                    "fit": self.fit,
                    **written.meta,
                },
                chat=True,
            )

    def _new_tokens(self, official: int) -> int:
        return official if self.max_new_tokens is None else min(self.max_new_tokens, official)

    def _read(self, cells: list[tuple[str, int]]) -> Iterator[Sample]:
        loaded = []
        for name, length in cells:
            file = self._stored_file(name, length)
            meta = {"subset": name, "length": length, "data": file.label}
            loaded.append((name, length, meta, ruler_files.stored(file, name, self.count, length)))
        for index in range(self.count):
            for name, length, meta, rows in loaded:
                row = rows[index]
                yield Sample(
                    id=f"{name}-{length}-{row.row}",
                    prompt=row.prompt,
                    answers=row.answers,
                    max_new_tokens=self._new_tokens(
                        STRINGS[ruler_files.family(name)]["new_tokens"]
                    ),
                    question=row.question,
                    answer_prefix=row.answer_prefix,
                    group=f"{name}/{length}",
                    meta=meta,
                    chat=True,
                    error=row.error,
                )


class Niah(Ruler):
    """RULER's eight needle subsets alone."""

    name = "niah"
    metric = "string_match_all"
    valid_subsets = SUBSETS


_OTHERS: dict[str, type[CommonWords] | type[FrequentWords]] = {
    "cwe": CommonWords,
    "fwe": FrequentWords,
}


def _check_questions(questions: object, subsets: Sequence[str], data_dir: str | None) -> None:
    """Whether so many questions can be asked about a context of each subset.

    Raises
    ------
    ValueError
        they cannot.
    """
    where = f"task.questions={questions}"
    if type(questions) is not int or questions < 1:
        raise ValueError(f"{where}: a whole number, 1 or more")
    if questions == 1:
        return
    if data_dir is not None:
        raise ValueError(f"{where}: the prompts of task.data_dir={data_dir} have one each; use 1")
    for name in subsets:
        if name in _OTHERS:
            raise ValueError(
                f"{where}: {name} has one question about its words; use 1, or leave it out"
            )
        if name in READERS["haystack"]:
            needles = (
                STRINGS["niah"]["subsets"][name]["queries"]
                * STRINGS["niah"]["subsets"][name]["values"]
            )
            if (most := len(DEPTHS) // needles) < questions:
                raise ValueError(
                    f"{where}: {name} has {len(DEPTHS)} places for needles, room for {most}"
                    " questions"
                )


@dataclass(frozen=True, eq=False)
class Counter:
    """Counts the tokens of a prompt as the model gets it.

    Attributes
    ----------
    template_tokens
        tokens that the chat template puts around a message.
    """

    tokenizer: Tokenizer
    template_tokens: int = 0

    def __call__(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False)["input_ids"]) + self.template_tokens


def counter(tokenizer: Tokenizer) -> Counter:
    """Counts with the chat template where there is one: a prompt that fits with it fits without."""
    count = Counter(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        return count
    word = "text"
    ids = tokenizer(chat_text(word, tokenizer), add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    return Counter(tokenizer, max(0, len(ids) - count(word)))


def cleaned(output: str) -> str:
    """RULER's post-processing of an output.

    Stripped, control characters turned into newlines, stripped again.
    """
    return _CONTROL.sub("\n", output.strip()).strip()
