"""The arrays of a DCI tree, and the memory that its kernels work in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

POINT = np.dtype([("page", "i4"), ("slot", "i4"), ("node", "i4"), ("norm2", "f4"), ("affinity", "f4")], align=True)
PAGE = np.dtype([("node", "i4"), ("count", "i4"), ("next", "i4")], align=True)
NODE = np.dtype([("point", "i4"), ("level", "i4"), ("first", "i4"), ("children", "i4")], align=True)

POINTS, NODES, PAGES, FREE, TOP = range(5)  # indexes in Tree.state
NONE, ROOT = -1, 0


class Tree(NamedTuple):
    """The arrays of one tree; capacities are those of the arrays, what is used stands in `state`.

    Attributes:
        keys: [rows, D] float32, or uint16: the bits of bfloat16. The store's own memory.
        point: [rows] `POINT`: page and slot, own node (`NONE` at level 1), |k|^2, k . parent (0 below the root).
        page: [pages] `PAGE`: its node, members, next page of the node or of the free list.
        slots: [pages, page size] int32 points, `NONE` after the last member.
        node: [nodes] `NODE`: own point, level (the root's is top + 1), first page, children.
        node_key, node_sum: [nodes, D] float32, own key and the sum of the children's.
        projection: [rows, J] float32, <k, u_j> without the height's share, which changes with c.
        direction: [J, D + 1] float32 unit vectors u_j.
        level_size: [levels] int64, points of each level.
        state: [5] int64: points, nodes, pages ever used, first free page, top level.
        largest: [1] float32, c^2.
        token: [rows] int32, the token whose key lies in each row.
        sketch: [rows, D, up to a whole number of vectors] int8; step: [rows, 1] float32. A key's numbers are `step`
            times its sketch's, and off by half a step at most.
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
    token: Array
    sketch: Array
    step: Array


class Workspace(NamedTuple):
    """Memory for one kernel at a time; G queries.

    Attributes:
        nodes: [nodes + 3] int32, nodes scored; node_score: [G, nodes + 3].
        marked: [nodes] uint8, nodes whose children are wanted; opened: those whose children were scored on the way.
        rows: [points + 3] int32, points scored, page by page; step: of their sketches; score: [G, points + 3].
        pages, starts: [points + 3] int32, the pages of work.rows, and where in it each begins; the end of the last.
        scratch, picked: [longest list] float32 and int32.
        members: [points + 3] int32, points whose keys are read; exact: [1, points + 3], their scores.
    """

    nodes: Array
    node_score: Array
    marked: Array
    opened: Array
    rows: Array
    step: Array
    score: Array
    pages: Array
    starts: Array
    scratch: Array
    picked: Array
    members: Array
    exact: Array
