"""Generated prose: varied English sentences from a small grammar, for haystacks.

The same seed gives the same text on every machine. Sentences are grammatical and keep to a
paragraph's people, places and things, but make no story; none occurs twice in a text, and none
holds a digit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# A rule's alternative, cut up: even places hold text, odd places names of rules.
Alternative = tuple[str, ...]

_DATA: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("prose.yaml").read_text()
)
_GRAMMAR: dict[str, list[Alternative]] = {
    rule: [tuple(re.split(r"{(\w+)}", alternative)) for alternative in alternatives]
    for rule, alternatives in _DATA["grammar"].items()
}
_CAST: dict[str, int] = _DATA["cast"]
_SHORTEST, _LONGEST = _DATA["paragraph"]
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def sentences(seed: int | str) -> Iterator[str]:
    """Sentences without end, no two of them alike: the text of `seed`."""
    rng = random.Random(f"prose/{seed}")
    previous: set[str] = set()
    while True:
        grammar = _GRAMMAR | {
            rule: rng.sample(_GRAMMAR[rule], count) for rule, count in _CAST.items()
        }
        for _ in range(rng.randint(_SHORTEST, _LONGEST)):
            sentence = _sentence(grammar, rng)
            # A paragraph's few words allow many thousands of sentences, and the next paragraph has
            # other words.
            if sentence not in previous:
                previous.add(sentence)
                yield sentence


def words(seed: int | str, count: int) -> list[str]:
    """The first `count` words of the text of `seed`; the last sentence may be cut."""
    collected: list[str] = []
    text = sentences(seed)
    while len(collected) < count:
        collected += next(text).split()
    return collected[:count]


def _sentence(grammar: dict[str, list[Alternative]], rng: random.Random) -> str:
    parts: list[str] = []
    _expand("sentence", grammar, rng.random, parts)
    text = _ARTICLE.sub(r"\1n ", "".join(parts))
    return text[0].upper() + text[1:]


def _expand(rule: str, grammar: dict[str, list[Alternative]], draw: Any, parts: list[str]) -> None:
    alternatives = grammar[rule]
    # int(random() * n) takes a third of the time of choice(), and a million words take a million
    # draws.
    for index, piece in enumerate(alternatives[int(draw() * len(alternatives))]):
        if index % 2:
            _expand(piece, grammar, draw, parts)
        else:
            parts.append(piece)
