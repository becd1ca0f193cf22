"""Bookkeeping over lists of token ids: how many are named, and what must come up from the host."""

from __future__ import annotations

import numpy as np

from kvbench.kernels.compiled import kernel

compiled = kernel()


@compiled
def count_lists(lists):  # type: ignore[no-untyped-def]
    """Of each of lists [L, M] how many ids >= 0 it has, [L], and how many distinct ones, [L]."""
    named, distinct = np.zeros(len(lists), np.int64), np.zeros(len(lists), np.int64)
    for place in range(len(lists)):
        last = -1
        for token in np.sort(lists[place]):
            if token >= 0:
                named[place] += 1
                distinct[place] += token != last
                last = token
    return named, distinct


@compiled
def plan_lists(index, held, newest, first, width, nothing):  # type: ignore[no-untyped-def]
    """What `kvbench.memory.plan.plan_stage` plans, of lists [L, M], held [L, V] and newest [L].

    Missing tokens are rows `first`, `first` + 1, ...; `nothing` stands after the last id of a list.
    """
    lists, count = index.shape
    ids = np.full((lists, width), nothing)
    source, slots = np.zeros((lists, width), np.int64), np.full((lists, count), -1)
    missing = np.empty((2, lists * count), np.int64)
    moving, longest, complete, found = 0, 0, True, 0
    for head in range(lists):
        used, at, last = 0, 0, -1
        for column in np.argsort(index[head]):
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
    return ids, source, slots, missing[:, :moving].copy(), longest, complete, found
