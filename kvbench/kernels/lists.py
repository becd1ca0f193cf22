"""Bookkeeping over lists of token ids: how many are named, and what must come up from the host.

A list is not sorted: its ids are bits, and bits are in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvbench.kernels.vectors import inner, kernel

WORD = 6  # a word has 2**6 bits


@intrinsic
def _lowest(_context, word):  # type: ignore[no-untyped-def]
    """Which is the lowest bit of a word that is not 0."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.int64), generate


@inner
def _words(lists):  # type: ignore[no-untyped-def]
    """Words, all 0, with a bit for each id of lists [B, Hs, M]."""
    largest = 0
    for row in range(lists.shape[0]):
        for head in range(lists.shape[1]):
            for token in lists[row, head]:
                largest = max(largest, token)
    return np.zeros((largest >> WORD) + 1, np.int64)


@inner
def _mark(words, tokens):  # type: ignore[no-untyped-def]
    """Set the bits of ids; returns how many ids >= 0 there are, and how many bits were set."""
    named, new = 0, 0
    for token in tokens:
        if token >= 0:
            bit = 1 << (token & 63)
            named += 1
            new += words[token >> WORD] & bit == 0
            words[token >> WORD] |= bit
    return named, new


def count_lists(lists: NDArray[np.int64], kv_heads: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """How many ids >= 0 the lists [B, Hs, M] of each KV head name, [B, Hkv], and how many distinct
    ones, [B, Hkv].

    Hs is 1, Hkv or Hq.
    """
    named, distinct = np.empty((2, len(lists), kv_heads), np.int64)
    _count_lists(lists, named, distinct)
    return named, distinct


@kernel
def _count_lists(lists, named, distinct):  # type: ignore[no-untyped-def]
    words, heads = _words(lists), lists.shape[1]
    lists_per_head = max(1, heads // named.shape[1])
    for row in range(len(lists)):
        for head in range(min(heads, named.shape[1])):
            head_lists = lists[row, head * lists_per_head : head * lists_per_head + lists_per_head]
            named[row, head] = distinct[row, head] = 0
            for tokens in head_lists:
                all_of, new = _mark(words, tokens)
                named[row, head] += all_of
                distinct[row, head] += new
            for tokens in head_lists:
                for token in tokens:
                    words[max(token, 0) >> WORD] = 0
        for head in range(heads, named.shape[1]):
            named[row, head], distinct[row, head] = named[row, 0], distinct[row, 0]


@kernel
def plan_lists(index, staged, newest, ids, source, slots, missing):  # type: ignore[no-untyped-def]
    """What `kvbench.memory.stage.plan_stage` plans, of lists [B, Hs, M] and staged [L, V], L = B *
    Hkv.

    Parameters
    ----------
    newest
        [B], of each row the id of the token that is on the device anyway, or -1.
    ids
        [L, U], written where there is something.
    source, slots, missing
        [L, U], [L, Hs / Hkv * M] and [2, L * M], likewise, list and id of each missing one; or [0,
        0] each, if nobody asks.

    Returns
    -------
    value
        missing tokens, ids of the longest list, whether all are there, how many are held, and how
        many there are.
    """
    words = _words(index)
    lists, heads = len(ids), len(ids) // len(index)
    lists_per_head = max(1, index.shape[1] // heads)
    first = staged.size + lists * (newest[0] >= 0)
    moving = longest = hits = total = 0
    complete = True
    for at in range(lists):
        row, head = at // heads, min(at % heads * lists_per_head, index.shape[1] - 1)
        for tokens in index[row, head : head + lists_per_head]:
            named, _ = _mark(words, tokens)
            complete &= named == len(tokens)
        used, place = 0, 0
        for place_of_word in range(len(words)):
            word = words[place_of_word]
            words[place_of_word] = 0
            while word:
                token = (place_of_word << WORD) + _lowest(word)
                word &= word - 1
                while place < staged.shape[1] and staged[at, place] < token:
                    place += 1
                if place < staged.shape[1] and staged[at, place] == token:
                    origin = at * staged.shape[1] + place
                    hits += 1
                elif token == newest[row]:
                    origin = staged.size + at
                else:
                    origin = first + moving
                    if len(missing):
                        missing[0, moving], missing[1, moving] = at, token
                    moving += 1
                if len(source):
                    source[at, used] = origin
                ids[at, used] = token
                used += 1
        if len(slots):
            _look_up(index[row, head : head + lists_per_head], ids[at, :used], slots[at])
        longest, total = max(longest, used), total + used
    return moving, longest, complete, hits, total


@inner
def _look_up(lists, ids, slots):  # type: ignore[no-untyped-def]
    """slots [n * M], where each id of lists [n, M] is in the ascending ids; what is below 0 is
    left.
    """
    for which in range(len(lists)):
        for column in range(lists.shape[1]):
            token = lists[which, column]
            if token >= 0:
                slots[which * lists.shape[1] + column] = place(ids, token)


@inner
def place(ids, token):  # type: ignore[no-untyped-def]
    """np.searchsorted(ids, token), which takes longer to compile."""
    first, end = 0, len(ids)
    while first < end:
        middle = (first + end) // 2
        if ids[middle] < token:
            first = middle + 1
        else:
            end = middle
    return first
