"""Products of keys with queries and with one another, norms and projections."""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import jit, kernel, widen
from methods.icecache.kernels.arrays import NONE


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
    """out[g, i] = queries[g] . matrix[rows[i]], start <= i < stop; three entries from `stop` on are overwritten."""
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
def height_of(tree, row):  # type: ignore[no-untyped-def]
    """The height of a key, from its norm and the largest one."""
    return np.sqrt(max(tree.largest[0] - tree.point[row].norm2, np.float32(0)))


@jit
def affinities(tree, row, rows, count, work):  # type: ignore[no-untyped-def]
    """work.score[0, i] = c^2 <T_K(row), T_K(rows[i])> and work.scratch[i] = row . rows[i]."""
    query = np.empty((1, tree.keys.shape[1]), np.float32)
    for k in range(tree.keys.shape[1]):
        query[0, k] = widen(tree.keys[row, k])
    products(tree.keys, rows, 0, count, query, work.score)
    height = height_of(tree, row)
    for i in range(count):
        work.scratch[i] = work.score[0, i]
        work.score[0, i] += height * height_of(tree, rows[i])
