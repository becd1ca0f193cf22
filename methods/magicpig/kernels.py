"""Hash tables in Numba: keys in buckets, the keys that a query meets in two tables or more, and their weights."""

from __future__ import annotations

import math

import numpy as np

from methods.blocks.kernels import kernel, widen

ENOUGH = 2  # tables in which a key must meet the query to be sampled
LEAST = 1e-4  # added to the likelihood of every key, as in the published code


@kernel
def fill(codes, starts, members):  # type: ignore[no-untyped-def]
    """Sort the keys of every table by their codes.

    Args:
        codes: [T, n] int32, below the number of buckets.
        starts: [T, buckets + 1] int32, zeros; written: where each bucket begins, and where the last one ends.
        members: [T, n] int32, written: the keys of one bucket after the other, ascending.
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
def sample(codes, starts, members, limit, room, first, stop, found, counts, used):  # type: ignore[no-untyped-def]
    """The keys that each query head meets in two tables or more, for the KV heads `first` to `stop` - 1.

    A KV head's query heads look up one table after the other, and end before the one with which they would have found
    more than `room` keys between them.

    Args:
        codes: [Hq, L] int32, the buckets of the queries.
        starts, members: [Hkv, L, buckets + 1] and [Hkv, L, n] int32, as `fill` has written them.
        limit: keys from this one on are not looked for.
        found: [Hq, n] int64, written: the keys, in the order in which they were found.
        counts: [Hq] int64, zeros; written: how many.
        used: [Hkv] int64, written: tables looked up.
    """
    group = len(codes) // len(members)
    before = np.zeros(group, np.int64)
    for kv_head in range(first, stop):
        times, shared = np.zeros((group, members.shape[2]), np.uint8), np.zeros(members.shape[2], np.uint8)
        together, table = 0, 0
        while table < codes.shape[1]:
            for own in range(group):
                head = kv_head * group + own
                before[own] = counts[head]
                bucket = codes[head, table]
                for at in range(starts[kv_head, table, bucket], starts[kv_head, table, bucket + 1]):
                    key = members[kv_head, table, at]
                    if key >= limit:
                        break
                    times[own, key] += times[own, key] < ENOUGH + 1  # no further, whatever the number of tables
                    if times[own, key] == ENOUGH:
                        found[head, counts[head]] = key
                        counts[head] += 1
                        together += shared[key] == 0
                        shared[key] = 1
            if together > room:
                for own in range(group):
                    counts[kv_head * group + own] = before[own]
                break
            table += 1
        used[kv_head] = table


@kernel
def weigh(query, keys, mean, norms, bits, id, first, stop, found, counts, used, weights):  # type: ignore[no-untyped-def]
    """Write the weights of the keys found: minus the logarithm of how likely each was to be.

    A key at an angle of theta shares a code of K bits with p = (1 - theta / pi)^K, and two of L or more with
    1 - (1 - p)^L - L p (1 - p)^(L - 1).

    Args:
        query: [Hq, D] float32.
        keys: [Hkv, S, D] as stored, by token id.
        mean: [Hkv, D] float32, taken from the keys before they were hashed.
        norms: [Hkv, n] float32, of the hashed keys, less their mean.
        id: of the first of them.
        found, counts, used: what `sample` has written, for the KV heads `first` to `stop` - 1.
        weights: [Hq, n] float32, written.
    """
    group = len(query) // len(keys)
    for head in range(first * group, stop * group):
        kv_head, tables = head // group, np.float64(used[head // group])
        asked, squares, shift = query[head], np.float32(0), np.float32(0)
        for d in range(len(asked)):
            squares += asked[d] * asked[d]
            shift += asked[d] * mean[kv_head, d]
        norm = math.sqrt(squares)
        for at in range(counts[head]):
            key = found[head, at]
            product = np.float32(0)
            for d in range(len(asked)):
                product += asked[d] * widen(keys[kv_head, id + key, d])
            both = norm * norms[kv_head, key]
            cosine = (product - shift) / both if both > 0 else 0.0
            met = (1 - math.acos(min(1.0, max(-1.0, cosine))) / math.pi) ** bits
            missed = (1 - met) ** (tables - 1)
            weights[head, at] = -math.log(1 - missed * (1 - met) - tables * met * missed + LEAST)
