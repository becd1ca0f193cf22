"""A search: rank nodes from the top level down, and list the children of the best, page by page."""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import best, jit, prefetch
from methods.icecache.kernels.arrays import NODES, NONE, ROOT, TOP
from methods.icecache.kernels.products import height_of, products

EVERY_LEVEL = 0
PAGES_AHEAD = 8  # a node's pages mostly follow one another


@jit
def _score_nodes(tree, queries, heights, by_centroid, start, stop, work):  # type: ignore[no-untyped-def]
    """Score work.nodes[start:stop] by own key or by the mean of the children; a childless node has
    no mean.
    """
    group = queries.shape[0]
    keys = tree.node_sum if by_centroid else tree.node_key
    products(keys, work.nodes, start, stop, queries, work.node_score)
    if by_centroid:
        for i in range(start, stop):
            children = tree.node[work.nodes[i]].children
            work.scratch[i] = np.float32(1) / children if children else np.float32(0)
        for g in range(group):
            for i in range(start, stop):
                work.node_score[g, i] *= work.scratch[i]
    elif heights.size:
        for i in range(start, stop):
            work.scratch[i] = height_of(tree, tree.node[work.nodes[i]].point)
        for g in range(group):
            for i in range(start, stop):
                work.node_score[g, i] += heights[g] * work.scratch[i]


@jit
def mark_front(tree, count, group, level, fov, work):  # type: ignore[no-untyped-def]
    """Mark, for each query, the best `fov` of the nodes of `level` that were scored and have
    children.
    """
    work.marked[: tree.state[NODES]] = 0
    barred = np.zeros(count, np.float32)
    for i in range(count):
        node = tree.node[work.nodes[i]]
        if node.children == 0 or (level != EVERY_LEVEL and node.level != level):
            barred[i] = -np.inf
    for g in range(group):
        for i in range(count):
            work.scratch[i] = work.node_score[g, i] + barred[i]
        for i in range(best(work.scratch, count, fov, work.picked)):
            work.marked[work.nodes[work.picked[i]]] = 1


@jit
def children_of_marked(tree, work):  # type: ignore[no-untyped-def]
    """work.rows: the children of all marked nodes, page by page; how many."""
    count = 0
    for node in range(tree.state[NODES]):
        if work.marked[node]:
            count = children_of(tree, node, count, work)
    return count


@jit
def children_of(tree, node, count, work):  # type: ignore[no-untyped-def]
    """Write a node's children, page by page, to work.rows from `count` on; the new count."""
    page = tree.node[node].first
    while page != NONE:
        count = _members(tree, page, count, work)
        page = tree.page[page].next
    return count


@jit
def _members(tree, page, count, work):  # type: ignore[no-untyped-def]
    """Write a page's members to work.rows from `count` on, all slots at once; the new count."""
    prefetch(tree.slots, page + PAGES_AHEAD, 0)
    for slot in range(tree.slots.shape[1]):
        work.rows[count + slot] = tree.slots[page, slot]
    return count + tree.page[page].count


@jit
def rank_nodes(tree, queries, heights, lowest, upper, fov, exhaustive_below, by_centroid, work):  # type: ignore[no-untyped-def]
    """Score nodes of level `lowest` and more: all of them from the top down to the first level that
    has more than `exhaustive_below`, and below that the children of the best `fov` nodes of the
    level above.

    Parameters
    ----------
    queries
        [G, D].
    heights
        [G], their last coordinates, for a parent search (by T_K), or [0].
    upper
        levels above `lowest` are wanted for themselves, not only as a way down.

    Returns
    -------
    value
        first, count: work.nodes[:count] were scored, those of level `lowest` and no others from
        `first` on (unless `upper`). With `upper`, work.opened marks the nodes whose children they
        are.
    """
    group, top = queries.shape[0], tree.state[TOP]
    level = top + 1
    while level > lowest and tree.level_size[level - 1] <= exhaustive_below:
        level -= 1
    count = 0
    for node in range(tree.state[NODES]):
        node_level = tree.node[node].level
        work.opened[node] = node_level > level
        if node != ROOT and (node_level == level or (upper and node_level > level)):
            work.nodes[count] = node
            count += 1
    first = 0
    _score_nodes(tree, queries, heights, by_centroid, 0, count, work)
    while level > lowest:
        if level > top:
            work.marked[: tree.state[NODES]] = 0
            work.marked[ROOT] = 1
        else:
            mark_front(tree, count, group, level, fov, work)
        for node in range(tree.state[NODES]):
            work.opened[node] |= work.marked[node]
        level -= 1
        first = count
        for i in range(children_of_marked(tree, work)):
            work.nodes[count] = tree.point[work.rows[i]].node
            count += 1
        _score_nodes(tree, queries, heights, by_centroid, first, count, work)
    return first, count


@jit
def _list(tree, node, runs, work):  # type: ignore[no-untyped-def]
    """List a node's pages, and their members, after the first `runs`; the new count of pages."""
    page = tree.node[node].first
    while page != NONE:
        work.pages[runs] = page
        work.starts[runs + 1] = _members(tree, page, work.starts[runs], work)
        page, runs = tree.page[page].next, runs + 1
    return runs


@jit
def search(tree, queries, fov, exhaustive_below, by_centroid, work):  # type: ignore[no-untyped-def]
    """Score nodes, then list the children of the best of them; every child of a marked node meets
    all queries.

    By point, the nodes' own keys are results too, and the nodes of level 2 are what is chosen from.
    By centroid, nodes of all levels compete, and an upper key is a result only as somebody's child.

    Returns
    -------
    value
        ranked, runs: nodes scored; pages listed, in work.pages, work.starts and work.rows.
    """
    _, ranked = rank_nodes(
        tree, queries, np.empty(0, np.float32), 2, True, fov, exhaustive_below, by_centroid, work
    )
    mark_front(tree, ranked, queries.shape[0], EVERY_LEVEL if by_centroid else 2, fov, work)
    if by_centroid or tree.state[TOP] < 2:
        work.marked[ROOT] = 1
    runs = work.starts[0] = 0
    for node in range(tree.state[NODES]):
        if work.marked[node] or (work.opened[node] and not by_centroid):
            runs = _list(tree, node, runs, work)
    return ranked, runs


@jit
def scan(tree, work):  # type: ignore[no-untyped-def]
    """List every page; how many."""
    runs = work.starts[0] = 0
    for node in range(tree.state[NODES]):
        runs = _list(tree, node, runs, work)
    return runs
