"""L-Eval's closed-ended subsets: exams, a science fiction, topics, word problems (An et al. 2023).

All questions of a document follow each other and differ in what stands after it alone. Prompts,
cuts and scores follow OpenLMLab/LEval, `Baselines/llama2-chat-test.py` and
`Evaluation/auto_eval.py`, whose reading of a letter is generous; a strict one stands beside it.
sci_fi is asked as the document has it ("loyalty"), and not by the world's facts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.tasks import Sample, Task
from kvbench.tasks.rows import check_subsets, in_turn
from kvbench.tasks.sources import DataRow, LocalFile, rows_of

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

FIELDS = {"instructions": list, "outputs": list, "input": str}
PUBLISHED = {  # rows of the repository's files
    **dict.fromkeys(("tpo", "coursera", "quality"), 15),
    "sci_fi": 7,
    "topic_retrieval_longchat": 50,
    "gsm100": 100,
}
# words that a document gives up at a time once it was cut to as many words as tokens are allowed
SHORTER = 250
LETTERS = "ABCD"
ALONE = re.compile(r"\b[A-D]+\b")
NUMBER = re.compile(r"The answer is \$?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True)
class LEvalSubset:
    """What the official scripts know of one subset; `data/leval.yaml` says what the fields are."""

    reads: str
    before: str
    question: str
    prefix: str
    chat: bool = True


SUBSETS: dict[str, LEvalSubset] = {
    name: LEvalSubset(**entry)
    for name, entry in yaml.safe_load(
        Path(__file__).with_name("data").joinpath("leval.yaml").read_text(encoding="utf-8")
    ).items()
}


class LEval(Task):
    """All questions of some subsets, a group each.

    Attributes
    ----------
    subsets
        names, of `SUBSETS`.
    max_length
        tokens of the longest document; None: any.
    max_new_tokens
        tokens to generate at most.
    files
        the file of each subset.
    sources
        those files.
    """

    name = "leval"
    metric = "score"
    stored = True

    def __init__(
        self,
        subsets: Sequence[str] = tuple(SUBSETS),
        data_dir: str | None = None,
        max_length: int | None = None,
        max_new_tokens: int = 512,
    ) -> None:
        check_subsets(subsets, SUBSETS)
        if data_dir is None:
            raise ValueError(
                "task.data_dir=null: needs the folder LEval-data of the repository OpenLMLab/LEval"
            )
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ValueError(
                f"task.max_length={max_length}: a number of tokens, 1 or more, or null"
            )
        self.subsets = tuple(subsets)
        self.max_length = max_length
        self.max_new_tokens = max_new_tokens
        folder = Path(str(data_dir)).expanduser()
        nested = folder / "Closed-ended-tasks"
        folder = nested if nested.is_dir() else folder
        self.files = {
            name: LocalFile(
                folder / f"{name}.jsonl", "task.data_dir", tuple(SUBSETS), PUBLISHED[name]
            )
            for name in self.subsets
        }
        self.sources = tuple(self.files.values())

    def __len__(self) -> int:
        rows = chain.from_iterable(map(self._rows, self.subsets))
        return sum(1 if row.error else len(row.data["instructions"]) for row in rows)

    def samples(self, tokenizer: Tokenizer | None, seed: int) -> Iterator[Sample]:
        """The questions of a document of every subset, then of the next.

        Documents are shuffled by the seed.

        A bad line is a sample with an error.

        Raises
        ------
        ValueError
            a file cannot be had or read as what it should be.
        """
        documents = {name: self._documents(name, tokenizer) for name in self.subsets}
        turns: Iterator[list[Sample]] = in_turn(self.name, seed, documents)
        return chain.from_iterable(turns)

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The official score, "score", and but for topics one by a strict reading, "strict"."""
        reads, (answer,) = SUBSETS[sample.group].reads, sample.answers
        strict = {"strict": float(_STRICT[reads](output, answer))} if reads in _STRICT else {}
        return {self.metric: _OFFICIAL[reads](output, answer), **strict}

    @functools.cache  # noqa: B019 - a task lives as long as its run
    def _rows(self, name: str) -> list[DataRow]:
        label = self.files[name].label
        return [
            row._replace(error=row.error or _unfit(f"{label}, line {row.line}: field", row.data))
            for row in rows_of(self.files[name], FIELDS)
        ]

    def _documents(self, name: str, tokenizer: Tokenizer | None) -> list[list[Sample]]:
        """The samples of each document.

        Lines with one text, as all of gsm100, are of one document.
        """
        lines: dict[str, list[DataRow]] = {}
        for row in self._rows(name):
            lines.setdefault(row.error or row.data["input"], []).append(row)
        return [self._document(name, rows, tokenizer) for rows in lines.values()]

    def _document(
        self, name: str, rows: Sequence[DataRow], tokenizer: Tokenizer | None
    ) -> list[Sample]:
        subset, first = SUBSETS[name], rows[0]
        id = f"{name}-{first.line - 1}"
        if first.error:
            return [Sample(id, "", (), self.max_new_tokens, group=name, error=first.error)]
        context = subset.before + self._cut(first.data["input"], tokenizer)
        pairs = [
            pair
            for row in rows
            for pair in zip(row.data["instructions"], row.data["outputs"], strict=True)
        ]
        return [
            Sample(
                id=f"{id}-{number}",
                prompt=context + (end := subset.question.format(question=question)),
                answers=(answer,),
                max_new_tokens=self.max_new_tokens,
                question=end,
                answer_prefix=subset.prefix,
                group=name,
                meta={"document": first.line - 1, "question": number},
                chat=subset.chat,
            )
            for number, (question, answer) in enumerate(pairs, 1)
        ]

    def _cut(self, document: str, tokenizer: Tokenizer | None) -> str:
        """A document of at most `max_length` tokens.

        What is too long is cut to as many words, and then further.
        """
        if self.max_length is None:
            return document
        assert tokenizer is not None
        words, most = document.split(" "), self.max_length
        while len(tokenizer(document, verbose=False)["input_ids"]) > self.max_length:
            document, most = " ".join(words[: max(0, most)]), most - SHORTER
        return document


