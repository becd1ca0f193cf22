"""How tests read a DCI tree, whole, from its arrays."""

from __future__ import annotations

import numpy as np

from methods.icecache.index import DCITree
from methods.icecache.kernels import FREE, NODES, NONE, PAGES, POINTS, ROOT, TOP

D = 8
# Products of float32 vectors of length about sqrt(D) are off by some units in their last place.
CLOSE = 1e-4


def bfloat16(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys cut to bfloat16: their bits as uint16, and as float32."""
    bits = (keys.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def own_node(tree: DCITree) -> np.ndarray:
    return tree.arrays.point["node"][: len(tree)]


def parents(tree: DCITree) -> np.ndarray:
    """[n] the node each row is a child of."""
    return tree.arrays.page["node"][tree.arrays.point["page"][: len(tree)]]


def levels(tree: DCITree) -> np.ndarray:
    node = own_node(tree)
    return np.where(node == NONE, 1, tree.arrays.node["level"][node])


def parent_tokens(tree: DCITree) -> dict[int, int]:
    """Token of the parent of every token, -1: the root."""
    token = tree.tokens(np.arange(tree.pages))
    row = tree.arrays.slots[: tree.pages]
    of_row = dict(zip(row[row != NONE].tolist(), token[row != NONE].tolist(), strict=True))
    point = tree.arrays.node["point"][parents(tree)]
    return {of_row[i]: of_row.get(int(point[i]), -1) for i in range(len(tree))}


def delta(keys: np.ndarray, others: np.ndarray, squared_c: float) -> np.ndarray:
    """delta(x, y) = c^2 - x.y - sqrt((c^2 - |x|^2)(c^2 - |y|^2)), the paper's section 3, in float64."""
    one, two = keys.astype(np.float64), others.astype(np.float64)
    height, other = (np.sqrt(np.maximum(squared_c - (part**2).sum(1), 0)) for part in (one, two))
    return squared_c - one @ two.T - np.outer(height, other)


def check_structure(tree: DCITree) -> None:
    """Each key in one slot, page and node; levels, chains, counts, sums and the free list agree."""
    arrays, count = tree.arrays, len(tree)
    points, nodes, pages, free, top = (int(arrays.state[at]) for at in (POINTS, NODES, PAGES, FREE, TOP))
    assert points == count
    page, node, point = arrays.page[:pages], arrays.node[:nodes], arrays.point[:count]
    seen_pages: set[int] = set()
    members: list[int] = []
    for number in range(nodes):
        children, at = [], int(node[number]["first"])
        while at != NONE:
            assert at not in seen_pages
            seen_pages.add(at)
            assert page[at]["node"] == number
            assert 1 <= page[at]["count"] <= arrays.slots.shape[1]
            held = arrays.slots[at][: page[at]["count"]]
            assert (arrays.slots[at][page[at]["count"] :] == NONE).all()
            assert (point["page"][held] == at).all()
            assert (point["slot"][held] == np.arange(len(held))).all()
            children += held.tolist()
            at = int(page[at]["next"])
        assert node[number]["children"] == len(children)
        rows = arrays.keys[children].astype(np.float64)
        np.testing.assert_allclose(arrays.node_sum[number], rows.sum(0), atol=CLOSE * (1 + np.abs(rows).sum()))
        members += children
    assert sorted(members) == list(range(count))
    freed = set()
    while free != NONE:
        assert page[free]["count"] == 0
        freed.add(free)
        free = int(page[free]["next"])
    assert freed | seen_pages == set(range(pages))
    assert not freed & seen_pages

    of_parent = node["level"][parents(tree)]
    assert (of_parent == levels(tree) + 1).all()
    assert node[ROOT]["level"] == top + 1
    assert top == levels(tree).max(initial=0)
    assert arrays.level_size.sum() == count
    assert (np.bincount(levels(tree), minlength=len(arrays.level_size)) == arrays.level_size).all()
    keys, above = arrays.keys[:count].astype(np.float64), node["point"][parents(tree)]
    affinity = np.where(above == NONE, 0, (keys * keys[above]).sum(1)) if count else np.zeros(0)
    np.testing.assert_allclose(point["affinity"], affinity, atol=CLOSE * (1 + arrays.largest[0]))
    promoted = node["point"][1:]
    assert (point["node"][promoted] == np.arange(1, nodes)).all()
    assert (point["node"] != NONE).sum() == nodes - 1
    assert (arrays.node_key[1:nodes] == arrays.keys[promoted]).all()


def check_parents(tree: DCITree) -> None:
    """Every parent minimises delta over the level above (Alg. 2), up to rounding."""
    keys, level, node = tree.arrays.keys, levels(tree), tree.arrays.node
    squared_c = float(tree.arrays.largest[0])
    for below in range(1, int(tree.arrays.state[TOP])):
        rows = np.flatnonzero(level == below)
        above = np.flatnonzero(level == below + 1)
        distance = delta(keys[rows], keys[above], squared_c)
        chosen = np.searchsorted(above, node["point"][parents(tree)[rows]])
        taken = distance[np.arange(len(rows)), chosen]
        assert (taken <= distance.min(axis=1) + CLOSE * (1 + squared_c)).all()
