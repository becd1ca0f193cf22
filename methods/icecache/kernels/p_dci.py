"""P-DCI (Li & Malik 2017, algorithm 2) down a DCI tree, as the authors' code does it: each query of
a group alone.

A beam goes from the root to level 1. Of a node, the children nearest to the query in projection are
visited, in batches, and no more of them than are wanted come away: on the way the beam's width, at
level 1 as many as pages.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import best, jit, sort, write_best
from methods.icecache.kernels.arrays import NONE, PAGES, ROOT, TOP
from methods.icecache.kernels.products import height_of, single_query_products
from methods.icecache.kernels.ranking import children_of

BATCH = 128  # entries of a sorted projection that are visited before any test whether to stop


@jit
def _next_batch(values, target, bounds, after):  # type: ignore[no-untyped-def]
    """The next batch of a sorted list: from the side nearer to the target, then the other.

    Parameters
    ----------
    bounds
        [2], between which it was visited.
    after
        [2], written: between which it is visited then.

    Returns
    -------
    value
        how far from the target the last visited is: infinitely, if none was left.
    """
    low, high = bounds[0], bounds[1]
    upwards = low < 0 or (high < len(values) and values[high] - target < target - values[low])
    room, gap = BATCH, np.float32(np.inf)
    for _ in range(2):
        taken = min(room, len(values) - high if upwards else low + 1)
        if taken and upwards:
            high += taken
            gap = abs(values[high - 1] - target)
        elif taken:
            low -= taken
            gap = abs(values[low + 1] - target)
        room, upwards = room - taken, not upwards
    after[0], after[1] = low, high
    return gap


@jit
def _project(tree, query, directions):  # type: ignore[no-untyped-def]
    """[J] <q, u_j> / |q|; the published code does not scale it by c, as it does keys."""
    target, squared = np.zeros(directions, np.float32), np.float32(0)
    for k in range(query.shape[1]):
        squared += query[0, k] * query[0, k]
    for j in range(directions):
        for k in range(query.shape[1]):
            target[j] += query[0, k] * tree.direction[j, k]
        target[j] = target[j] / np.sqrt(squared) if squared else np.float32(0)
    return target


@jit
def _sort_children(tree, j, count, values, order, work):  # type: ignore[no-untyped-def]
    """Projections on u_j of a node's children work.rows[:count], ascending, and whose they are."""
    last = tree.direction.shape[1] - 1
    for i in range(count):
        row = work.rows[i]
        values[i] = tree.projection[row, j] + height_of(tree, row) * tree.direction[j, last]
        order[i] = i
    sort(values, order, count)


@jit
def _visit(tree, count, target, composites, least, share, work):  # type: ignore[no-untyped-def]
    """Keep, of a node's children work.rows[:count], the candidates: those met in all simple indices
    of a composite.

    In turn, each composite's simple index whose batch ends nearest to the query visits it, until
    there are `least` candidates, and `share` of the children or as many visits as a composite has
    entries.

    Returns
    -------
    value
        how many.
    """
    if count <= BATCH:
        return count
    indices, simple = len(target), len(target) // composites
    values, order = np.empty((indices, count), np.float32), np.empty((indices, count), np.int32)
    bounds, after = np.empty((indices, 2), np.int64), np.empty((indices, 2), np.int64)
    gap = np.empty(indices, np.float32)
    for j in range(indices):
        _sort_children(tree, j, count, values[j], order[j], work)
        high = 0
        while high < count and values[j, high] < target[j]:
            high += 1
        bounds[j, 0], bounds[j, 1] = high - 1, high
        gap[j] = _next_batch(values[j], target[j], bounds[j], after[j])
    enough = np.ceil(np.float32(share) * np.float32(count))
    met, is_candidate = np.zeros((composites, count), np.int32), np.zeros(count, np.uint8)
    visits = candidates = 0
    while candidates < least or (candidates < enough and visits < simple * count):
        for composite in range(composites):
            j = composite * simple + np.argmin(gap[composite * simple : (composite + 1) * simple])
            for at in range(after[j, 0] + 1, after[j, 1]):
                if not bounds[j, 0] < at < bounds[j, 1]:
                    i = order[j, at]
                    met[composite, i] += 1
                    visits += 1
                    if met[composite, i] == simple and not is_candidate[i]:
                        is_candidate[i] = 1
                        candidates += 1
            bounds[j, 0], bounds[j, 1] = after[j, 0], after[j, 1]
            gap[j] = _next_batch(values[j], target[j], bounds[j], after[j])
    filled = 0
    for i in range(count):
        work.rows[filled] = work.rows[i]
        filled += is_candidate[i]
    return filled


@jit
def _descend(tree, query, fov, width, p_dci, scores, work):  # type: ignore[no-untyped-def]
    """Offer the beam of each upper level, and of level 1 the best `width` children of every node in
    the beam above.

    Parameters
    ----------
    query
        [1, D].
    p_dci
        composites, simple indices of each, share of a node's children that is enough.
    scores
        [points], of those offered.

    Returns
    -------
    value
        offered, visited: how many points, the former in work.members.
    """
    target = _project(tree, query, p_dci[0] * p_dci[1])
    work.nodes[0] = ROOT
    offered = visited = 0
    beam = 1
    for level in range(tree.state[TOP], 0, -1):
        most, first = width if level == 1 else fov, offered
        for at in range(beam):
            count = children_of(tree, work.nodes[at], 0, work)
            if count > most:
                count = _visit(tree, count, target, p_dci[0], most, p_dci[2], work)
            single_query_products(tree.keys, work.rows, count, query, work.exact)
            visited += count
            for i in range(best(work.exact[0], count, most, work.picked)):
                work.members[offered] = work.rows[work.picked[i]]
                scores[offered] = work.exact[0, work.picked[i]]
                offered += 1
        if level > 1:
            beam = best(scores[first:offered], offered - first, fov, work.picked)
            for at in range(beam):
                chosen = first + work.picked[at]
                work.members[first + at], scores[first + at] = work.members[chosen], scores[chosen]
                work.nodes[at] = tree.point[work.members[first + at]].node
            offered = first + beam
    return offered, visited


@jit
def p_dci_pages(tree, queries, fov, p_dci, pages, scores, work):  # type: ignore[no-untyped-def]
    """As `best_pages`, of the points that each query's own descent offers; how many keys were
    scored for all.
    """
    visited = 0
    for g in range(len(queries)):
        offered, more = _descend(
            tree, queries[g : g + 1], fov, pages.shape[1], p_dci, work.score[g], work
        )
        visited += more
        work.scratch[: tree.state[PAGES]] = -np.inf
        for i in range(offered):
            page = tree.point[work.members[i]].page
            work.scratch[page] = max(work.scratch[page], work.score[g, i])
        write_best(work.scratch, tree.state[PAGES], pages[g], scores[g], work.picked)
    return visited


@jit
def p_dci_rows(tree, queries, fov, p_dci, rows, scores, work):  # type: ignore[no-untyped-def]
    """As `best_rows`, of the points that each query's own descent offers; how many keys were scored
    for all.
    """
    visited = 0
    for g in range(len(queries)):
        offered, more = _descend(
            tree, queries[g : g + 1], fov, rows.shape[1], p_dci, work.score[g], work
        )
        visited += more
        write_best(work.score[g], offered, rows[g], scores[g], work.picked)
        for i in range(rows.shape[1]):
            if rows[g, i] != NONE:
                rows[g, i] = work.members[rows[g, i]]
    return visited
