"""Claims about LongBench's metrics: they score what the official script scores.

Expected numbers are the output of the official `metrics.py` on Python 3.11 with rouge 1.0.1, fuzzywuzzy 0.18.0 and
Levenshtein 0.27.5, which are no dependencies of kvbench; "difflib" is fuzzywuzzy without Levenshtein.
"""

from __future__ import annotations

import random
import sys

import pytest

from kvbench.tasks.metrics import classification, code_sim, count, qa_f1, retrieval, rouge_l

# The official sums are written in another order.
EXACT = 1e-12


@pytest.mark.parametrize(
    "prediction, answer, expected",
    [
        ("The cat sat.", "a cat sat on the mat", 0.6666666666666666),
        ("It's 1,000 dollars", "1000 dollar", 0.4),
        ("New York, New York", "New York City", 0.5714285714285715),
        ("Éclair au chocolat!", "éclair chocolat", 0.8),
        ("“quoted” text—here", "quoted text here", 0.0),
        ("the", "the", 0.0),
        ("", "x", 0.0),
    ],
)
def test_qa_f1(prediction, answer, expected):
    assert qa_f1(prediction, answer) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(
    "prediction, answer, expected",
    [
        ("the cat sat on the mat", "the cat lay on the mat", 0.7999999950000002),
        ("The cat sat. The dog ran.", "The dog ran. The cat sat.", 0.999999995),
        ("a b c d", "d c b a", 0.24999999500000009),
        ("one. . two", "one. two. ", 0.999999995),  # a blank piece is one empty word
        ("b a c b", "a b c a. c b a", 0.6666666616666668),
        ("x y z. x", "x. y. z x", 0.6666666616666668),
        ("Police killed the gunman", "police killed the gunman.", 0.749999995),
        ("Über 3.5 Mio. Leute", "Über 3.5 Millionen Leute.", 0.7999999950000002),
        ("", "", 0.0),
        (".", ".", 0.0),
        (" ", "a", 0.0),
    ],
)
def test_rouge_l_is_that_of_the_package_rouge(prediction, answer, expected):
    assert rouge_l(prediction, answer) == pytest.approx(expected, abs=EXACT)


def test_rouge_l_is_not_that_of_the_package_rouge_score():
    """Whose words are stemmed and lower-cased, repeated ones counted, and full stops ignored: 1.0 here."""
    assert rouge_l("Police killed the gunman", "police killed the gunman.") == pytest.approx(0.749999995, abs=EXACT)


def test_rouge_l_of_long_texts_without_full_stops_is_their_score():
    """The official script gives 0.0; the expected number is its own with Python's recursion limit lifted."""
    prediction = " ".join(f"w{i % 700}" for i in range(900))
    answer = " ".join(f"w{i % 900}" for i in range(100, 1100))
    assert rouge_l(prediction, answer) == pytest.approx(0.8749999950781251, abs=EXACT)


def test_rouge_l_follows_one_common_subsequence_whatever_the_ties():
    """Against the whole table of lengths, walked back from its end: up only where the length above is the larger."""

    def walked(first: list[str], second: list[str]) -> set[str]:
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, one in enumerate(first, 1):
            for j, other in enumerate(second, 1):
                longest = max(table[i - 1][j], table[i][j - 1])
                table[i][j] = table[i - 1][j - 1] + 1 if one == other else longest
        i, j, words = len(first), len(second), set()
        while i and j:
            if first[i - 1] == second[j - 1]:
                words.add(first[i - 1])
                i, j = i - 1, j - 1
            elif table[i - 1][j] > table[i][j - 1]:
                i -= 1
            else:
                j -= 1
        return words

    rng = random.Random(0)
    for _ in range(500):
        prediction, answer = (rng.choices("abcdefgh", k=rng.randint(1, 30)) for _ in range(2))
        hits = len(walked(answer, prediction))
        precision, recall = hits / len(set(prediction)), hits / len(set(answer))
        expected = 2 * precision * recall / (precision + recall + 1e-8)
        assert rouge_l(" ".join(prediction), " ".join(answer)) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("stop", ["", "."])
