"""Hash tables in Numba: keys in buckets, the keys that a query meets in two tables or more, and
their weights.
"""

from __future__ import annotations

import math

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, prefetch, widen

ENOUGH = 2  # tables in which a key must meet the query to be sampled
AHEAD = 8  # tables whose buckets are on their way to the cache while one is looked up
LEAST = 1e-4  # added to the likelihood of every key, as in the published code


@kernel
def fill(codes, starts, members):  # type: ignore[no-untyped-def]
    """Sort the keys of every table by their codes.

    Parameters
    ----------
    codes
        [T, n] int32, below the number of buckets.
    starts
        [T, buckets + 1] int32, zeros; written: where each bucket begins, and where the last one
        ends.
    members
        [T, n] int32, written: the keys of one bucket after the other, ascending.
    """
    for table in range(len(codes)):
        begin = starts[table]
        for key in range(codes.shape[1]):
            begin[codes[table, key] + 1] += 1
        for bucket in range(1, len(begin)):
            begin[bucket] += begin[bucket - 1]
        free = begin.copy()
        for key in range(codes.shape[1]):
            bucket = codes[table, key]
            members[table, free[bucket]] = key
            free[bucket] += 1


@kernel
def sample(threads, products, query, keys, tables, always, limit, room, ids, weights, counts):  # type: ignore[no-untyped-def]
    """The tokens that each query head attends, and what is added to their logits, in so many
    threads.

    First those that are always attended, then the keys that it meets in two tables or more. A KV
    head's query heads look up one table after the other, and end before the one with which they
    would have found more than `room` keys between them.

    Parameters
    ----------
    products
        [Hq, L, K or more] float32, of the queries with the directions of the tables.
    query
        [Hq, D] float32.
    keys
        [Hkv, S, D] as stored, by token id.
    tables
        starts and members, [Hkv, L, buckets + 1] and [Hkv, L, n] int32, as `fill` has written them;
        the mean [Hkv, D] float32, taken from the keys before they were hashed, and the norms [Hkv,
        n] of what was; K; and the token id of the first of them.
    always
        tokens 0 to the first of these three numbers - 1 are always attended, and from the second to
        the third - 1.
    limit
        keys from this one on are not looked for.
    ids, weights
        [Hq, always + n] int64 and float32; written up to the longest list, trailing -1 and 0.
    counts
        [Hq] int64, zeros; written: keys sampled.

    Returns
    -------
    value
        tokens of the longest list.
    """
    wanted = products, query, keys, tables, always, limit, room
    in_threads(threads, _sample, (np.zeros(1, np.int64), *wanted, ids, weights, counts))
    first = always[0] + always[2] - always[1]
    longest = first + counts.max()
    for head in range(len(counts)):
        end = first + counts[head]
        ids[head, end:longest] = -1
        weights[head, end:longest] = 0
    return longest


@jit
def _sample(_, claims, products, query, keys, tables, always, limit, room, ids, weights, counts):  # type: ignore[no-untyped-def]
    members, (sinks, start, length) = tables[1], always
    group, free = len(query) // len(members), sinks + length - start
    codes = np.empty((group, members.shape[1]), np.int32)
    times = np.empty((group, members.shape[2]), np.uint8)
    kv_head = claim(claims)
    while kv_head < len(members):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for head in range(heads.start, heads.stop):
            for token in range(sinks):
                ids[head, token] = token
            for token in range(start, length):
                ids[head, sinks + token - start] = token
            weights[head, :free] = 0
        _code(products[heads], tables[4], codes)
        stored, many = keys[kv_head], counts[heads]
        sampled = ids[heads, free:]
        used = _look_up(codes, kv_head, stored, tables, limit, room, times, sampled, many)
        likely = weights[heads, free:]
        _weigh(query[heads], kv_head, stored, tables, used, many, sampled, likely)
        kv_head = claim(claims)


