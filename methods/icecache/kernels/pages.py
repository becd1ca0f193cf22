"""Pages: the children of a node in an order that puts near ones together, new ones, and those that
leave.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import best, jit, kernel, sort, widen
from methods.icecache.kernels.arrays import FREE, NODES, NONE, PAGES
from methods.icecache.kernels.products import affinities, height_of
from methods.icecache.kernels.ranking import children_of

# by so much more is a squared norm larger than another, and not by rounding
LARGER = np.float32(1 + 1e-4)


@jit
def _new_page(tree, node):  # type: ignore[no-untyped-def]
    page = tree.state[FREE]
    if page == NONE:
        page = tree.state[PAGES]
        tree.state[PAGES] += 1
    else:
        tree.state[FREE] = tree.page[page].next
    tree.page[page].node, tree.page[page].count = node, 0
    tree.page[page].next = NONE
    tree.slots[page] = NONE
    return page


@jit
def _free_page(tree, before, page):  # type: ignore[no-untyped-def]
    """Take an empty page, which follows `before` (`NONE`: the first), out of its node's chain."""
    if before == NONE:
        tree.node[tree.page[page].node].first = tree.page[page].next
    else:
        tree.page[before].next = tree.page[page].next
    tree.page[page].node, tree.page[page].next = NONE, tree.state[FREE]
    tree.state[FREE] = page


@jit
def _put(tree, page, row):  # type: ignore[no-untyped-def]
    slot = tree.page[page].count
    tree.slots[page, slot] = row
    tree.page[page].count = slot + 1
    tree.point[row].page, tree.point[row].slot = page, slot


@jit
def _take(tree, row):  # type: ignore[no-untyped-def]
    """Remove a point from its page; the last member fills the gap."""
    page, slot = tree.point[row].page, tree.point[row].slot
    last = tree.page[page].count - 1
    moved = tree.slots[page, last]
    tree.slots[page, slot], tree.point[moved].slot = moved, slot
    tree.slots[page, last] = NONE
    tree.page[page].count = last


@jit
def _count_child(tree, node, row, sign):  # type: ignore[no-untyped-def]
    tree.node[node].children += sign
    for k in range(tree.keys.shape[1]):
        tree.node_sum[node, k] += np.float32(sign) * widen(tree.keys[row, k])


@jit
def _order_by_projection(tree, rows, count):  # type: ignore[no-untyped-def]
    values = np.empty(count, np.float32)
    last = tree.direction.shape[1] - 1
    for i in range(count):
        values[i] = tree.projection[rows[i], 0] + height_of(tree, rows[i]) * tree.direction[0, last]
    sort(values, rows, count)


@jit
def _members_of(number, count, pages, late):  # type: ignore[no-untyped-def]
    """Members of page `number` of so many that share `count` evenly: the fuller ones come first, or
    late.
    """
    fuller = count % pages
    return count // pages + (number >= pages - fuller if late else number < fuller)


@jit
def _order_greedily(tree, rows, count, late, work):  # type: ignore[no-untyped-def]
    """Order points so that cutting them evenly into pages puts near ones together.

    Each page begins with the largest key left, since a large key is what queries find, and takes
    the keys nearest to it by T_K. Of keys that a norm of their own has made equally long the first
    begins, not the one rounded up.
    """
    pages = -(-count // tree.slots.shape[1])
    start = 0
    for page in range(pages):
        size = _members_of(page, count, pages, late)
        seed = start
        for i in range(start, count):
            if tree.point[rows[i]].norm2 > LARGER * tree.point[rows[seed]].norm2:
                seed = i
        rows[start], rows[seed] = rows[seed], rows[start]
        # without the seed, and the three entries that `products` wants
        rest = np.empty(count - start + 2, np.int32)
        for i in range(count - start - 1):
            rest[i] = rows[start + 1 + i]
        affinities(tree, rows[start], rest, count - start - 1, work)
        near = best(work.score[0], count - start - 1, size - 1, work.picked)
        chosen, other = start + 1, start + 1 + near
        at = 0
        for i in range(count - start - 1):
            if at < near and work.picked[at] == i:
                rows[chosen] = rest[i]
                chosen, at = chosen + 1, at + 1
            else:
                rows[other] = rest[i]
                other += 1
        start += size


@jit
def _order(tree, rows, count, greedy, late, work):  # type: ignore[no-untyped-def]
    """Order points for pages; up to one page there is nothing to order."""
    if count <= tree.slots.shape[1]:
        return
    if greedy:
        _order_greedily(tree, rows, count, late, work)
    else:
        _order_by_projection(tree, rows, count)


@jit
def _fill_pages(tree, node, rows, count, after, late):  # type: ignore[no-untyped-def]
    """Put ordered points into ceil(count / page size) new pages of `node`, evenly, chained after
    page `after`.
    """
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
        size = _members_of(number, count, pages, late)
        for i in range(start, start + size):
            _put(tree, page, rows[i])
        start += size


@kernel
def load_children(tree, rows, parents, greedy, late, work):  # type: ignore[no-untyped-def]
    """Put points into the pages of their parents, which have none yet; a node's fuller pages come
    first, or late.
    """
    count = len(rows)
    # of node n's members at n + 1, once they are counted and written
    ends = np.zeros(tree.state[NODES] + 2, np.int64)
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
            _order(tree, members, len(members), greedy, late, work)
            _fill_pages(tree, node, members, len(members), NONE, late)
            for row in members:
                _count_child(tree, node, row, 1)


@jit
def _page_for(tree, node, row, greedy, work):  # type: ignore[no-untyped-def]
    """The page of `node` a newcomer belongs in: its nearest child's, or by the order of
    projections.
    """
    page = tree.node[node].first
    if page == NONE or tree.page[page].next == NONE:
        return page
    if greedy:
        count = children_of(tree, node, 0, work)
        affinities(tree, row, work.rows, count, work)
        best(work.score[0], count, 1, work.picked)
        return tree.point[work.rows[work.picked[0]]].page
    last = tree.direction.shape[1] - 1
    projection = tree.projection[row, 0] + height_of(tree, row) * tree.direction[0, last]
    while tree.page[page].next != NONE:
        for slot in range(tree.page[page].count):
            member = tree.slots[page, slot]
            of_height = height_of(tree, member) * tree.direction[0, last]
            if tree.projection[member, 0] + of_height >= projection:
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
            _fill_pages(tree, node, rows[i : i + 1], 1, NONE, False)
        elif tree.page[page].count < size:
            _put(tree, page, row)
        else:
            for slot in range(size):
                members[slot] = tree.slots[page, slot]
            members[size] = row
            _order(tree, members, size + 1, greedy, False, work)
            tree.slots[page] = NONE
            tree.page[page].count = 0
            half = (size + 2) // 2
            for j in range(half):
                _put(tree, page, members[j])
            _fill_pages(tree, node, members[half:], size + 1 - half, page, False)


@jit
def remove_child(tree, row):  # type: ignore[no-untyped-def]
    """Take one point from its parent; a page less than half full joins its neighbour in the chain
    if both fit one.
    """
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
