"""Several instructions in one prompt, then a request: which of them a reply keeps, by rules.

The instructions are the context and the request the question, so that a method that compresses
before the question comes has not seen what they are for. Compressed caches drop some instructions
and keep others ("The Pitfalls of KV Cache Compression", arXiv 2510.00231); each kind, and each
place in the list, has a score of its own.

Whether a doubtful reply keeps an instruction is decided as IFEval's checker decides
(google-research, instruction_following_eval/instructions.py), but where the text here asks for more
than IFEval's.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.config import show
from kvbench.tasks import Sample, Task

if TYPE_CHECKING:
    from kvbench.models.types import Tokenizer

_STRINGS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("data").joinpath("instructions.yaml").read_text(encoding="utf-8")
)
INSTRUCTIONS: dict[str, dict[str, Any]] = _STRINGS["instructions"]
MOST = 10  # of any draw so many are compatible: "json" leaves no more


class Instructions(Task):
    """`samples` prompts for each number of instructions.

    The score is the share of them that the reply keeps.

    Attributes
    ----------
    counts
        numbers of instructions in a prompt, a group each.
    count
        prompts for each.
    max_new_tokens
        tokens to generate at most.
    """

    name = "instructions"
    metric = "kept"

    def __init__(
        self, instructions: Sequence[int] = (2, 4, 8), samples: int = 20, max_new_tokens: int = 256
    ) -> None:
        if not instructions or len(set(instructions)) < len(instructions):
            raise ValueError(
                f"task.instructions={show(instructions)}: different numbers, such as [2,4,8]"
            )
        if any(type(count) is not int or not 1 <= count <= MOST for count in instructions):
            raise ValueError(
                f"task.instructions={show(instructions)}: whole numbers from 1 to {MOST}, such as"
                " [2,4,8]"
            )
        self.counts = tuple(instructions)
        self.count = samples
        self.max_new_tokens = max_new_tokens

    def __len__(self) -> int:
        return len(self.counts) * self.count

    def samples(self, tokenizer: Tokenizer | None, seed: int) -> Iterator[Sample]:
        """A prompt with each number of instructions, then the next.

        Kinds, values, order and request are drawn.
        """
        for index in range(self.count):
            for count in self.counts:
                yield self._sample(
                    count, index, random.Random(f"instructions/{seed}/{count}/{index}")
                )

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """The share kept, and 0 or 1 by each instruction's kind and place, "place_1" and so on."""
        instructions = sample.meta["instructions"]
        scores = {
            instruction["kind"]: float(keeps(output, **instruction)) for instruction in instructions
        }
        places = {f"place_{place}": value for place, value in enumerate(scores.values(), 1)}
        return {"kept": sum(scores.values()) / len(scores), **scores, **places}

    def _sample(self, count: int, index: int, rng: random.Random) -> Sample:
        instructions = drawn(count, rng)
        texts = (
            INSTRUCTIONS[instruction["kind"]]["text"].format(**instruction)
            for instruction in instructions
        )
        items = (
            _STRINGS["item"].format(number=number, text=text)
            for number, text in enumerate(texts, 1)
        )
        question = _STRINGS["question"].format(request=rng.choice(_STRINGS["requests"]))
        return Sample(
            id=f"instructions-{count}-{index}",
            prompt=_STRINGS["before"] + "".join(items) + question,
            answers=(),
            max_new_tokens=self.max_new_tokens,
            question=question,
            group=str(count),
            meta={"instructions": instructions},
            chat=True,
        )


def drawn(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Instructions of different kinds that one reply can keep, in order: their kinds, values."""
    chosen: list[dict[str, Any]] = []
    used: set[str] = set()
    for kind in rng.sample(list(INSTRUCTIONS), len(INSTRUCTIONS)):
        settings = INSTRUCTIONS[kind]
        if len(chosen) < count and used.isdisjoint(settings["uses"]):
            used |= set(settings["uses"])
            values = {
                key: choices for key, choices in settings.items() if key not in ("text", "uses")
            }
            chosen.append(
                {"kind": kind, **{key: rng.choice(choices) for key, choices in values.items()}}
            )
    return chosen


def keeps(reply: str, kind: str, **values: Any) -> bool:
    """Whether a reply keeps an instruction of a kind with these values.

    One that says nothing keeps none.
    """
    return bool(reply.strip()) and _RULES[kind](reply.strip(), **values)


def _counter_of(pattern: str) -> Callable[[str], int]:
    """How often a pattern is in a reply."""
    return lambda reply: len(re.findall(pattern, reply, re.MULTILINE | re.IGNORECASE))


def _is_json(reply: str) -> bool:
    """One JSON object, perhaps in a fence of Markdown's."""
    text = re.sub(r"^```(?:json)?|```$", "", reply, flags=re.IGNORECASE)
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _are_paragraphs(reply: str, count: int) -> bool:
    pieces = [piece.strip() for piece in reply.split("***")]
    return len(pieces) == count and all(pieces)


def _capital_words(reply: str) -> int:
    """Words of capital letters alone, of two or more characters; IFEval counts "I" and "A", too."""
    return sum(word.isupper() for word in re.findall(r"\w[\w-]*\w", reply))


_RULES: Mapping[str, Callable[..., bool]] = {
    "words_at_least": lambda reply, count: _counter_of(r"\w+")(reply) >= count,
    "words_at_most": lambda reply, count: _counter_of(r"\w+")(reply) <= count,
    "lower_case": lambda reply: reply == reply.lower(),
    "upper_case": lambda reply: reply == reply.upper(),
    "capital_words": lambda reply, count: _capital_words(reply) >= count,
    "no_comma": lambda reply: "," not in reply,
    "no_digits": lambda reply: not re.search(r"\d", reply),
    "starts_with": lambda reply, phrase: reply.lower().startswith(phrase.lower()),
    "ends_with": lambda reply, phrase: reply.rstrip(".!\"' ").lower().endswith(phrase.lower()),
    "postscript": lambda reply: bool(
        re.match(r"\W*p\.\s?s\.", reply.rpartition("\n")[2], re.IGNORECASE)
    ),
    "quotation": lambda reply: len(reply) > 2 and reply[0] == reply[-1] == '"',
    "json": _is_json,
    "title": lambda reply: any(
        title.strip("<>").strip() for title in re.findall(r"<<[^\n]+>>", reply)
    ),
    "bullets": lambda reply, count: _counter_of(r"^[^\S\n]*(?:\*[^*]|-)")(reply) == count,
    "paragraphs": _are_paragraphs,
    "keyword": lambda reply, word, count: _counter_of(rf"\b{re.escape(word)}\b")(reply) >= count,
    "forbidden": lambda reply, word: _counter_of(rf"\b{re.escape(word)}\b")(reply) == 0,
    "letter": lambda reply, letter, count: reply.lower().count(letter) >= count,
    "placeholders": lambda reply, count: _counter_of(r"\[[^\[\]\n]+\]")(reply) >= count,
}
