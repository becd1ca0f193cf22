"""LongBench's metrics: one output against one answer, 0..1, as the official `metrics.py` has them.

They equal the official script with the packages rouge 1.0.1 and fuzzywuzzy, with or without
Levenshtein, and need none of them: they come down to a longest common subsequence or to difflib.
One difference is meant, see `rouge_l`.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Literal, TypeVar

Ratio = Literal["difflib", "levenshtein"]

Symbol = TypeVar("Symbol", bound=Hashable)

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the words, each counted as often as it occurs.

    Case, ASCII punctuation and articles are left out.
    """
    predicted, expected = _plain_words(prediction), _plain_words(answer)
    common = (Counter(predicted) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L of whole summaries.

    Distinct words on the sentences' common subsequences, over distinct words.

    Equals `["rouge-l"]["f"]` of the package rouge 1.0.1, which also ends every sentence at a full
    stop and knows no other. There two sentences of together about a thousand words exceed Python's
    recursion limit, and the official script makes that 0; here they have their score.
    """
    hypothesis, reference = _sentences(prediction), _sentences(answer)
    if not hypothesis or not reference:
        return 0.0
    common = {
        word
        for first in reference
        for second in hypothesis
        for word in _common_words(first, second)
    }
    precision = len(common) / len(set(chain.from_iterable(hypothesis)))
    recall = len(common) / len(set(chain.from_iterable(reference)))
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(prediction: str, answer: str, classes: Iterable[str]) -> float:
    """1 where the answer is the one class that the prediction names.

    Classes named beside it share the credit.
    """
    named = [name for name in classes if name in prediction]
    # The list shrinks under the loop, as it does officially: the class after a removed one is
    # passed over and stays.
    for name in named:
        if name != answer and name in answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the prediction's numbers that are the answer, letter for letter."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """`count`, of the number in an answer such as "Paragraph 12"."""
    return count(prediction, paragraph(answer))


def paragraph(answer: str) -> str:
    """The number in "Paragraph 12", or ""."""
    number = re.search(r"Paragraph (\d+)", answer)
    return "" if number is None else number[1]


def code_sim(prediction: str, answer: str, ratio: Ratio = "difflib") -> float:
    """Similarity of the answer and the first line of code in the prediction, in whole percent.

    A line with a backquote, `#` or `//` is no code; a blank one is, and spaces at its start count.

    Parameters
    ----------
    prediction
        the whole output.
    answer
        one line.
    ratio
        fuzzywuzzy's: by difflib where the package Levenshtein is not there, as LongBench's
        requirements leave it out, or by that package; the latter is 1 to 3 points higher.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    # difflib may find equal texts different: in long ones it leaves frequent letters out.
    return 1.0 if code == answer else round(100 * _RATIOS[ratio](code, answer)) / 100


def _levenshtein(first: str, second: str) -> float:
    """1 - insertions and deletions / letters of both."""
    both = len(first) + len(second)
    common = (~_rows(first, second)[-1] & _ones(second)).bit_count() if first else 0
    # Written as the package does: x.5 percent go up or down with the last bit.
    return 1 - (both - 2 * common) / both


def _difflib(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


_RATIOS: dict[Ratio, Callable[[str, str], float]] = {
    "difflib": _difflib,
    "levenshtein": _levenshtein,
}


def _plain_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    """Words of the pieces between full stops; a blank piece has one word, the empty one."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def _common_words(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """Words on one longest common subsequence.

    Of several, the one that is found from the ends, where `second` is given up first.
    """
    rows = _rows(first, second)
    words = set()
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            words.add(first[i - 1])
            i, j = i - 1, j - 1
        elif rows[i - 1] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
    return words


def _rows(first: Sequence[Symbol], second: Sequence[Symbol]) -> list[int]:
    """The table of longest common subsequences.

    A row for each prefix of `first`, a bit for each prefix of `second`.

    Bit j is 0 where second[j] makes the subsequence longer (Hyyrö 2004): zeros up to j are the
    length at j. A row is one number, so that a long text takes as many steps as it has words, and
    no recursion.
    """
    indices: dict[Symbol, int] = {}
    for index, symbol in enumerate(second):
        indices[symbol] = indices.get(symbol, 0) | 1 << index
    ones = row = _ones(second)
    rows = []
    for symbol in first:
        matching = row & indices.get(symbol, 0)
        row = (row + matching | row - matching) & ones
        rows.append(row)
    return rows


def _ones(second: Sequence[object]) -> int:
    return (1 << len(second)) - 1
