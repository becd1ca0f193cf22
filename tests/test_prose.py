"""Claims about the generated prose: varied, without repeats, the same everywhere, and quick."""

from __future__ import annotations

import random
import re
import time
from itertools import islice

from kvbench.tasks.ruler import prose

# Some 8k tokens hold 450 sentences; this is ten times as many.
MANY = 5000


def test_no_sentence_occurs_twice_in_a_text():
    assert len(set(islice(prose.sentences(0), MANY))) == MANY


def test_sentences_of_two_texts_hardly_ever_agree():
    first, second = (set(islice(prose.sentences(seed), MANY)) for seed in (0, 1))
    assert len(first & second) < MANY / 50


def test_sentences_differ_in_how_they_begin():
    """No two of the same opening words make up a large part of a text, as they would with few templates."""
    starts = [" ".join(sentence.split()[:2]) for sentence in islice(prose.sentences(0), MANY)]
    assert len(set(starts)) > MANY / 5
    assert max(map(starts.count, set(starts))) < MANY / 20


def test_a_sentence_is_one_sentence_without_digits():
    for sentence in islice(prose.sentences(3), MANY):
        assert re.fullmatch(r"[A-Z][A-Za-z', -]*[a-z]\.", sentence), sentence
        assert not re.search(r"\b[Aa] [aeiou]|  ", sentence), sentence


def test_neighbouring_sentences_share_more_words_than_distant_ones():
    texts = [set(sentence.lower().strip(".").split()) for sentence in islice(prose.sentences(0), MANY)]

    def shared(distance: int) -> int:
        return sum(len(one & other) for one, other in zip(texts, texts[distance:], strict=False))

    assert shared(1) > 1.1 * shared(100)


def test_the_same_seed_gives_the_same_text_in_any_process():
    # What it gave when it was written: a changed word list or grammar changes every sample published with it.
    assert prose.words("claim", 12) == EXPECTED
    assert prose.words("claim", 500)[:12] == EXPECTED


def test_words_are_as_many_as_asked_for():
    assert [len(prose.words(0, count)) for count in (0, 1, 13, 1000)] == [0, 1, 13, 1000]


def test_a_million_words_take_a_few_seconds():
    start = time.process_time()
    assert len(prose.words(0, 200_000)) == 200_000
    assert time.process_time() - start < 3  # 0.25 s on a desktop core; other work may share it


def test_the_global_random_state_is_left_alone():
    random.seed(5)
    before = random.getstate()
    prose.words(0, 100)
    assert random.getstate() == before


EXPECTED = ["The", "royal", "smith", "carefully", "looked", "for", "a", "solid", "sledge", "for", "everybody.", "By"]
