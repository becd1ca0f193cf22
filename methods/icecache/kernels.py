"""Numba kernels of the DCI tree: scoring, the beam, pages, build and insert. `index.py` calls them, nobody else.

They hold no state of their own and release the GIL: any number of threads may build, or ask, different trees at once,
and different workspaces may ask the same tree. Nothing here allocates what it can take from a `Workspace`.

Words: a point is a row of the key memory. A node is the parent of points: node 0 is the root, every other node is
itself a point of level 2 or more. A node's children lie in its chain of pages. The height of a key is
sqrt(c^2 - |k|^2), the last coordinate of c T_K(k), where c is the largest norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from methods.blocks.kernels import best, jit, kernel, sort, widen, write_best

Array = np.ndarray[Any, Any]

POINT = np.dtype([("page", "i4"), ("slot", "i4"), ("node", "i4"), ("norm2", "f4"), ("affinity", "f4")], align=True)
PAGE = np.dtype([("node", "i4"), ("count", "i4"), ("next", "i4"), ("dirty", "i4")], align=True)
NODE = np.dtype([("point", "i4"), ("level", "i4"), ("first", "i4"), ("children", "i4")], align=True)

POINTS, NODES, PAGES, FREE, TOP = range(5)  # places in Tree.state
NONE, ROOT = -1, 0
EVERY_LEVEL = 0
BLOCK = 8  # points whose parents are searched together, so that a node's key is read once for all
LARGER = np.float32(1 + 1e-4)  # by so much more is a squared norm larger than another, and not by rounding


class Tree(NamedTuple):
    """The arrays of one tree; capacities are those of the arrays, what is used stands in `state`.

    Attributes:
        keys: [rows, D] float32, or uint16: the bits of bfloat16. The store's own memory.
        point: [rows] `POINT`: page and slot, own node (`NONE` at level 1), |k|^2, k . parent (0 below the root).
        page: [pages] `PAGE`: its node, members, next page of the node or of the free list, members changed.
        slots: [pages, page size] int32 points, `NONE` behind the last member.
        node: [nodes] `NODE`: own point, level (the root's is top + 1), first page, children.
        node_key, node_sum: [nodes, D] float32, own key and the sum of the children's.
        projection: [rows, J] float32, <k, u_j> without the height's share, which changes with c.
        direction: [J, D + 1] float32 unit vectors u_j.
        level_size: [levels] int64, points of each level.
        state: [5] int64: points, nodes, pages ever used, first free page, top level.
        largest: [1] float32, c^2.
    """

    keys: Array
    point: Array
    page: Array
    slots: Array
    node: Array
    node_key: Array
    node_sum: Array
    projection: Array
    direction: Array
    level_size: Array
    state: Array
    largest: Array


class Workspace(NamedTuple):
    """Memory for one kernel at a time; G queries.

    Attributes:
        nodes: [nodes + 3] int32, nodes scored; node_score: [G, nodes + 3].
        marked: [nodes] uint8, nodes whose children are wanted.
        rows, pages: [points + 3] int32, points scored and their pages; score: [G, points + 3].
        scratch, picked: [longest list] float32 and int32.
    """

    nodes: Array
    node_score: Array
    marked: Array
    rows: Array
    pages: Array
    score: Array
    scratch: Array
    picked: Array


# -- products ----------------------------------------------------------------------------------------------------------


@jit
def _products_4x4(matrix, rows, i, queries, g, out):  # type: ignore[no-untyped-def]
    """Sixteen sums at once: each vector loaded is used four times, and no sum waits for another."""
    r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = np.float32(0)
    a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = np.float32(0)
    for k in range(queries.shape[1]):
        x0, x1, x2, x3 = widen(matrix[r0, k]), widen(matrix[r1, k]), widen(matrix[r2, k]), widen(matrix[r3, k])
        q0, q1, q2, q3 = queries[g, k], queries[g + 1, k], queries[g + 2, k], queries[g + 3, k]
        a00 += q0 * x0
        a01 += q0 * x1
        a02 += q0 * x2
        a03 += q0 * x3
        a10 += q1 * x0
        a11 += q1 * x1
        a12 += q1 * x2
        a13 += q1 * x3
        a20 += q2 * x0
        a21 += q2 * x1
        a22 += q2 * x2
        a23 += q2 * x3
        a30 += q3 * x0
        a31 += q3 * x1
        a32 += q3 * x2
        a33 += q3 * x3
    out[g, i], out[g, i + 1], out[g, i + 2], out[g, i + 3] = a00, a01, a02, a03
    out[g + 1, i], out[g + 1, i + 1], out[g + 1, i + 2], out[g + 1, i + 3] = a10, a11, a12, a13
    out[g + 2, i], out[g + 2, i + 1], out[g + 2, i + 2], out[g + 2, i + 3] = a20, a21, a22, a23
    out[g + 3, i], out[g + 3, i + 1], out[g + 3, i + 2], out[g + 3, i + 3] = a30, a31, a32, a33


@jit
def _products_4x1(matrix, rows, i, queries, g, out):  # type: ignore[no-untyped-def]
    r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    a0 = a1 = a2 = a3 = np.float32(0)
    for k in range(queries.shape[1]):
        query = queries[g, k]
        a0 += query * widen(matrix[r0, k])
        a1 += query * widen(matrix[r1, k])
        a2 += query * widen(matrix[r2, k])
        a3 += query * widen(matrix[r3, k])
    out[g, i], out[g, i + 1], out[g, i + 2], out[g, i + 3] = a0, a1, a2, a3


@jit
def products(matrix, rows, start, stop, queries, out):  # type: ignore[no-untyped-def]
    """out[g, i] = queries[g] . matrix[rows[i]], start <= i < stop; three entries behind `stop` are overwritten."""
    if start == stop:
        return
    rows[stop : stop + 3] = rows[stop - 1]
    group = queries.shape[0]
    fours = group - group % 4
    for i in range(start, stop, 4):
        for g in range(0, fours, 4):
            _products_4x4(matrix, rows, i, queries, g, out)
        for g in range(fours, group):
            _products_4x1(matrix, rows, i, queries, g, out)


@kernel
def squared_norms(keys, start, stop, point):  # type: ignore[no-untyped-def]
    """|k|^2 of rows start .. stop - 1; the first row that is not finite, or `NONE`."""
    for row in range(start, stop):
        total = np.float32(0)
        for k in range(keys.shape[1]):
            total += widen(keys[row, k]) * widen(keys[row, k])
        if not total < np.inf:
            return row
        point[row].norm2 = total
    return NONE


@kernel
def project(tree, start, stop):  # type: ignore[no-untyped-def]
    """Projections of rows start .. stop - 1 on all directions, without the height's share."""
    for row in range(start, stop):
        for j in range(len(tree.direction)):
            total = np.float32(0)
            for k in range(tree.keys.shape[1]):
                total += widen(tree.keys[row, k]) * tree.direction[j, k]
            tree.projection[row, j] = total


@jit
def _height(tree, row):  # type: ignore[no-untyped-def]
    return np.sqrt(max(tree.largest[0] - tree.point[row].norm2, np.float32(0)))


# -- selection ---------------------------------------------------------------------------------------------------------


@kernel
def interleave(lists, wanted):  # type: ignore[no-untyped-def]
    """Join the ranked lists [G, P] of a query group, -1 = none: rank 0 of each query, rank 1, ..., without repeats.

    Returns:
        [wanted] int32, trailing -1 (truncated union: the group's budget is that of one KV head).
    """
    joined = np.empty(wanted, np.int32)
    highest = NONE
    for query in range(lists.shape[0]):
        for rank in range(lists.shape[1]):
            highest = max(highest, lists[query, rank])
    seen = np.zeros(highest + 1, np.uint8)
    count = 0
    for rank in range(lists.shape[1]):
        for query in range(lists.shape[0]):
            entry = lists[query, rank]
            if count < wanted and entry != NONE and not seen[entry]:
                seen[entry] = 1
                joined[count] = entry
                count += 1
    joined[count:] = NONE
    return joined


# -- search ------------------------------------------------------------------------------------------------------------


@jit
def _score_nodes(tree, queries, heights, by_centroid, start, stop, work):  # type: ignore[no-untyped-def]
    """Score work.nodes[start:stop] by own key or by the mean of the children; a childless node has no mean."""
    group = queries.shape[0]
    products(tree.node_sum if by_centroid else tree.node_key, work.nodes, start, stop, queries, work.node_score)
    if by_centroid:
        for i in range(start, stop):
            children = tree.node[work.nodes[i]].children
            work.scratch[i] = np.float32(1) / children if children else np.float32(0)
        for g in range(group):
            for i in range(start, stop):
                work.node_score[g, i] *= work.scratch[i]
    elif heights.size:
        for i in range(start, stop):
            work.scratch[i] = _height(tree, tree.node[work.nodes[i]].point)
        for g in range(group):
            for i in range(start, stop):
                work.node_score[g, i] += heights[g] * work.scratch[i]


@jit
def _mark_front(tree, count, group, level, fov, work):  # type: ignore[no-untyped-def]
    """Mark, for each query, the best `fov` of the nodes of `level` that were scored and have children."""
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
def _children_of_marked(tree, work):  # type: ignore[no-untyped-def]
    """work.rows and work.pages: the children of all marked nodes, page by page; how many."""
    count = 0
    for node in range(tree.state[NODES]):
        if work.marked[node]:
            count = _children(tree, node, count, work)
    return count


@jit
def _children(tree, node, count, work):  # type: ignore[no-untyped-def]
    page = tree.node[node].first
    while page != NONE:
        for slot in range(tree.page[page].count):
            work.rows[count] = tree.slots[page, slot]
            work.pages[count] = page
            count += 1
        page = tree.page[page].next
    return count


@jit
def rank_nodes(tree, queries, heights, lowest, upper, fov, exhaustive_below, by_centroid, work):  # type: ignore[no-untyped-def]
    """Score nodes of level `lowest` and more: all of them from the top down to the first level that has more than
    `exhaustive_below`, and below that the children of the best `fov` nodes of the level above.

    Args:
        queries: [G, D]; heights: [G], their last coordinates, for a parent search (by T_K), or [0].
        upper: levels above `lowest` are wanted for themselves, not only as a way down.

    Returns:
        first, count: work.nodes[:count] were scored, those of level `lowest` and no others from `first` on
        (unless `upper`).
    """
    group, top = queries.shape[0], tree.state[TOP]
    level = top + 1
    while level > lowest and tree.level_size[level - 1] <= exhaustive_below:
        level -= 1
    count = 0
    for node in range(1, tree.state[NODES]):
        own = tree.node[node].level
        if own == level or (upper and own > level):
            work.nodes[count] = node
            count += 1
    first = 0
    _score_nodes(tree, queries, heights, by_centroid, 0, count, work)
    while level > lowest:
        if level > top:
            work.marked[: tree.state[NODES]] = 0
            work.marked[ROOT] = 1
        else:
            _mark_front(tree, count, group, level, fov, work)
        level -= 1
        first = count
        for i in range(_children_of_marked(tree, work)):
            work.nodes[count] = tree.point[work.rows[i]].node
            count += 1
        _score_nodes(tree, queries, heights, by_centroid, first, count, work)
    return first, count


@jit
def _gaps(tree, start, stop, target, composites, simple, scratch, work):  # type: ignore[no-untyped-def]
    """scratch[i - start] = -min over composites of the largest gap |<p - q, u_j>| among its simple indices.

    P-DCI visits points in just this order (Li & Malik 2017, algorithm 2, where a queue finds it), if its composites
    advance by gap and not by turns.
    """
    last = tree.direction.shape[1] - 1
    for i in range(start, stop):
        row = work.rows[i]
        height = _height(tree, row)
        smallest = np.float32(np.inf)
        for composite in range(composites):
            largest = np.float32(0)
            for j in range(composite * simple, (composite + 1) * simple):
                projected = tree.projection[row, j] + height * tree.direction[j, last]
                largest = max(largest, abs(projected - target[j]))
            smallest = min(smallest, largest)
        scratch[i - start] = -smallest


@jit
def _retrieve(tree, start, stop, targets, composites, simple, share, work):  # type: ignore[no-untyped-def]
    """Of one node's children work.rows[start:stop] keep the `share` nearest in projection to any query; new stop."""
    wanted = int(np.ceil(share * (stop - start)))
    keep = np.zeros(stop - start, np.uint8)
    for g in range(targets.shape[0]):
        _gaps(tree, start, stop, targets[g], composites, simple, work.scratch, work)
        for i in range(best(work.scratch, stop - start, wanted, work.picked)):
            keep[work.picked[i]] = 1
    count = start
    for i in range(start, stop):
        if keep[i - start]:
            work.rows[count], work.pages[count] = work.rows[i], work.pages[i]
            count += 1
    return count


@jit
def _targets(tree, queries, used):  # type: ignore[no-untyped-def]
    """[G, used] projections of c T_Q(q) = c q / |q|."""
    targets = np.zeros((queries.shape[0], used), np.float32)
    for g in range(queries.shape[0]):
        norm = np.float32(0)
        for k in range(queries.shape[1]):
            norm += queries[g, k] * queries[g, k]
        if norm == 0:
            continue
        scale = np.sqrt(tree.largest[0] / norm)
        for j in range(used):
            total = np.float32(0)
            for k in range(queries.shape[1]):
                total += queries[g, k] * tree.direction[j, k]
            targets[g, j] = scale * total
    return targets


@kernel
def search(tree, queries, fov, exhaustive_below, by_centroid, composites, simple, share, work):  # type: ignore[no-untyped-def]
    """Score nodes, then the children of the best of them; every child of a marked node meets all queries.

    By point, the nodes' own keys are results too, and the nodes of level 2 are what is chosen from. By centroid, nodes
    of all levels compete, and an upper key is a result only as somebody's child.

    Returns:
        ranked, count: nodes scored; keys scored, in work.rows, work.pages and work.score.
    """
    group, count = queries.shape[0], 0
    _, ranked = rank_nodes(tree, queries, np.empty(0, np.float32), 2, True, fov, exhaustive_below, by_centroid, work)
    _mark_front(tree, ranked, group, EVERY_LEVEL if by_centroid else 2, fov, work)
    if by_centroid or tree.state[TOP] < 2:
        work.marked[ROOT] = 1
    if not by_centroid:
        for i in range(ranked):
            work.rows[i] = tree.node[work.nodes[i]].point
            work.pages[i] = tree.point[work.rows[i]].page
        for g in range(group):
            work.score[g, :ranked] = work.node_score[g, :ranked]
        count = ranked
    scored = count
    targets = _targets(tree, queries, composites * simple)
    for node in range(tree.state[NODES]):
        if work.marked[node]:
            start = count
            count = _children(tree, node, start, work)
            if composites:
                count = _retrieve(tree, start, count, targets, composites, simple, share, work)
    products(tree.keys, work.rows, scored, count, queries, work.score)
    return ranked, count


@kernel
def scan(tree, queries, work):  # type: ignore[no-untyped-def]
    """Score every key, page by page; how many."""
    count = 0
    for page in range(tree.state[PAGES]):
        for slot in range(tree.page[page].count):
            work.rows[count] = tree.slots[page, slot]
            work.pages[count] = page
            count += 1
    products(tree.keys, work.rows, 0, count, queries, work.score)
    return count


@kernel
def best_pages(tree, count, pages, scores, work):  # type: ignore[no-untyped-def]
    """Fill pages, scores [G, P] with the pages of the best members, best first, -1 and -inf behind."""
    used = tree.state[PAGES]
    for g in range(pages.shape[0]):
        work.scratch[:used] = -np.inf
        for i in range(count):
            page = work.pages[i]
            work.scratch[page] = max(work.scratch[page], work.score[g, i])
        write_best(work.scratch, used, pages[g], scores[g], work.picked)


@kernel
def best_rows(count, rows, scores, work):  # type: ignore[no-untyped-def]
    """Fill rows, scores [G, k] with the best keys, best first, -1 and -inf behind."""
    for g in range(rows.shape[0]):
        write_best(work.score[g], count, rows[g], scores[g], work.picked)
        for i in range(rows.shape[1]):
            if rows[g, i] != NONE:
                rows[g, i] = work.rows[rows[g, i]]


# -- pages -------------------------------------------------------------------------------------------------------------


@jit
def _new_page(tree, node):  # type: ignore[no-untyped-def]
    page = tree.state[FREE]
    if page == NONE:
        page = tree.state[PAGES]
        tree.state[PAGES] += 1
    else:
        tree.state[FREE] = tree.page[page].next
    tree.page[page].node, tree.page[page].count, tree.page[page].next = node, 0, NONE
    return page


@jit
def _free_page(tree, before, page):  # type: ignore[no-untyped-def]
    """Take an empty page, which follows `before` (`NONE`: the first), out of its node's chain."""
    if before == NONE:
        tree.node[tree.page[page].node].first = tree.page[page].next
    else:
        tree.page[before].next = tree.page[page].next
    tree.page[page].node, tree.page[page].dirty = NONE, 1
    tree.page[page].next = tree.state[FREE]
    tree.state[FREE] = page


@jit
def _put(tree, page, row):  # type: ignore[no-untyped-def]
    slot = tree.page[page].count
    tree.slots[page, slot] = row
    tree.page[page].count, tree.page[page].dirty = slot + 1, 1
    tree.point[row].page, tree.point[row].slot = page, slot


@jit
def _take(tree, row):  # type: ignore[no-untyped-def]
    """Remove a point from its page; the last member fills the gap."""
    page, slot = tree.point[row].page, tree.point[row].slot
    last = tree.page[page].count - 1
    moved = tree.slots[page, last]
    tree.slots[page, slot], tree.point[moved].slot = moved, slot
    tree.slots[page, last] = NONE
    tree.page[page].count, tree.page[page].dirty = last, 1


@jit
def _count_child(tree, node, row, sign):  # type: ignore[no-untyped-def]
    tree.node[node].children += sign
    for k in range(tree.keys.shape[1]):
        tree.node_sum[node, k] += np.float32(sign) * widen(tree.keys[row, k])


@jit
def _affinities(tree, row, rows, count, work):  # type: ignore[no-untyped-def]
    """work.score[0, i] = c^2 <T_K(row), T_K(rows[i])> and work.scratch[i] = row . rows[i]."""
    query = np.empty((1, tree.keys.shape[1]), np.float32)
    for k in range(tree.keys.shape[1]):
        query[0, k] = widen(tree.keys[row, k])
    products(tree.keys, rows, 0, count, query, work.score)
    height = _height(tree, row)
    for i in range(count):
        work.scratch[i] = work.score[0, i]
        work.score[0, i] += height * _height(tree, rows[i])


@jit
def _order_by_projection(tree, rows, count):  # type: ignore[no-untyped-def]
    values = np.empty(count, np.float32)
    last = tree.direction.shape[1] - 1
    for i in range(count):
        values[i] = tree.projection[rows[i], 0] + _height(tree, rows[i]) * tree.direction[0, last]
    sort(values, rows, count)


@jit
def _order_greedily(tree, rows, count, work):  # type: ignore[no-untyped-def]
    """Order points so that cutting them evenly into pages puts near ones together.

    Each page begins with the largest key left, since a large key is what queries find, and takes the keys nearest to
    it by T_K. Of keys that a norm of their own has made equally long the first begins, not the one rounded up.
    """
    pages = -(-count // tree.slots.shape[1])
    start = 0
    for page in range(pages):
        size = count // pages + (page < count % pages)
        seed = start
        for i in range(start, count):
            if tree.point[rows[i]].norm2 > LARGER * tree.point[rows[seed]].norm2:
                seed = i
        rows[start], rows[seed] = rows[seed], rows[start]
        rest = np.empty(count - start + 2, np.int32)  # without the seed, and the three places `products` wants
        rest[: count - start - 1] = rows[start + 1 : count]
        _affinities(tree, rows[start], rest, count - start - 1, work)
        near = best(work.score[0], count - start - 1, size - 1, work.picked)
        chosen, other, at = start + 1, start + 1 + near, 0
        for i in range(count - start - 1):
            if at < near and work.picked[at] == i:
                rows[chosen] = rest[i]
                chosen, at = chosen + 1, at + 1
            else:
                rows[other] = rest[i]
                other += 1
        start += size


@jit
def _order(tree, rows, count, greedy, work):  # type: ignore[no-untyped-def]
    """Order points for pages; up to one page there is nothing to order."""
    if count <= tree.slots.shape[1]:
        return
    if greedy:
        _order_greedily(tree, rows, count, work)
    else:
        _order_by_projection(tree, rows, count)


@jit
def _fill_pages(tree, node, rows, count, after):  # type: ignore[no-untyped-def]
    """Put ordered points into ceil(count / page size) new pages of `node`, evenly, chained behind page `after`."""
    pages = -(-count // tree.slots.shape[1])
    start = 0
    for number in range(pages):
        page = _new_page(tree, node)
        if after == NONE:
            tree.page[page].next = tree.node[node].first
            tree.node[node].first = page
        else:
            tree.page[page].next = tree.page[after].next
            tree.page[after].next = page
        after = page
        size = count // pages + (number < count % pages)
        for i in range(start, start + size):
            _put(tree, page, rows[i])
        start += size


@kernel
def load_children(tree, rows, parents, greedy, work):  # type: ignore[no-untyped-def]
    """Put points into the pages of their parents, which have none yet."""
    count = len(rows)
    ends = np.zeros(tree.state[NODES] + 2, np.int64)  # of node n's members at n + 1, once they are counted and placed
    for i in range(count):
        ends[parents[i] + 2] += 1
    for node in range(tree.state[NODES]):
        ends[node + 2] += ends[node + 1]
    grouped = np.empty(count, np.int32)
    for i in range(count):
        grouped[ends[parents[i] + 1]] = rows[i]
        ends[parents[i] + 1] += 1
    for node in range(tree.state[NODES]):
        members = grouped[ends[node] : ends[node + 1]]
        if len(members):
            _order(tree, members, len(members), greedy, work)
            _fill_pages(tree, node, members, len(members), NONE)
            for row in members:
                _count_child(tree, node, row, 1)


@jit
def _page_for(tree, node, row, greedy, work):  # type: ignore[no-untyped-def]
    """The page of `node` a newcomer belongs in: its nearest child's, or by its place in the order of projections."""
    page = tree.node[node].first
    if page == NONE or tree.page[page].next == NONE:
        return page
    if greedy:
        count = _children(tree, node, 0, work)
        _affinities(tree, row, work.rows, count, work)
        best(work.score[0], count, 1, work.picked)
        return work.pages[work.picked[0]]
    last = tree.direction.shape[1] - 1
    own = tree.projection[row, 0] + _height(tree, row) * tree.direction[0, last]
    while tree.page[page].next != NONE:
        for slot in range(tree.page[page].count):
            member = tree.slots[page, slot]
            if tree.projection[member, 0] + _height(tree, member) * tree.direction[0, last] >= own:
                return page
        page = tree.page[page].next
    return page


@kernel
def add_children(tree, rows, parents, greedy, work):  # type: ignore[no-untyped-def]
    """Put points one by one into pages of their parents; a full page splits in two even halves."""
    size = tree.slots.shape[1]
    members = np.empty(size + 1, np.int32)
    for i in range(len(rows)):
        node, row = parents[i], rows[i]
        page = _page_for(tree, node, row, greedy, work)
        _count_child(tree, node, row, 1)
        if page == NONE:
            _fill_pages(tree, node, rows[i : i + 1], 1, NONE)
        elif tree.page[page].count < size:
            _put(tree, page, row)
        else:
            members[:size] = tree.slots[page]
            members[size] = row
            _order(tree, members, size + 1, greedy, work)
            tree.slots[page] = NONE
            tree.page[page].count = 0
            half = (size + 2) // 2
            for j in range(half):
                _put(tree, page, members[j])
            _fill_pages(tree, node, members[half:], size + 1 - half, page)


@jit
def _remove_child(tree, row):  # type: ignore[no-untyped-def]
    """Take one point from its parent; a page less than half full joins its neighbour in the chain if both fit one."""
    page = tree.point[row].page
    node = tree.page[page].node
    _take(tree, row)
    _count_child(tree, node, row, -1)
    size, count = tree.slots.shape[1], tree.page[page].count
    if 2 * count >= size:
        return
    before, other = NONE, tree.node[node].first
    while other != page:
        before, other = other, tree.page[other].next
    if count == 0:
        _free_page(tree, before, page)
        return
    after = tree.page[page].next
    if after != NONE and count + tree.page[after].count <= size:
        _join(tree, page, after)
    elif before != NONE and count + tree.page[before].count <= size:
        _join(tree, before, page)


@jit
def _join(tree, page, after):  # type: ignore[no-untyped-def]
    """Move the members of the next page in the chain into `page`."""
    while tree.page[after].count:
        row = tree.slots[after, tree.page[after].count - 1]
        _take(tree, row)
        _put(tree, page, row)
    _free_page(tree, page, after)


# -- build and insert --------------------------------------------------------------------------------------------------


@kernel
def assign_levels(level_size, top, draws, first, above, levels):  # type: ignore[no-untyped-def]
    """The levels of arriving points; level_size counts them.

    Args:
        draws: [n] uniform numbers in [0, 1): a point climbs while they say so; or [0]: it climbs where the next level
            has room, so that its size stays the promoted share of the size below.
        first, above: promoted shares of level 1 and of the levels above.

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
def nearest_nodes(tree, rows, level, fov, exhaustive_below, work, parents):  # type: ignore[no-untyped-def]
    """Parents of points among the nodes of `level`: the largest <T_K(x), T_K(y)>, of equal ones the first.

    Writes the parents and every point's affinity x . y, from which any later c can be served.
    """
    queries = np.empty((BLOCK, tree.keys.shape[1]), np.float32)
    heights = np.empty(BLOCK, np.float32)
    for start in range(0, len(rows), BLOCK):
        size = min(BLOCK, len(rows) - start)
        for g in range(size):
            row = rows[start + g]
            heights[g] = _height(tree, row)
            for k in range(tree.keys.shape[1]):
                queries[g, k] = widen(tree.keys[row, k])
        first, found = rank_nodes(
            tree, queries[:size], heights[:size], level, False, fov, exhaustive_below, False, work
        )
        for g in range(size):
            highest = np.float32(-np.inf)
            for i in range(first, found):
                highest = max(highest, work.node_score[g, i])
            place = first
            while work.node_score[g, place] != highest:
                place += 1
            parent = work.nodes[place]
            parents[start + g] = parent
            tree.point[rows[start + g]].affinity = highest - heights[g] * _height(tree, tree.node[parent].point)


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
    """Give a node above the old top level all old top points as children, in the pages they are in."""
    tree.node[node].first, tree.node[node].children = tree.node[ROOT].first, tree.node[ROOT].children
    tree.node_sum[node] = tree.node_sum[ROOT]
    tree.node[ROOT].first, tree.node[ROOT].children = NONE, 0
    tree.node_sum[ROOT] = 0
    page = tree.node[node].first
    while page != NONE:
        tree.page[page].node = node
        page = tree.page[page].next
    count = _children(tree, node, 0, work)
    _affinities(tree, tree.node[node].point, work.rows, count, work)
    for i in range(count):
        tree.point[work.rows[i]].affinity = work.scratch[i]


@kernel
def leave_for(tree, node, fov, exhaustive_below, work):  # type: ignore[no-untyped-def]
    """Take the points below a new node's level that are nearer to it than to their parents from those parents.

    Only the children of the nodes that a parent search would reach are asked.

    Returns:
        how many, in work.rows.
    """
    own, level = tree.node[node].point, tree.node[node].level
    query, height = tree.node_key[node : node + 1], np.empty(1, np.float32)
    height[0] = _height(tree, own)
    _, found = rank_nodes(tree, query, height, level, False, fov, exhaustive_below, False, work)
    wide = tree.level_size[level] <= exhaustive_below
    _mark_front(tree, found, 1, level, found if wide else fov, work)
    count = _children_of_marked(tree, work)
    _affinities(tree, own, work.rows, count, work)
    leaving = 0
    for i in range(count):
        row = work.rows[i]
        parent = tree.node[tree.page[work.pages[i]].node].point
        if work.score[0, i] > tree.point[row].affinity + _height(tree, row) * _height(tree, parent):
            tree.point[row].affinity = work.scratch[i]
            work.rows[leaving] = row
            leaving += 1
    for i in range(leaving):
        _remove_child(tree, work.rows[i])
    return leaving
