"""Compiled work in torch's threads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numba import njit

from kvbench.kernels.threads import claim, in_threads


@njit(nogil=True)
def _note(number: int, claims: Any, came: Any, done: Any, amount: float) -> None:
    came[number] += 1
    at = claim(claims)
    while at < len(done):
        done[at] += amount
        at = claim(claims)


@njit(nogil=True)
def _work(threads: int, came: Any, done: Any) -> None:
    in_threads(threads, _note, (np.zeros(1, np.int64), came, done, 0.5))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_has_a_number_and_every_item_is_done_once(threads: int) -> None:
    for _ in range(20):
        came, done = np.zeros(8, np.int64), np.zeros(1000)
        _work(threads, came, done)
        assert came.tolist() == [1] * threads + [0] * (8 - threads)
        assert (done == 0.5).all()


ALONE = """
import pathlib
pathlib.Path.glob = lambda *_: iter(())  # no OpenMP beside torch
import numpy as np
from test_team import _work
came, done = np.zeros(8, np.int64), np.zeros(1000)
_work(4, came, done)
assert came.tolist() == [1] + [0] * 7, came
assert (done == 0.5).all()
"""


@pytest.mark.slow
def test_where_torch_brings_no_gnu_openmp_one_thread_does_all() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True, cwd="tests")
