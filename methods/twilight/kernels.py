"""Twilight's pruning on a CPU, in Numba: all query heads in one call."""

from __future__ import annotations

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, sort


@kernel
def top_p(threads, query, codes, steps, index, p, found, kept):  # type: ignore[no-untyped-def]
    """Write the fewest tokens whose estimated weights sum to p or more, for all query heads, in so many threads.

    Args:
        query: [B, Hq, D] float32, times the scaling.
        codes: [B, Hkv, S, D / 2] uint8, two numbers each, the first in the low half.
        steps: [B, Hkv, S, 2] float32, the step and the smallest number of each key.
        index: [B, Hs, M] int64 token ids, trailing -1.
        p: [B] float64, of each row.
        found: [B * Hq, M] int64, written: the largest weight first, trailing -1.
        kept: [B * Hq] int64, written: how many.
    """
    in_threads(threads, _top_p, (np.zeros(1, np.int64), query, codes, steps, index, p, found, kept))


@jit
def _top_p(_, claims, query, codes, steps, index, p, found, kept):  # type: ignore[no-untyped-def]
    query_heads, count = query.shape[1], index.shape[2]
    weights, order = np.empty(count, np.float32), np.empty(count, np.int32)
    low, high = np.empty(codes.shape[3], np.float32), np.empty(codes.shape[3], np.float32)
    at = claim(claims)
    while at < len(found):
        row, head = at // query_heads, at % query_heads
        kv_head, tokens = head * codes.shape[1] // query_heads, index[row, head * index.shape[1] // query_heads]
        whole = np.float32(0)
        for k in range(len(low)):
            low[k], high[k] = query[row, head, 2 * k], query[row, head, 2 * k + 1]
            whole += low[k] + high[k]
        asked, most = 0, np.float32(-np.inf)
        while asked < count and tokens[asked] >= 0:
            token = tokens[asked]
            coded, total = codes[row, kv_head, token], np.float32(0)
            for k in range(len(low)):
                total += np.float32(coded[k] & 15) * low[k] + np.float32(coded[k] >> 4) * high[k]
            weights[asked] = steps[row, kv_head, token, 0] * total + steps[row, kv_head, token, 1] * whole
            most, order[asked] = max(most, weights[asked]), asked
            asked += 1
        held = 0.0
        for i in range(asked):
            weights[i] = -np.exp(weights[i] - most)
            held -= weights[i]
        sort(weights, order, asked)
        enough, found[at] = p[row] * held, -1
        held, used = 0.0, 0
        while used < asked and (p[row] == 1 or held < enough):
            found[at, used] = tokens[order[used]]
            held -= weights[used]
            used += 1
        kept[at] = used
        at = claim(claims)
