"""64 bytes at a time: what kernels look up and compare together, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from kvbench.config import bind_methods

bind_methods()

from methods.blocks import lanes  # noqa: E402

rng = np.random.default_rng(0)


@pytest.mark.parametrize("way", [lanes._look_up_plainly, lanes.look_up])
@pytest.mark.parametrize("subspaces", [1, 8])
def test_ids_are_looked_up_in_the_table_of_their_row(way: Any, subspaces: int) -> None:
    """Every id of a byte, by the loop of any processor and by what this one has; a sum beyond 255 wraps around."""
    tables = rng.integers(0, 256, (subspaces, 256)).astype(np.uint8)
    ids = np.stack([rng.permutation(256) for _ in range(subspaces)]).astype(np.uint8)
    sums = np.zeros(256, np.uint8)

    run = njit(lambda tables, ids, first, sums: way(tables, ids, first, sums))
    for first in (64, 128, 192):
        run(tables, ids, first, sums)
    expected = np.add.reduce([table[own] for table, own in zip(tables, ids, strict=True)]).astype(np.uint8)
    assert sums[64:].tolist() == expected[64:].tolist()
    assert not sums[:64].any(), "only those from first on"


@pytest.mark.parametrize("least", [0, 1, 127, 128, 200, 255])
def test_a_word_tells_which_bytes_are_large_enough(least: int) -> None:
    numbers = rng.integers(0, 256, 130).astype(np.uint8)
    numbers[7:10] = (0, least, 255)
    word = int(njit(lambda numbers, first, least: lanes.at_least(numbers, first, least))(numbers, 5, least))
    assert [word >> i & 1 for i in range(64)] == [int(number >= least) for number in numbers[5:69]]


@pytest.mark.parametrize("word", [1, 0b1011000, 2**63, 2**64 - 1, 0x8000000000000001])
def test_bits_of_a_word(word: int) -> None:
    count = njit(lambda word: lanes.ones(word))
    first = njit(lambda word: lanes.lowest(word))
    some = njit(lambda word, wanted: lanes.lowest_ones(word, wanted))
    set_ones = [i for i in range(64) if word >> i & 1]
    assert count(np.uint64(word)) == len(set_ones)
    assert first(np.uint64(word)) == set_ones[0]
    for wanted in (0, 1, 2, 64):
        assert int(some(np.uint64(word), wanted)) == sum(1 << i for i in set_ones[:wanted])


def test_a_processor_is_known_by_its_features() -> None:
    assert lanes.looks_up("+avx2,+avx512vbmi,+sse4a")
    assert not lanes.looks_up("+avx2,-avx512vbmi,+avx512vbmi2")
