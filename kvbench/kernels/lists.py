"""Bookkeeping over lists of token ids: how many are named, and what must come up from the host.

NumPy sorts them, which takes Numba longer to compile than all the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.kernels.vectors import kernel


def count_lists(lists: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of each of lists [L, M] how many ids >= 0 it has, [L], and how many distinct ones, [L]."""
    tokens = np.sort(lists, axis=1)
    named = tokens >= 0
    first = named.copy()
    first[:, 1:] &= tokens[:, 1:] != tokens[:, :-1]
    return named.sum(axis=1), first.sum(axis=1)


@kernel
def plan_lists(index, order, held, newest, first, ids, source, slots, missing):  # type: ignore[no-untyped-def]
    """What `kvbench.memory.plan.plan_stage` plans, of lists [L, M], held [L, V] and newest [L].

    Args:
        order: [L, M], where the ids of each list are, rising.
        first: of the rows of missing tokens, `first`, `first` + 1, ...
        ids, source, slots: [L, U], [L, U] and [L, M]; written where there is something.
        missing: [2, L * M], written: list and id of each.

    Returns:
        missing tokens, ids of the longest list, whether all are there, and how many are held.
    """
    lists, count = index.shape
    moving, longest, complete, found = 0, 0, True, 0
    for head in range(lists):
        used, at, last = 0, 0, -1
        for rank in range(count):
            column = order[head, rank]
            token = index[head, column]
            if token < 0:
                complete = False
                continue
            if token != last:
                last = token
                while at < held.shape[1] and held[head, at] < token:
                    at += 1
                if at < held.shape[1] and held[head, at] == token:
                    source[head, used] = head * held.shape[1] + at
                    found += 1
                elif token == newest[head]:
                    source[head, used] = held.size + head
                else:
                    source[head, used] = first + moving
                    missing[0, moving], missing[1, moving] = head, token
                    moving += 1
                ids[head, used] = token
                used += 1
            slots[head, column] = used - 1
        longest = max(longest, used)
    return moving, longest, complete, found
