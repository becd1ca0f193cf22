"""Claims about several instructions in one prompt: one reply can keep them all, and each is checked by its rule."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from kvbench.tasks import Sample
from kvbench.tasks.instructions import INSTRUCTIONS, MOST, Instructions, drawn, keeps


def made(*counts: int, samples: int = 20, seed: int = 0) -> list[Sample]:
    return list(Instructions(counts, samples).samples(None, seed))


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "words_at_least", "count": 3}, "one two three", "one two"),
    ({"kind": "words_at_most", "count": 3}, "one two three", "one two three four"),
    ({"kind": "lower_case"}, "all small 1.", "All small"),
    ({"kind": "upper_case"}, "ALL 1 LARGE", "ALL LARGe"),
    ({"kind": "capital_words", "count": 2}, "so LOUD and CLEAR", "so LOUD and I am A man"),
    ({"kind": "no_comma"}, "one; two", "one, two"),
    ({"kind": "no_digits"}, "one", "1"),
    ({"kind": "starts_with", "phrase": "Let me begin"}, " let me begin here", "First let me begin"),
    ({"kind": "ends_with", "phrase": "that is all"}, 'So "that is all."', "that is all of it"),
    ({"kind": "postscript"}, "Dear you\nP.S. more", "P.S. more\nDear you"),
    ({"kind": "quotation"}, '"all of it"', '"all" of it'),
    ({"kind": "json"}, '```json\n{"a": [1, 2]}\n```', 'So: {"a": 1}'),
    ({"kind": "title"}, "<<A title>>\ntext", "<< >> <A title>"),
    ({"kind": "bullets", "count": 2}, "So:\n* one\n - two\n***", "* one\n* two\n* three"),
    ({"kind": "paragraphs", "count": 2}, "one\n***\ntwo", "one\n***\ntwo\n***"),
    ({"kind": "keyword", "word": "river", "count": 2}, "River and river", "rivers and river"),
    ({"kind": "forbidden", "word": "very"}, "every day", "Very good"),
    ({"kind": "letter", "letter": "k", "count": 2}, "Kick", "kid"),
    ({"kind": "placeholders", "count": 2}, "[name] and [place]", "[name] and []"),
]


@pytest.mark.parametrize(("instruction", "right", "wrong"), CASES, ids=lambda case: str(case)[:20])
def test_a_rule_knows_a_reply_that_keeps_it_from_one_that_does_not(
    instruction: dict[str, Any], right: str, wrong: str
) -> None:
    assert keeps(right, **instruction) and not keeps(wrong, **instruction) and not keeps(" \n", **instruction)


# Replies about which a reader and IFEval's checker (google-research, instructions.py) may differ: its verdict counts,
# but where the text here asks for more: a postscript as the last line, one JSON object, the word, a divider between.
DOUBTFUL: list[tuple[dict[str, Any], str, bool]] = [
    ({"kind": "words_at_least", "count": 3}, "a - b", False),
    ({"kind": "words_at_most", "count": 2}, "a - b", True),
    ({"kind": "capital_words", "count": 2}, "ÉCOLE ÜBER", True),
    ({"kind": "capital_words", "count": 1}, "A and I", False),
    ({"kind": "capital_words", "count": 2}, "TOP-SECRET", False),
    ({"kind": "starts_with", "phrase": "Let me begin"}, "**Let me begin**", False),
    ({"kind": "starts_with", "phrase": "Let me begin"}, "Let me beginning", True),
    ({"kind": "ends_with", "phrase": "that is all"}, "that is all.**", False),
    ({"kind": "postscript"}, "Text.\n**P.S.** Bye", True),
    ({"kind": "postscript"}, "Text.\nP.S. Bye\nYours, Ann", False),
    ({"kind": "quotation"}, '"One" and "two"', True),
    ({"kind": "quotation"}, "\u201cAll of it.\u201d", False),
    ({"kind": "json"}, '```JSON\n{"a": 1}\n```', True),
    ({"kind": "json"}, '{"a": NaN}', True),
    ({"kind": "json"}, "[1]", False),
    ({"kind": "title"}, "a << 2 and 3 >> b", True),
    ({"kind": "bullets", "count": 2}, "*\tone\n*\ttwo", True),
    ({"kind": "bullets", "count": 2}, "- one\n- two", True),
    ({"kind": "bullets", "count": 2}, "* one\n  - a detail\n* two", False),
    ({"kind": "bullets", "count": 2}, "* one\n* two\n\n* * *\nThe end", False),
    ({"kind": "paragraphs", "count": 2}, "One *** two", True),
    ({"kind": "paragraphs", "count": 2}, "***Note*** one\n***\ntwo", False),
    ({"kind": "keyword", "word": "river", "count": 2}, "rivers riverside", False),
    ({"kind": "placeholders", "count": 2}, "see [1] and [x](http://a)", True),
]


@pytest.mark.parametrize(("instruction", "reply", "kept"), DOUBTFUL, ids=lambda case: str(case)[:20])
def test_a_doubtful_reply_is_judged_as_ifevals_checker_judges_it(
    instruction: dict[str, Any], reply: str, kept: bool
) -> None:
    assert keeps(reply, **instruction) == kept


def test_every_kind_has_a_case() -> None:
    assert [case["kind"] for case, *_ in CASES] == list(dict.fromkeys(case["kind"] for case, *_ in CASES))
    assert {case["kind"] for case, *_ in CASES} == set(INSTRUCTIONS) and 12 <= len(INSTRUCTIONS) <= 20


def obedient(asked: list[dict[str, Any]]) -> str:
    """A reply written to keep these instructions, whatever they are."""
    by = {one["kind"]: one for one in asked}
    pieces = ["moss grows on old stones " * 17]
    pieces += [by[kind]["word"] + " " for kind in ("keyword",) if kind in by for _ in range(by[kind]["count"])]
    pieces += [by["letter"]["letter"] * by["letter"]["count"] + " "] if "letter" in by else []
    pieces += ["[name] " * by["placeholders"]["count"]] if "placeholders" in by else []
    pieces += ["LOUD " * by["capital_words"]["count"]] if "capital_words" in by else []
    pieces += ["<<stones>> "] if "title" in by else []
    text = by["starts_with"]["phrase"] + " " if "starts_with" in by else ""
    text += "".join(pieces)
    text += "\n* stone" * by["bullets"]["count"] if "bullets" in by else ""
    text += "\n***\nmoss" * (by["paragraphs"]["count"] - 1) if "paragraphs" in by else ""
    text += "\nP.S. moss" if "postscript" in by else ""
    text += f"\n{by['ends_with']['phrase']}" if "ends_with" in by else ""
    if "lower_case" in by or "upper_case" in by:
        text = text.lower() if "lower_case" in by else text.upper()
    if "json" in by:
        return json.dumps({"MOSS" if "upper_case" in by else "moss": text})
    return f'"{text}"' if "quotation" in by else text


@pytest.mark.parametrize("seed", range(40))
def test_one_reply_can_keep_all_instructions_of_a_prompt(seed: int) -> None:
    asked = drawn(MOST, random.Random(seed))
    assert len(asked) == len({one["kind"] for one in asked}) == MOST
    reply = obedient(asked)
    assert [one["kind"] for one in asked if not keeps(reply, **one)] == []


def test_a_prompt_lists_its_instructions_and_ends_with_the_request() -> None:
    for sample in made(2, 8):
        context, _, request = sample.prompt.rpartition("\nRequest: ")
        assert sample.question == f"\nRequest: {request}" and request.endswith(".")
        assert context.count("\n") == 2 + len(sample.meta["instructions"]) == 2 + int(sample.group)
        for number, one in enumerate(sample.meta["instructions"], 1):
            assert f"{number}. {INSTRUCTIONS[one['kind']]['text'].format(**one)}\n" in context
        assert json.loads(json.dumps(sample.meta)) == sample.meta and sample.chat


def test_the_score_is_the_share_kept_with_each_kind_and_place_beside_it() -> None:
    asked = [{"kind": "no_comma"}, {"kind": "lower_case"}, {"kind": "keyword", "word": "river", "count": 2}]
    sample = Sample("x", "", (), 1, meta={"instructions": asked})
    found = Instructions().score(sample, "River, river")
    assert found == {
        "kept": pytest.approx(1 / 3),
        "no_comma": 0,
        "lower_case": 0,
        "keyword": 1,
        "place_1": 0,
        "place_2": 0,
        "place_3": 1,
    }


def test_kinds_places_and_requests_are_spread_and_the_seed_decides() -> None:
    found = made(4, samples=200)
    firsts = Counter(sample.meta["instructions"][0]["kind"] for sample in found)
    assert len(firsts) == len(INSTRUCTIONS) and len({sample.question for sample in found}) == 16
    assert [sample.prompt for sample in found[:5]] == [sample.prompt for sample in made(4, samples=5)]
    assert found[0].prompt != made(4, samples=1, seed=1)[0].prompt
    assert [sample.group for sample in made(2, 4, samples=2)] == ["2", "4"] * 2


@pytest.mark.parametrize("counts", [[], [0], [MOST + 1], [2, 2], [2.0], ["a"]])
def test_numbers_of_instructions_that_cannot_be_are_refused(counts: Any) -> None:
    with pytest.raises(ValueError, match=r"^task\.instructions="):
        Instructions(counts)
