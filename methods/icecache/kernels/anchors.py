"""Parents as the authors' code finds them in long prompts: most points choose among those of
anchors near them.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import jit, kernel, widen
from methods.icecache.kernels.arrays import NODES, NONE
from methods.icecache.kernels.levels import nearest_nodes
from methods.icecache.kernels.products import height_of, single_query_products

# nodes above which points are searched for only after all others, too late for those to count them
BATCHED = 1000


@jit
def _distance(tree, row, node):  # type: ignore[no-untyped-def]
    """delta(x, y) = c^2 - x . y - sqrt((c^2 - |x|^2) (c^2 - |y|^2)) of a point and its parent."""
    return (
        tree.largest[0]
        - tree.point[row].affinity
        - height_of(tree, row) * height_of(tree, tree.node[node].point)
    )


@jit
def _parents_near(anchor, reach, anchor_parents, listed, nodes):  # type: ignore[no-untyped-def]
    """List the parents of `reach` anchors up to `anchor`, and of as many after it, each once; how
    many.
    """
    count = 0
    for step in range(2 * reach):
        other = anchor - step if step < reach else anchor + 1 + step - reach
        if 0 <= other < len(anchor_parents) and listed[anchor_parents[other]] != anchor:
            nodes[count] = anchor_parents[other]
            listed[nodes[count]] = anchor
            count += 1
    return count


@kernel
def anchored_nodes(tree, rows, level, anchors, fov, exhaustive_below, work, parents):  # type: ignore[no-untyped-def]
    """Parents of points among the nodes of `level`, in the order of arrival, as `nearest_nodes`
    writes them.

    Every `interval`-th point and the last are anchors, whose parents are searched. Another point
    takes the nearest among the parents of the `reach` anchors on either side of it, if no farther
    than `threshold` times that parent's farthest child so far; else its parent is searched, too.

    Parameters
    ----------
    anchors
        interval, reach, threshold.
    """
    (interval, reach, threshold), late = anchors, tree.level_size[level] > BATCHED
    count = 1 - (1 - len(rows)) // interval
    positions, anchor_rows = np.empty(count, np.int64), np.empty(count, np.int32)
    for anchor in range(count):
        positions[anchor] = min(anchor * interval, len(rows) - 1)
        anchor_rows[anchor] = rows[positions[anchor]]
    anchor_parents = np.empty(count, np.int32)
    nearest_nodes(tree, anchor_rows, level, fov, exhaustive_below, work, anchor_parents)
    farthest, listed = np.zeros(tree.state[NODES], np.float32), np.full(tree.state[NODES], NONE)
    for anchor in range(len(positions)):
        parent = anchor_parents[anchor]
        parents[positions[anchor]] = parent
        farthest[parent] = max(farthest[parent], _distance(tree, rows[positions[anchor]], parent))

    nodes, product = np.empty(2 * reach + 3, np.int32), np.empty((1, 2 * reach + 3), np.float32)
    query = np.empty((1, tree.keys.shape[1]), np.float32)
    for anchor in range(len(positions) - 1):
        count = _parents_near(anchor, reach, anchor_parents, listed, nodes)
        for i in range(positions[anchor] + 1, positions[anchor + 1]):
            row = rows[i]
            for k in range(tree.keys.shape[1]):
                query[0, k] = widen(tree.keys[row, k])
            single_query_products(tree.node_key, nodes, count, query, product)
            smallest = np.float32(np.inf)
            for k in range(count):
                tree.point[row].affinity = product[0, k]
                distance = _distance(tree, row, nodes[k])
                if distance < smallest:
                    smallest, nearest = distance, k
            tree.point[row].affinity, parents[i] = product[0, nearest], nodes[nearest]
            if np.float32(threshold) * farthest[parents[i]] < smallest:
                nearest_nodes(
                    tree, rows[i : i + 1], level, fov, exhaustive_below, work, parents[i : i + 1]
                )
                smallest = np.float32(0) if late else _distance(tree, row, parents[i])
            farthest[parents[i]] = max(farthest[parents[i]], smallest)
