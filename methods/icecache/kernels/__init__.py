"""The arrays of a DCI tree, the memory that its kernels work in, and the kernels (`kernels.cpp`).

A kernel is given neither array by array: it gets a line, which says where each array is and how
large (`tree.h` has the structures).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.kernels.library import CppFile

KERNELS = CppFile(Path(__file__).with_name("kernels.cpp"))

Array = np.ndarray[Any, Any]

POINT = np.dtype(
    [("page", "i4"), ("slot", "i4"), ("node", "i4"), ("norm2", "f4"), ("affinity", "f4")],
    align=True,
)
PAGE = np.dtype([("node", "i4"), ("count", "i4"), ("next", "i4")], align=True)
NODE = np.dtype([("point", "i4"), ("level", "i4"), ("first", "i4"), ("children", "i4")], align=True)

POINTS, NODES, PAGES, FREE, TOP = range(5)  # indexes in Tree.state
NONE, ROOT = -1, 0

PARENTS_AT_ONCE = 8  # points whose parents are searched together
SKETCH_LANES = 16  # a sketch is a whole number of so many wide


class _Lined:
    """Arrays in a tuple, and the line that names them."""

    @cached_property
    def line(self) -> NDArray[np.int64]:
        """[3 * arrays] int64: address, rows and columns of each; of the first the bytes of a number
        stand in place of its rows, which no kernel counts.
        """
        arrays: Any = self
        numbers: list[int] = []
        for array in arrays:
            numbers += (array.ctypes.data, *array.shape, 1)[:3]
        numbers[1] = arrays[0].itemsize
        return np.array(numbers)

    def __getstate__(self) -> None:
        """A copy is elsewhere."""


class _Tree(NamedTuple):
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


class Tree(_Lined, _Tree):
    """The arrays of one tree; capacities are those of the arrays, what is used stands in `state`.

    Attributes
    ----------
    keys
        [rows, D] float32, or uint16: the bits of bfloat16. The store's own memory.
    point
        [rows] `POINT`: page and slot, own node (`NONE` at level 1), |k|^2, k . parent (0 below the
        root).
    page
        [pages] `PAGE`: its node, members, next page of the node or of the free list.
    slots
        [pages, page size] int32 points, `NONE` after the last member.
    node
        [nodes] `NODE`: own point, level (the root's is top + 1), first page, children.
    node_key, node_sum
        [nodes, D] float32, own key and the sum of the children's.
    projection
        [rows, J] float32, <k, u_j> without the height's share, which changes with c.
    direction
        [J, D + 1] float32 unit vectors u_j.
    level_size
        [levels] int64, points of each level.
    state
        [5] int64: points, nodes, pages ever used, first free page, top level.
    largest
        [1] float32, c^2.
    token
        [rows] int32, the token whose key lies in each row.
    sketch
        [rows, D up to a whole number of vectors] int8, a key's numbers in steps, off by half a step
        at most.
    step
        [rows, 1] float32, the step of each sketch.
    """


class _Workspace(NamedTuple):
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


class WorkArrays(_Lined, _Workspace):
    """Memory for one kernel at a time; G queries.

    Attributes
    ----------
    nodes, node_score
        [nodes + 3] int32, nodes that were scored, and [G, nodes + 3] float32, their scores.
    marked, opened
        [nodes] uint8, nodes whose children are wanted, and those whose children were scored on the
        way.
    rows, step, score
        [points + 3] int32, points that were scored, page by page; [points + 3] float32, the steps
        of their sketches; and [G, points + 3] float32, their scores.
    pages, starts
        [points + 3] int32, the pages of `rows`, and where in it each begins; then the end of the
        last.
    scratch, picked
        [longest list] float32 and int32.
    members, exact
        [points + 3] int32, points whose keys are read, and [1, points + 3] float32, their scores.
    """
