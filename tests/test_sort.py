"""Sorting inside kernels, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from kvbench.config import bind_methods

bind_methods()

from methods.blocks import kernels  # noqa: E402

run = njit(lambda values, items, count: kernels.sort(values, items, count))


@pytest.mark.parametrize("count", [0, 1, 2, 17, 1000])
def test_numbers_are_sorted_and_equal_ones_stay_as_they_stood(count: int) -> None:
    """Both zeros are equal, infinities are the ends, and numbers beyond `count` are left alone."""
    rng = np.random.default_rng(count)
    given = (rng.standard_normal(count + 3) * 10.0 ** rng.integers(-44, 38, count + 3)).astype(np.float32)
    special = rng.integers(0, 2, count + 3).astype(bool)
    given[special] = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf], np.float32), int(special.sum()))
    values, items = given.copy(), np.arange(count + 3).astype(np.int32)[::-1].copy()
    run(values, items, count)
    order = np.argsort(given[:count], kind="stable")
    assert values.tolist() == [*given[:count][order].tolist(), *given[count:].tolist()]
    assert items.tolist() == [*(count + 2 - order).tolist(), 2, 1, 0]
