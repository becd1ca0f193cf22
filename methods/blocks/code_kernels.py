"""Product quantisation on a CPU, in Numba: codes of new keys, and attention estimated
from codes.
"""

from __future__ import annotations

import numpy as np

from kvbench.kernels.vectors import LANES, exponential, load, plus, splat, store, sum_of
from methods.blocks.kernels import jit, kernel


@kernel
def code(keys, tables, codes):  # type: ignore[no-untyped-def]
    """The nearest centroid of each part of a key, by Euclidean distance; of equal ones the first.

    Parameters
    ----------
    keys
        [Hkv, m, w] float32.
    tables
        [Hkv, m, K, w] float32, the centroids.
    codes
        [Hkv, m] uint8; written.
    """
    for head in range(len(keys)):
        for part in range(keys.shape[1]):
            nearest, most = 0, np.float32(-np.inf)
            for centroid in range(tables.shape[2]):
                center, near = tables[head, part, centroid], np.float32(0)
                for j in range(len(center)):
                    near += (keys[head, part, j] - np.float32(0.5) * center[j]) * center[j]
                if near > most:
                    nearest, most = centroid, near
            codes[head, part] = nearest


@kernel
def attention(query, tables, codes, row, first, scaling, received):  # type: ignore[no-untyped-def]
    """The attention that tokens get by their codes, summed over the query heads of a group.

    Parameters
    ----------
    query
        [Hkv, G, m, w] float32.
    tables
        as of `code`.
    codes
        [B, Hkv, m, S] uint8, of each token, of which `row` and those from `first` on are meant.
    scaling
        of the logits.
    received
        [Hkv, n] float32; written.
    """
    group, width = query.shape[1], query.shape[3]
    count = received.shape[1]
    products, weights = np.empty(tables.shape[2], np.float32), np.empty(count + LANES, np.float32)
    for head in range(len(query)):
        received[head] = 0
        for g in range(group):
            weights[:count], weights[count:] = 0, -np.inf
            for part in range(query.shape[2]):
                for centroid in range(len(products)):
                    product = np.float32(0)
                    for j in range(width):
                        product += query[head, g, part, j] * tables[head, part, centroid, j]
                    products[centroid] = product * np.float32(scaling)
                token_codes = codes[row, head, part, first : first + count]
                for i in range(count):
                    weights[i] += products[token_codes[i]]
            share = 1 / _exponentials(weights, count)
            for i in range(count):
                received[head, i] += share * weights[i]


@jit
def _exponentials(logits, count):  # type: ignore[no-untyped-def]
    """Put exp of what each of `count` logits is below the largest in its place, and return their
    sum.

    They are followed by a vector of -inf.
    """
    most = logits[0]
    for i in range(count):
        most = max(most, logits[i])
    below, total = splat(-most), splat(np.float32(0))
    for at in range(logits.ctypes.data, logits.ctypes.data + 4 * count, 4 * LANES):
        weight = exponential(plus(load(at), below))
        store(at, weight)
        total = plus(total, weight)
    return sum_of(total)
