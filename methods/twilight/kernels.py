"""Twilight's pruning on a CPU, in Numba: all query heads in one call."""

from __future__ import annotations

import numpy as np

from kvbench.kernels import vectors
from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, sort
from methods.blocks.softcap import capped

LEVELS = np.float32(15)
LEAST = np.float32(1e-9)


# without fast arithmetic: the codes are those of `methods.twilight.estimate.quantised`
@vectors.kernel
def write(keys, tokens, codes, steps):  # type: ignore[no-untyped-def]
    """Code a key of each row and KV head.

    Parameters
    ----------
    keys
        [B, Hkv, D] float32.
    tokens
        [B], whose they are.
    codes, steps
        as of `top_p`; written.
    """
    for row in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            key, coded = keys[row, head], codes[row, head, tokens[row]]
            low, high = key.min(), key.max()
            step = max((high - low) / LEVELS, LEAST)
            for k in range(len(coded)):
                first = np.rint((key[2 * k] - low) / step)
                second = np.rint((key[2 * k + 1] - low) / step)
                coded[k] = np.uint8(min(first, LEVELS)) | np.uint8(min(second, LEVELS)) << 4
            steps[row, head, tokens[row], 0], steps[row, head, tokens[row], 1] = step, low


@kernel
def top_p(threads, query, codes, steps, index, softcap, p, ids, counted):  # type: ignore[no-untyped-def]
    """Write the fewest tokens whose estimated weights sum to p or more, for all query heads, in so
    many threads.

    Parameters
    ----------
    query
        [B, Hq, D] float32, times the scaling.
    codes
        [B, Hkv, S, D / 2] uint8, two numbers each, the first in the low half.
    steps
        [B, Hkv, S, 2] float32, the step and the smallest number of each key.
    index
        [B, Hs, M] int64 token ids, trailing -1.
    softcap
        of the logits; 0: none.
    p
        [B] float64, of each row.
    ids
        [B, Hq, M] int64, written: the largest weight first, trailing -1.
    counted
        [2] int64, to which tokens weighed and tokens kept are added.

    Returns
    -------
    value
        tokens of the longest list.
    """
    counts = np.zeros((2, ids.shape[0] * ids.shape[1]), np.int64)
    lists = query, codes, steps, index, np.float32(softcap), p, ids, counts
    in_threads(threads, _top_p, (np.zeros(1, np.int64), *lists))
    counted[0] += counts[0].sum()
    counted[1] += counts[1].sum()
    return counts[1].max()


@jit
def _top_p(_, claims, query, codes, steps, index, softcap, p, ids, counts):  # type: ignore[no-untyped-def]
    query_heads, count = query.shape[1], index.shape[2]
    weights, order = np.empty(count, np.float32), np.empty(count, np.int32)
    low, high = np.empty(codes.shape[3], np.float32), np.empty(codes.shape[3], np.float32)
    at = claim(claims)
    while at < counts.shape[1]:
        row, head = at // query_heads, at % query_heads
        kv_head = head * codes.shape[1] // query_heads
        tokens = index[row, head * index.shape[1] // query_heads]
        head_codes, head_steps = codes[row, kv_head], steps[row, kv_head]
        whole = np.float32(0)
        for k in range(len(low)):
            low[k], high[k] = query[row, head, 2 * k], query[row, head, 2 * k + 1]
            whole += low[k] + high[k]
        valid, most = 0, np.float32(-np.inf)
        while valid < count and tokens[valid] >= 0:
            token = tokens[valid]
            coded, total = head_codes[token], np.float32(0)
            for k in range(len(low)):
                total += np.float32(coded[k] & 15) * low[k] + np.float32(coded[k] >> 4) * high[k]
            logit = head_steps[token, 0] * total + head_steps[token, 1] * whole
            weights[valid] = capped(logit, softcap)
            most, order[valid] = max(most, weights[valid]), valid
            valid += 1
        mass = 0.0
        for i in range(valid):
            weights[i] = -np.exp(weights[i] - most)
            mass -= weights[i]
        sort(weights, order, valid)
        enough, mass = p[row] * mass, 0.0
        used = 0
        while used < valid and (p[row] == 1 or mass < enough):
            ids[row, head, used] = tokens[order[used]]
            mass -= weights[used]
            used += 1
        ids[row, head, used:] = -1
        counts[0, at], counts[1, at] = valid, used
        at = claim(claims)
