"""What a decode step launches on a device grows by nobody's oversight."""

from __future__ import annotations

import json

import pytest
from driver import Case
from launches import PARTS, TABLE, launches, preset_cases
from test_captured import HOST

CASES = preset_cases()
HELD = json.loads(TABLE.read_text())
QUICK = ("full", "snapkv", "quest", "icecache")


def test_every_preset_is_in_the_table() -> None:
    assert [case.name for case in CASES] == sorted(HELD)


def test_a_layer_of_a_step_that_is_one_graph_is_at_most_fifteen_launches() -> None:
    layers = {name: sum(held[part] for part in PARTS[:4]) for name, held in HELD.items() if name not in HOST}
    assert {name: launches for name, launches in layers.items() if launches > 15} == {}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in QUICK)) for case in CASES]
)
def test_a_step_launches_no_more_than_it_did(case: Case) -> None:
    more = {part: (HELD[case.name][part], now) for part, now in launches(case).items() if now > HELD[case.name][part]}
    assert not more, f"{case.name}: {more} (before, now); fewer are held by `python tests/launches.py`"
