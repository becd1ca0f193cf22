"""The trees of a layer in one call: what each KV head attends, and the tokens that leave the
window.

A tree is a dozen arrays, which another one shares none of. A directory names those of all trees, a
line of addresses and sizes for each, so that a kernel can go from tree to tree without Python.
"""

from __future__ import annotations

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel
from methods.icecache.kernels.arrays import NONE, PAGES, POINTS, TOP, at
from methods.icecache.kernels.choosing import best_pages, interleave
from methods.icecache.kernels.levels import assign_levels, nearest_nodes
from methods.icecache.kernels.p_dci import p_dci_pages
from methods.icecache.kernels.pages import add_children
from methods.icecache.kernels.products import measure
from methods.icecache.kernels.ranking import scan, search

CAPACITY, SINKS, WINDOW, LENGTH, SLOTS = range(5)  # of a row of `regions`


@jit
def _finite(queries):  # type: ignore[no-untyped-def]
    for g in range(queries.shape[0]):
        for k in range(queries.shape[1]):
            if not np.isfinite(queries[g, k]):
                return False
    return True


@jit
def _fixed(region, tokens):  # type: ignore[no-untyped-def]
    """The tokens always attended: the window, newest first, and the sinks; of a row within its
    budget all. How many.
    """
    whole = region[CAPACITY] >= region[LENGTH]
    room = min(region[CAPACITY], region[LENGTH])
    count = 0
    for token in range(region[LENGTH] - 1, NONE if whole else region[WINDOW] - 1, -1):
        if count < room:
            tokens[count] = token
            count += 1
    for token in range(0 if whole else min(region[SINKS], region[LENGTH])):
        if count < room:
            tokens[count] = token
            count += 1
    return count


@kernel
def attend(works, directory, like, queries, regions, fov, ranked, p_dci, index, counts):  # type: ignore[no-untyped-def]
    """What all KV heads attend: window, sinks, and the members of the best pages.

    Parameters
    ----------
    works, directory
        a line for the workspace of each thread, and for each tree.
    like
        any workspace, any tree.
    queries
        [T, G, D].
    regions
        [B, 5], of each row its budget, sinks, first token of the window, length and most pages
        recalled.
    fov
        of `search`, at least, and as a share of the points.
    ranked
        exhaustive_below and by_centroid of `search`, and whether `scan` is asked instead; None:
        neither is.
    p_dci
        as of `p_dci_pages`; None: these are not asked. What is None is not compiled.
    index
        [T, M] int64, written: tokens, those always attended first, then page by page, best first,
        then -1.
    counts
        [T] each, written: how many tokens; keys scored, by their sketches; and, bool, whether a
        query of this head is not finite.
    """
    arguments = works, directory, like, queries, regions, fov, ranked, p_dci
    in_threads(len(works), _attend, (np.zeros(1, np.int64), *arguments, index, counts))


@jit
def _attend(  # type: ignore[no-untyped-def]
    number, claims, works, directory, like, queries, regions, fov, ranked, p_dci, index, counts
):
    (least, share), (used, read, refused) = fov, counts
    heads, work = len(directory) // len(regions), at(works, number, like[0])
    for _ in range(len(directory)):
        head = claim(claims)
        if head >= len(directory):
            break
        region, head_queries = regions[head // heads], queries[head]
        index[head] = NONE
        used[head] = count = _fixed(region, index[head])
        tree = at(directory, head, like[1])
        pages = min(region[SLOTS], tree.state[PAGES])
        read[head], refused[head] = 0, False
        if region[CAPACITY] >= region[LENGTH] or pages <= 0:
            continue
        refused[head] = not _finite(head_queries)
        if refused[head]:
            continue
        wide = max(least, pages, int(np.ceil(share * tree.state[POINTS])))
        page_lists = np.empty((len(head_queries), pages), np.int32)
        scores = np.empty((len(head_queries), pages), np.float32)
        if p_dci is not None:
            read[head] = p_dci_pages(tree, head_queries, wide, p_dci, page_lists, scores, work)
        if ranked is not None:
            if ranked[2]:
                runs = scan(tree, work)
            else:
                runs = search(tree, head_queries, wide, ranked[0], ranked[1], work)[1]
            read[head] = work.starts[runs]
            best_pages(tree, runs, head_queries, page_lists, scores, work)
        for page in interleave(page_lists, pages):
            if page == NONE:
                break
            for slot in range(tree.page[page].count):
                if count < region[CAPACITY]:
                    index[head, count] = tree.token[tree.slots[page, slot]] + region[SINKS]
                    count += 1
        used[head] = count


@kernel
def insert_leaves(directory, like, first, stop, counts, layout, greedy, work, taken):  # type: ignore[no-untyped-def]
    """Insert the next rows into the trees first .. stop - 1, up to the first that only
    `DCITree.insert` can take: one that is to be promoted, for which there is no room, or that is
    not finite.

    Parameters
    ----------
    like
        any tree.
    counts
        [B], how many rows of key memory, of each row of the batch.
    layout
        first, above, fov, exhaustive_below: shares promoted by the counter, and how parents are
        searched.
    taken
        [T], how many were inserted.
    """
    share, above, fov, exhaustive_below = layout
    heads = len(directory) // len(counts)
    for head in range(first, stop):
        tree, count = at(directory, head, like), counts[head // heads]
        start, top = tree.state[POINTS], tree.state[TOP]
        taken[head] = 0
        fits = start + count <= len(tree.point) and tree.state[PAGES] + count <= len(tree.page)
        if top == 0 or not fits:
            continue
        levels = np.empty(count, np.int32)
        assign_levels(tree.level_size.copy(), top, np.empty(0), share, above, levels)
        leaves = 0
        while leaves < count and levels[leaves] == 1:
            leaves += 1
        if leaves == 0 or measure(tree, start, start + count) != NONE:
            continue
        rows, parents = np.empty(leaves, np.int32), np.zeros(leaves, np.int32)
        for i in range(leaves):
            row = start + i
            rows[i] = tree.token[row] = row
            tree.point[row].node = NONE
            tree.point[row].affinity = 0
        tree.state[POINTS] += leaves
        tree.level_size[1] += leaves
        if top > 1:
            nearest_nodes(tree, rows, 2, fov, exhaustive_below, work, parents)
        add_children(tree, rows, parents, greedy, work)
        taken[head] = leaves