@jit
def _code(products, bits, codes):  # type: ignore[no-untyped-def]
    """Codes [G, L]: the signs of the first `bits` of products [G, L, K]."""
    for head in range(codes.shape[0]):
        for table in range(codes.shape[1]):
            code = np.int32(0)
            for bit in range(bits):
                code |= np.int32(products[head, table, bit] > 0) << np.int32(bit)
            codes[head, table] = code


@jit
def _look_up(codes, kv_head, keys, tables, limit, room, times, ids, counts):  # type: ignore[no-untyped-def]
    """The keys that queries with codes [G, L] meet, and how many; returns the tables that were
    looked up.
    """
    starts, members = tables[0][kv_head], tables[1][kv_head]
    group, line = len(codes), 64 // keys.itemsize
    shared, before = np.zeros(members.shape[1], np.uint8), np.zeros(group, np.int64)
    union = 0
    times[:] = 0
    for table in range(len(members)):
        for head in range(group):
            if table + 2 * AHEAD < len(members):
                prefetch(starts, table + 2 * AHEAD, codes[head, table + 2 * AHEAD])
            if table + AHEAD < len(members):
                prefetch(members, table + AHEAD, starts[table + AHEAD, codes[head, table + AHEAD]])
            before[head] = counts[head]
            bucket = codes[head, table]
            for at in range(starts[table, bucket], starts[table, bucket + 1]):
                key = members[table, at]
                if key >= limit:
                    break
                # no further, whatever the number of tables
                times[head, key] += times[head, key] < ENOUGH + 1
                if times[head, key] == ENOUGH:
                    ids[head, counts[head]] = key
                    counts[head] += 1
                    union += shared[key] == 0
                    shared[key] = 1
                    for d in range(0, keys.shape[1], line):
                        prefetch(keys, tables[5] + key, d)
        if union > room:
            counts[:] = before
            return table
    return len(members)


@jit
def _weigh(query, kv_head, keys, tables, used, counts, ids, weights):  # type: ignore[no-untyped-def]
    """Make tokens of the keys found, and write minus the logarithm of how likely each was to be.

    A key at an angle of theta shares a code of K bits with p = (1 - theta / pi)^K, and two of L or
    more with 1 - (1 - p)^L - L p (1 - p)^(L - 1).
    """
    mean, norms = tables[2][kv_head], tables[3][kv_head]
    bits, first = tables[4], tables[5]
    met, missed = np.empty(counts.max()), np.empty(counts.max())
    agree = np.empty(counts.max())
    for head in range(len(query)):
        head_query, count = query[head], counts[head]
        squares, shift = np.float32(0), np.float32(0)
        for d in range(len(head_query)):
            squares += head_query[d] * head_query[d]
            shift += head_query[d] * mean[d]
        norm = math.sqrt(squares)
        for at in range(count):
            key = ids[head, at]
            key_row, product = keys[first + key], np.float32(0)
            for d in range(len(head_query)):
                product += head_query[d] * widen(key_row[d])
            both = norm * norms[key]
            cosine = (product - shift) / both if both > 0 else 0.0
            agree[at] = 1 - math.acos(min(1.0, max(-1.0, cosine))) / math.pi
            ids[head, at] = first + key
        _raise(agree[:count], bits, met[:count])
        for at in range(count):
            agree[at] = 1 - met[at]
        _raise(agree[:count], used - 1, missed[:count])
        for at in range(count):
            likely = 1 - missed[at] * (1 - met[at]) - used * met[at] * missed[at]
            weights[head, at] = -math.log(likely + LEAST)


@jit
def _raise(numbers, exponent, powers):  # type: ignore[no-untyped-def]
    """Write powers of numbers, which are squared meanwhile: one call of `pow` a number takes longer
    than all else.
    """
    powers[:] = 1
    while exponent > 0:
        for at in range(len(numbers)):
            powers[at] *= numbers[at] if exponent & 1 else 1.0
            numbers[at] *= numbers[at]
        exponent >>= 1
