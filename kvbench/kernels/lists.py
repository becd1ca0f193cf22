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
def plan_lists(index, staged, newest, ids):  # type: ignore[no-untyped-def]
    """What `kvbench.memory.stage.plan_stage` plans, of lists [B, Hs, M] and staged [L, V], L = B *
    Hkv.

    Parameters
    ----------
    newest
        [B], of each row the id of the token that is on the device anyway, or -1.
    ids
        [L, U], written where there is something.

    Returns
    -------
    value
        ids of the longest list, tokens that are neither staged nor the newest, whether there is one
        everywhere, and how many are staged.
    """
    words = _words(index)
    lists, heads = len(ids), len(ids) // len(index)
    lists_per_head = max(1, index.shape[1] // heads)
    moving = longest = hits = 0
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
                    hits += 1
                elif token != newest[row]:
                    moving += 1
                ids[at, used] = token
                used += 1
        longest = max(longest, used)
    return longest, moving, complete, hits