def _unfit(where: str, data: Mapping[str, Any]) -> str:
    """Why a line is no document with questions, or ""."""
    questions, answers = data["instructions"], data["outputs"]
    if not questions or not all(
        isinstance(text, str) and text.strip() for text in (*questions, *answers)
    ):
        return f"{where} instructions or outputs: expected texts, one or more"
    if len(questions) != len(answers):
        return f"{where} outputs: {len(answers)}, of {len(questions)} instructions"
    return ""


# -- what a reply says -----------------------------------------------------------------------------


def letter(reply: str) -> str:
    """The letter of a choice: the first of A to D in a reply.

    Of one without, A, and of an empty one "None".
    """
    if not reply.strip():
        return "None"
    return (
        reply
        if reply in LETTERS
        else next((character for character in reply if character in LETTERS), "A")
    )


def letters(reply: str) -> str:
    """The letters of several choices.

    Those at the start of a reply, or before a space, a full stop or a bracket.
    """
    if not reply.strip() or reply in LETTERS:
        return letter(reply)
    first = "".join(takewhile(LETTERS.__contains__, reply))
    if len(first) > 1:
        return "".join(sorted(set(first)))
    rest = reply[len(first) :].partition("Question")[0]
    choices = {*first, *re.findall(r"[A-D](?=[\s.)])", rest)}
    run = re.search(r"[A-D]+", rest)
    return "".join(sorted(choices)) or (run[0] if run else "A")


def judgement(reply: str) -> str:
    """What the first word with "true" or "false" in it says, "untrue" too.

    "" of a reply without.
    """
    for word in reply.lower().partition("[fact:")[0].split():
        if verdict := next((option for option in ("true", "false") if option in word), ""):
            return verdict
    return ""


def number(text: str) -> str:
    """The digits before a full stop.

    Of the word after "The answer is", or of the first paragraph's last with any.
    """
    named = re.search(r"The answer is (\S+)", text)
    words = [named[1]] if named else text.partition("\n\n")[0].split(" ")
    word: str = next(
        (candidate for candidate in reversed(words) if re.search(r"\d", candidate)), ""
    )
    return "".join(re.findall(r"\d", word.partition(".")[0]))


def _choice(reply: str, answer: str) -> float:
    """1 for the truth; .25 for a part of it."""
    truth = "".join(character for character in answer.split()[0] if character in LETTERS) or "A"
    return 1.0 if reply == truth else 0.25 * (set(reply) <= set(truth))


def _same_number(first: str, other: str) -> float:
    return float(bool(first and other) and float(first) == float(other))


def _plain(text: str) -> str:
    return text.lower().replace(" ", "")


def _strict_choice(reply: str, answer: str) -> bool:
    """The first of A to D that stand alone, all of them."""
    match = ALONE.search(reply)
    return match is not None and _choice("".join(sorted(set(match[0]))), answer) == 1


def _strict_judgement(reply: str, answer: str) -> bool:
    match = re.search(r"\b(true|false)\b", reply.lower())
    return match is not None and match[0] == judgement(answer)


def _strict_number(reply: str, answer: str) -> bool:
    """The whole number after "The answer is", with its sign and its decimals."""
    match, truth = NUMBER.search(reply), NUMBER.fullmatch(f"The answer is {answer}")
    if match is None or truth is None:
        return False
    return float(match[1].replace(",", "")) == float(truth[1].replace(",", ""))


# By what is read: the official score of a reply against an answer, and whether it is right by a
# strict reading.
_OFFICIAL: dict[str, Callable[[str, str], float]] = {
    "letter": lambda reply, answer: _choice(letter(reply), answer),
    "letters": lambda reply, answer: _choice(letters(reply), answer),
    "judgement": lambda reply, answer: float(judgement(reply) == judgement(answer)),
    "topic": lambda reply, answer: float(_plain(answer) in _plain(reply)),
    "number": lambda reply, answer: _same_number(number(reply), number(answer)),
}
_STRICT: dict[str, Callable[[str, str], bool]] = {
    "letter": _strict_choice,
    "letters": _strict_choice,
    "judgement": _strict_judgement,
    "number": _strict_number,
}