def test_rouge_l_of_a_long_summary_takes_fewer_steps_than_a_table_of_its_words(stop):
    rng = random.Random(1)

    def text(words: int) -> str:
        return " ".join(f"w{rng.randrange(3000)}" + (stop if i % 15 == 14 else "") for i in range(words))

    prediction, answer, lines = text(512), text(1000), 0

    def count_lines(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return count_lines

    tracing = sys.gettrace()
    sys.settrace(count_lines)
    try:
        rouge_l(prediction, answer)
    finally:
        sys.settrace(tracing)
    assert 512 < lines < 512 * 1000


CLASSES = ["Abbreviation", "Date", "Other entity", "entity", "Disease and medicine", "Disease", "City", "medicine"]


@pytest.mark.parametrize(
    "prediction, answer, expected",
    [
        ("Date", "Date", 1.0),
        ("Date or City", "Date", 0.5),
        ("City, Date, Abbreviation", "City", 1 / 3),
        ("Other entity", "Other entity", 1.0),  # "entity" is part of the answer and is taken out
        ("Disease and medicine", "Disease and medicine", 0.5),  # "Disease" too, but "medicine" behind it is passed over
        ("Disease and medicine", "Disease", 1 / 3),
        ("date", "Date", 0.0),
        ("nothing", "Date", 0.0),
    ],
)
def test_classification_shares_the_credit_and_shrinks_its_list_under_the_loop(prediction, answer, expected):
    assert classification(prediction, answer, CLASSES) == pytest.approx(expected, abs=EXACT)


def test_classification_leaves_the_callers_classes_alone():
    classes = ["a", "b", "c", "abc"]
    assert classification("abc", "abc", classes) == 0.5
    assert classes == ["a", "b", "c", "abc"]


@pytest.mark.parametrize(
    "prediction, expected", [("There are 7", 1.0), ("7, no: 8", 0.5), ("7 7 7 9", 0.75), ("07", 0.0), ("none", 0.0)]
)
def test_count_is_the_share_of_the_numbers(prediction, expected):
    assert count(prediction, "7") == expected


@pytest.mark.parametrize(
    "prediction, expected", [("Paragraph 12", 1.0), ("12", 1.0), ("Paragraph 1", 0.0), ("Paragraph 12 or 13", 0.5)]
)
def test_retrieval_is_the_share_of_the_numbers(prediction, expected):
    assert retrieval(prediction, "Paragraph 12") == expected


CODE = [
    ("return x", "return x", 1.0, 1.0),
    ("  return x", "return x", 0.89, 0.89),
    ("return x", "  return x", 0.89, 0.89),
    ("\n\n    int a = 0;\n    int b", "    int a = 1;", 0.93, 0.93),
    ("# comment\n// other\n`code`\nfoo(bar)", "foo(baz)", 0.88, 0.88),
    ("\n   \nfoo()", "foo()", 0.0, 0.0),  # a blank line is a line of code
    ("# only", "# only", 0.0, 0.0),
    ("abcdefgh", "aijklmno", 0.12, 0.12),  # 12.5 percent
    ("", "x", 0.0, 0.0),
    ("if (result == null) {", "if (null == result) {", 0.71, 0.62),
    ("ab" * 150, "ba" * 150, 1.0, 0.0),  # difflib leaves letters out that are frequent in a long text
]


@pytest.mark.parametrize("prediction, answer, levenshtein, by_difflib", CODE)
def test_code_sim_is_that_of_fuzzywuzzy_with_and_without_levenshtein(prediction, answer, levenshtein, by_difflib):
    assert code_sim(prediction, answer, "levenshtein") == levenshtein
    assert code_sim(prediction, answer) == code_sim(prediction, answer, "difflib") == by_difflib


def test_code_sim_of_difflib_depends_on_the_order_of_its_texts():
    python, c = "for i in range(n):", "for (int i = 0; i < n; i++) {"
    assert (code_sim(python, c, "difflib"), code_sim(c, python, "difflib")) == (0.43, 0.38)


def test_code_sim_of_two_empty_texts_is_1():
    assert code_sim("", "") == code_sim("`", "", "difflib") == 1.0
