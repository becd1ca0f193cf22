"""Numbers of a version stay what they are: whoever changes them raises it, and nobody else does."""

from __future__ import annotations

import pytest
from goldens import KINDS, fault, golden, held


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, of in KINDS.items() for name in of.names])
def test_numbers_are_those_of_their_version(kind: str, name: str) -> None:
    assert not fault(kind, name, golden(kind, name), held(kind).get(name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_golden_is_of_something_that_is_there(kind: str) -> None:
    assert held(kind).keys() == set(KINDS[kind].names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ()),
        ({"numbers": {"kl": "0.1001"}}, ()),
        ({"numbers": {"kl": "0.2"}}, ("quest", "raise", "conf/method/quest.yaml")),
        ({"numbers": {"kl": "0.1", "ids": "0-4"}}, ("quest", "raise")),
        ({"version": 2}, ("quest", "leave", "conf/method/quest.yaml")),
        ({"version": 2, "numbers": {"kl": "0.2"}}, ("goldens.py",)),
        ({"harness": 2, "numbers": {"kl": "0.2"}}, ("goldens.py",)),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], words: tuple[str, ...]) -> None:
    before = {"version": 1, "harness": 1, "numbers": {"kl": "0.1"}}
    said = fault("methods", "quest", before | change, before)
    assert bool(said) == bool(words) and all(word in said for word in words)
