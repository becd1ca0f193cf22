"""The best of what a search has listed: pages for each query, joined over a group, or rows.

Pages are found in two passes. The first reads every listed key's sketch, a quarter of its size,
which says what q.k can be at most. The second reads the few keys that this leaves, and ranks by
them alone, as if all had been read.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import best, jit, write_best
from methods.icecache.kernels.arrays import NONE
from methods.icecache.kernels.products import (
    products,
    quantised_queries,
    single_query_products,
    sketched_products,
)


@jit
def _best_member(scores, first, last, size):  # type: ignore[no-untyped-def]
    """The largest of scores[first : last + 1], `size` at most: four at a time, and no guess when
    they end.
    """
    a = b = c = d = scores[first]
    if first < last:
        for i in range(first, first + size, 4):
            a, b = max(a, scores[min(i, last)]), max(b, scores[min(i + 1, last)])
            c, d = max(c, scores[min(i + 2, last)]), max(d, scores[min(i + 3, last)])
    return max(max(a, b), max(c, d))


@jit
def _score_exactly(tree, query, bounds, doubt, runs, start, stop, scores, work):  # type: ignore[no-untyped-def]
    """scores[i] = the best member's query . key, of page runs[i], start <= i < stop.

    Only those members' keys are read that can be the best: whose bound reaches what another has at
    least.

    Parameters
    ----------
    query
        [1, D].
    bounds
        [points], what each listed member's score is at most, and at least so many steps less:
        `doubt`.
    """
    ends, count = np.empty(stop - start, np.int32), 0
    for i in range(start, stop):
        first, last = work.starts[runs[i]], work.starts[runs[i] + 1]
        least = np.float32(-np.inf)
        for at in range(first, last):
            least = max(least, bounds[at] - doubt * work.step[at])
        for at in range(first, last):
            work.members[count] = work.rows[at]
            count += bounds[at] >= least
        ends[i - start] = count
    single_query_products(tree.keys, work.members, count, query, work.exact)
    at = 0
    for i in range(start, stop):
        scores[i] = -np.inf
        while at < ends[i - start]:
            scores[i] = max(scores[i], work.exact[0, at])
            at += 1


@jit
def best_pages(tree, runs, queries, pages, scores, work):  # type: ignore[no-untyped-def]
    """Fill pages, scores [G, P] with the pages of the best members among those listed, best first,
    then -1 and -inf.

    The P pages of the largest bounds are scored by their keys; the worst of them is what any other
    has to reach.
    """
    most, count = pages.shape[1], work.starts[runs]
    sketched = quantised_queries(queries, tree.sketch.shape[1])
    sketched_products(tree, work.rows, count, sketched.numbers, work.score, work.step)
    chosen, order = np.empty(runs, np.int32), np.empty(runs, np.int32)
    exact = np.empty(runs, np.float32)
    for g in range(len(queries)):
        bounds, doubt = work.score[g], 2 * sketched.half[g]
        for i in range(count):
            bounds[i] = work.step[i] * (sketched.unit[g] * bounds[i] + sketched.half[g])
        for run in range(runs):
            first, last = work.starts[run], work.starts[run + 1] - 1
            work.scratch[run] = _best_member(bounds, first, last, tree.slots.shape[1])
        start, least = 0, np.float32(np.inf)
        chosen_count = best(work.scratch, runs, most, chosen)
        while start < chosen_count:
            _score_exactly(
                tree, queries[g : g + 1], bounds, doubt, chosen, start, chosen_count, exact, work
            )
            for i in range(start, chosen_count):
                least = min(least, exact[i])
                work.scratch[chosen[i]] = -np.inf
            start = chosen_count
            for run in range(runs if chosen_count == most else 0):
                if work.scratch[run] >= least and work.scratch[run] > -np.inf:
                    chosen[chosen_count] = run
                    chosen_count += 1
        write_best(exact, chosen_count, pages[g], scores[g], order)
        for i in range(most):
            if pages[g, i] != NONE:
                pages[g, i] = work.pages[chosen[pages[g, i]]]


@jit
def best_rows(tree, runs, queries, rows, scores, work):  # type: ignore[no-untyped-def]
    """Fill rows, scores [G, k] with the best keys among those listed, best first, then -1
    and -inf.
    """
    count = work.starts[runs]
    products(tree.keys, work.rows, 0, count, queries, work.score)
    for g in range(rows.shape[0]):
        write_best(work.score[g], count, rows[g], scores[g], work.picked)
        for i in range(rows.shape[1]):
            if rows[g, i] != NONE:
                rows[g, i] = work.rows[rows[g, i]]


@jit
def interleave(lists, most):  # type: ignore[no-untyped-def]
    """Join the ranked lists [G, P] of a query group, -1 = none: rank 0 of each query, rank 1, ...,
    without repeats.

    Returns
    -------
    value
        [most] int32, trailing -1 (truncated union: the group's budget is that of one KV head).
    """
    joined = np.empty(most, np.int32)
    highest = NONE
    for query in range(lists.shape[0]):
        for rank in range(lists.shape[1]):
            highest = max(highest, lists[query, rank])
    taken = np.zeros(highest + 1, np.uint8)
    count = 0
    for rank in range(lists.shape[1]):
        for query in range(lists.shape[0]):
            entry = lists[query, rank]
            if count < most and entry != NONE and not taken[entry]:
                taken[entry] = 1
                joined[count] = entry
                count += 1
    joined[count:] = NONE
    return joined
