"""Levels: which points become nodes, whose children points are, and what changes with a
new node.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import jit, kernel, widen
from methods.icecache.kernels.arrays import NODES, NONE, ROOT
from methods.icecache.kernels.pages import remove_child
from methods.icecache.kernels.products import affinities, height_of
from methods.icecache.kernels.ranking import children_of, mark_front, rank_nodes

CLOSE = np.float32(1e-4)  # of c^2: more than a product loses in rounding
BLOCK = 8  # points whose parents are searched together, so that a node's key is read once for all


@kernel
def assign_levels(level_size, top, draws, first, above, levels):  # type: ignore[no-untyped-def]
    """The levels of arriving points; level_size counts them.

    Parameters
    ----------
    draws
        [n] uniform numbers in [0, 1): a point climbs while they say so; or [0]: it climbs where the
        next level has room, so that its size stays the promoted share of the size below.
    first, above
        promoted shares of level 1 and of the levels above.

    A point rises at most one level above all before it, so that no level is empty.
    """
    for i in range(len(levels)):
        level, share = 1, first
        draw = draws[i] if draws.size else 0.0
        while level <= top and level < len(level_size) - 2:
            if draws.size:
                if draw >= share:
                    break
                draw /= share
            elif share * (level_size[level] + 1) < level_size[level + 1] + 1:
                break
            level, share = level + 1, above
        top = max(top, level)
        levels[i] = level
        level_size[level] += 1


@kernel
def assign_levels_in_turn(level_size, top, level, first, above, levels):  # type: ignore[no-untyped-def]
    """The levels of arriving points as the authors' code counts them; level_size counts them.

    A point goes to level 1, but the one after a point that leaves the level above its own with less
    than the promoted share of it goes there. So shares are rounded up, and a promotion is an
    arrival late.

    Parameters
    ----------
    level
        of the first arrival.

    Returns
    -------
    value
        the level of the next one.
    """
    for i in range(len(levels)):
        share = np.float32(first if level == 1 else above)
        top, levels[i] = max(top, level), level
        level_size[level] += 1
        if level == top:
            short = level_size[level] == np.ceil(np.float32(1) / share)
        else:
            short = np.float32(level_size[level]) >= np.float32(level_size[level + 1]) / share
        level = level + 1 if short and level < len(level_size) - 2 else 1
    return level


@kernel
def nearest_nodes(tree, rows, level, fov, exhaustive_below, work, parents):  # type: ignore[no-untyped-def]
    """Parents of points among the nodes of `level`: the largest <T_K(x), T_K(y)>, of equal ones the
    first.

    Writes the parents and every point's affinity x . y, from which any later c can be served.
    """
    queries = np.empty((BLOCK, tree.keys.shape[1]), np.float32)
    heights = np.empty(BLOCK, np.float32)
    for start in range(0, len(rows), BLOCK):
        size = min(BLOCK, len(rows) - start)
        for g in range(size):
            row = rows[start + g]
            heights[g] = height_of(tree, row)
            for k in range(tree.keys.shape[1]):
                queries[g, k] = widen(tree.keys[row, k])
        first = stop = 0
        below = exhaustive_below
        while first == stop:
            first, stop = rank_nodes(
                tree, queries[:size], heights[:size], level, False, fov, below, False, work
            )
            # where the best nodes above are new and have no children: all of the level
            below = tree.state[NODES]
        for g in range(size):
            highest = np.float32(-np.inf)
            for i in range(first, stop):
                highest = max(highest, work.node_score[g, i])
            index = first
            while work.node_score[g, index] != highest:
                index += 1
            parent = work.nodes[index]
            parents[start + g] = parent
            height = height_of(tree, tree.node[parent].point)
            tree.point[rows[start + g]].affinity = highest - heights[g] * height


@kernel
def add_nodes(tree, rows, level):  # type: ignore[no-untyped-def]
    """New nodes, without children, for promoted points."""
    for row in rows:
        node = tree.state[NODES]
        tree.state[NODES] += 1
        tree.point[row].node = node
        tree.node[node].point, tree.node[node].level = row, level
        tree.node[node].first, tree.node[node].children = NONE, 0
        for k in range(tree.keys.shape[1]):
            tree.node_key[node, k] = widen(tree.keys[row, k])
            tree.node_sum[node, k] = 0


@kernel
def take_over_root(tree, node, work):  # type: ignore[no-untyped-def]
    """Give a node above the old top level all old top points as children, in the pages
    they are in.
    """
    tree.node[node].first = tree.node[ROOT].first
    tree.node[node].children = tree.node[ROOT].children
    tree.node[ROOT].first, tree.node[ROOT].children = NONE, 0
    for k in range(tree.node_sum.shape[1]):
        tree.node_sum[node, k], tree.node_sum[ROOT, k] = tree.node_sum[ROOT, k], 0
    page = tree.node[node].first
    while page != NONE:
        tree.page[page].node = node
        page = tree.page[page].next
    count = children_of(tree, node, 0, work)
    affinities(tree, tree.node[node].point, work.rows, count, work)
    for i in range(count):
        tree.point[work.rows[i]].affinity = work.scratch[i]


@jit
def _undecided(tree, ranked, work):  # type: ignore[no-untyped-def]
    """work.rows: the children of marked nodes that may be nearer to a newcomer than to their
    parents; how many.

    A child is not, by the triangle inequality, if its distance to its parent is at most half of the
    newcomer's to that parent; |T_K(x) - T_K(y)|^2 = 2 c^2 - 2 <T_K(x), T_K(y)>.

    Parameters
    ----------
    ranked
        how many nodes are in work.nodes, and their products with the newcomer in
        work.node_score[0].
    """
    squared_c, count = tree.largest[0], 0
    # a child's product with its parent from which it stays
    decided = np.empty(tree.state[NODES], np.float32)
    for i in range(ranked):
        decided[work.nodes[i]] = (
            squared_c - (squared_c - work.node_score[0, i]) / 4 + CLOSE * squared_c
        )
    for node in range(tree.state[NODES]):
        if work.marked[node]:
            height = height_of(tree, tree.node[node].point)
            for at in range(count, children_of(tree, node, count, work)):
                row = work.rows[at]
                work.rows[count] = row
                count += tree.point[row].affinity + height_of(tree, row) * height < decided[node]
    return count


@kernel
def leave_for(tree, node, fov, exhaustive_below, work):  # type: ignore[no-untyped-def]
    """Take the points below a new node's level that are nearer to it than to their parents from
    those parents.

    Only the children of the nodes that a parent search would reach are asked, and of these the
    undecided.

    Returns
    -------
    value
        how many, in work.rows.
    """
    point, level = tree.node[node].point, tree.node[node].level
    query, height = tree.node_key[node : node + 1], np.empty(1, np.float32)
    height[0] = height_of(tree, point)
    _, ranked = rank_nodes(tree, query, height, level, False, fov, exhaustive_below, False, work)
    wide = tree.level_size[level] <= exhaustive_below
    mark_front(tree, ranked, 1, level, ranked if wide else fov, work)
    count = _undecided(tree, ranked, work)
    affinities(tree, point, work.rows, count, work)
    leaving = 0
    for i in range(count):
        row = work.rows[i]
        parent = tree.node[tree.page[tree.point[row].page].node].point
        if work.score[0, i] > tree.point[row].affinity + height_of(tree, row) * height_of(
            tree, parent
        ):
            tree.point[row].affinity = work.scratch[i]
            work.rows[leaving] = row
            leaving += 1
    for i in range(leaving):
        remove_child(tree, work.rows[i])
    return leaving
