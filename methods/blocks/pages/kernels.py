"""Quest's choice on a CPU, in Numba: bounds, ranks and tokens of some KV heads in one call.

In torch a step is thirty small operations for every row, and takes two products, a sum and a sort
where one pass over the bounds will do.
"""

from __future__ import annotations

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, prefetch, widen, write_best

AHEAD = 16  # pages whose bounds are on their way while one is scored


@kernel
def take_in(low, high, last, keys):  # type: ignore[no-untyped-def]
    """Widen the bounds of page last[row] of every row and head by a key.

    Parameters
    ----------
    low, high
        [B, Hkv, P, D] as stored; written.
    last
        [B].
    keys
        [B, Hkv, D] as stored.
    """
    for row in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            least, most = low[row, head, last[row]], high[row, head, last[row]]
            for k in range(keys.shape[2]):
                stored = keys[row, head, k]
                number = widen(stored)
                missing = number != number  # a key that is no number makes bounds that are none
                if number < widen(least[k]) or missing:
                    least[k] = stored
                if number > widen(most[k]) or missing:
                    most[k] = stored


@jit
def _upper_bounds(low, high, falling, rising, scores):  # type: ignore[no-untyped-def]
    """Largest product of each query with any key inside the bounds of each page: scores [Q, P], of
    low, high [P, D].

    falling, rising: [Q, D], the queries' negative and positive elements, as max(q l, q h) is q h
    where q > 0.
    """
    line = 64 // low.itemsize
    for page in range(scores.shape[1]):
        for k in range(0, low.shape[1], line):
            prefetch(low, page + AHEAD, k)
            prefetch(high, page + AHEAD, k)
        for asks in range(scores.shape[0]):
            total = np.float32(0)
            for k in range(low.shape[1]):
                total += rising[asks, k] * widen(high[page, k]) + falling[asks, k] * widen(
                    low[page, k]
                )
            # what is no number shall be attended, and seen
            scores[asks, page] = total if total == total else np.inf


@jit
def _halves(queries, falling, rising):  # type: ignore[no-untyped-def]
    """Add the negative and positive elements of queries [G, D] to [Q, D] each, Q = G or, for their
    mean, 1.
    """
    lists = len(falling)
    for g in range(len(queries)):
        for k in range(queries.shape[1]):
            element = widen(queries[g, k]) / np.float32(len(queries) // lists)
            falling[g % lists, k] += min(element, np.float32(0))
            rising[g % lists, k] += max(element, np.float32(0))


@kernel
def mean_bounds(threads, queries, low, high, scores):  # type: ignore[no-untyped-def]
    """Mean upper bound of the group, of each page of all KV heads, in so many threads.

    Parameters
    ----------
    queries
        [B, Hkv, G, D] as stored.
    low, high
        [B, Hkv, P, D] as stored.
    scores
        [B * Hkv, P] float32; written.
    """
    in_threads(threads, _mean_bounds, (np.zeros(1, np.int64), queries, low, high, scores))


@jit
def _mean_bounds(_, claims, queries, low, high, scores):  # type: ignore[no-untyped-def]
    kv_heads, head_dim = queries.shape[1], queries.shape[3]
    at = claim(claims)
    while at < len(scores):
        row, head = at // kv_heads, at % kv_heads
        falling, rising = np.zeros((1, head_dim), np.float32), np.zeros((1, head_dim), np.float32)
        _halves(queries[row, head], falling, rising)
        _upper_bounds(low[row, head], high[row, head], falling, rising, scores[at : at + 1])
        at = claim(claims)


@jit
def _joined(ranked, pages, joined):  # type: ignore[no-untyped-def]
    """Join ranked lists [Q, n] by rank, without repeats, after the last of `pages` pages;
    then -1.
    """
    taken = np.zeros(pages, np.bool_)
    joined[0], taken[pages - 1] = pages - 1, True
    count = 1
    for rank in range(ranked.shape[1]):
        for asks in range(ranked.shape[0]):
            page = ranked[asks, rank]
            if page >= 0 and not taken[page]:
                joined[count], taken[page] = page, True
                count += 1
    joined[count:] = -1


@jit
def _tokens(ranked, starts, room, tokens):  # type: ignore[no-untyped-def]
    """Write the tokens of ranked pages, as far as whole pages fit into `room`, then -1;
    how many.
    """
    count = 0
    for page in ranked:
        if page < 0 or count + starts[page + 1] - starts[page] > room:
            break
        for token in range(starts[page], starts[page + 1]):
            tokens[count] = token
            count += 1
    tokens[count:] = -1
    return count


@kernel
def best_tokens(threads, queries, low, high, starts, rows, mean, join, ids, longest):  # type: ignore[no-untyped-def]
    """The tokens of the best pages of all KV heads, in so many threads.

    Parameters
    ----------
    queries
        [B, Hkv, G, D] as stored.
    low, high
        [B, Hkv, P or more, D] as stored.
    starts
        [B, P + 1], where each page begins and the last one ends.
    rows
        [B, 3], of each row: pages, those that are ranked, tokens that fit.
    mean
        pages are ranked by the mean bound of the group.
    join
        the lists of the group are joined by rank, after the last page.
    ids
        [B * Hkv, lists, most] int64; written, trailing -1.
    longest
        [B * Hkv] int64; written, tokens of the longest list of each.
    """
    arguments = np.zeros(1, np.int64), queries, low, high, starts, rows, mean, join, ids, longest
    in_threads(threads, _best_tokens, arguments)


@jit
def _best_tokens(_, claims, queries, low, high, starts, rows, mean, join, ids, longest):  # type: ignore[no-untyped-def]
    kv_heads, head_dim = queries.shape[1], queries.shape[3]
    lists = 1 if mean else queries.shape[2]
    at = claim(claims)
    while at < len(ids):
        row, head = at // kv_heads, at % kv_heads
        pages, room = rows[row, 0], rows[row, 2]
        falling = np.zeros((lists, head_dim), np.float32)
        rising = np.zeros((lists, head_dim), np.float32)
        _halves(queries[row, head], falling, rising)
        scores = np.empty((lists, pages), np.float32)
        _upper_bounds(low[row, head], high[row, head], falling, rising, scores)
        most = min(rows[row, 1], pages)
        values, picked = np.empty(most, np.float32), np.empty(most, np.int32)
        ranked = np.empty((lists, most), np.int32)
        for asks in range(lists):
            write_best(scores[asks], pages, ranked[asks], values, picked)
        if join:
            joined = np.empty((1, lists * most + 1), np.int32)
            _joined(ranked, pages, joined[0])
            ranked = joined
        most = 0
        for list_index in range(len(ranked)):
            most = max(most, _tokens(ranked[list_index], starts[row], room, ids[at, list_index]))
        longest[at] = most
        at = claim(claims)
