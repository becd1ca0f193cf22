"""Product quantisation on a CPU, in Numba: codes of new keys, and attention estimated
from codes.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import jit, kernel
from methods.blocks.softcap import capped

LOWEST = np.float32(-87)  # exp of what is less is about 1e-38
LOG2E = np.float32(1.44269504088896341)
# the first is exact in a few bits, so that n times it is, too
LN2 = np.float32(0.693359375), np.float32(-2.12194440e-4)
FACTORS = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)


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
def attention(query, tables, codes, row, first, scaling, softcap, received):  # type: ignore[no-untyped-def]
    """The attention that tokens get by their codes, summed over the query heads of a group.

    Parameters
    ----------
    query
        [Hkv, G, m, w] float32.
    tables
        as of `code`.
    codes
        [B, Hkv, m, S] uint8, of each token, of which `row` and those from `first` on are meant.
    scaling, softcap
        of the logits; 0: no cap.
    received
        [Hkv, n] float32; written.
    """
    group, width = query.shape[1], query.shape[3]
    count = received.shape[1]
    products, weights = np.empty(tables.shape[2], np.float32), np.empty(count, np.float32)
    for head in range(len(query)):
        received[head] = 0
        for g in range(group):
            weights[:] = 0
            for part in range(query.shape[2]):
                for centroid in range(len(products)):
                    product = np.float32(0)
                    for j in range(width):
                        product += query[head, g, part, j] * tables[head, part, centroid, j]
                    products[centroid] = product * np.float32(scaling)
                token_codes = codes[row, head, part, first : first + count]
                for i in range(count):
                    weights[i] += products[token_codes[i]]
            for i in range(count if softcap > 0 else 0):
                weights[i] = capped(weights[i], np.float32(softcap))
            share = 1 / _exponentials(weights, count)
            for i in range(count):
                received[head, i] += share * weights[i]


@jit
def _exponentials(logits, count):  # type: ignore[no-untyped-def]
    """Put exp of what each of `count` logits is below the largest in its place, and return their
    sum.

    2^n exp(r), n = x / ln 2 to the nearest, r = x - n ln 2: Cephes' expf, in loops that LLVM
    vectorises.
    """
    most = logits[0]
    for i in range(count):
        most = max(most, logits[i])
    powers = np.empty(count, np.int32)
    for i in range(count):
        below = max(logits[i] - most, LOWEST)
        nearest = np.floor(below * LOG2E + np.float32(0.5))
        powers[i] = (np.int32(nearest) + np.int32(127)) << np.int32(23)
        rest = below - nearest * LN2[0] - nearest * LN2[1]
        polynomial = FACTORS[0]
        for factor in FACTORS[1:]:
            polynomial = polynomial * rest + factor
        logits[i] = polynomial * rest * rest + rest + np.float32(1)
    total = np.float32(0)
    scales = powers.view(np.float32)
    for i in range(count):
        logits[i] *= scales[i]
        total += logits[i]
    return total
