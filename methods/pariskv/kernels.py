"""ParisKV's stages for one KV head, in Numba; `vectorised.py` has the same in torch, and says what
they compute.

No fast arithmetic here: both must give the same bits. A zone's codes are read as words of one
subspace; `halves` is the same memory, for the weights after the words. The constants of
`codebook.py` are compiled in, and what is compiled is kept until this file changes.
"""

from __future__ import annotations

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from kvbench.kernels.vectors import inner, kernel
from methods.blocks.kernels import prefetch, sort, write_best
from methods.blocks.lanes import ALL, LANES, at_least, look_up, lowest, lowest_ones, ones
from methods.pariskv import codebook
from methods.pariskv.decoding import EIGHT, terms_of, terms_plainly

SUBSPACE, CENTROIDS = codebook.SUBSPACE, codebook.CENTROIDS
THRESHOLDS, LEVELS = codebook.THRESHOLDS.numpy(), codebook.LEVELS.numpy()
NO_RADIUS, NO_ALIGNMENT = np.float32(codebook.NO_RADIUS), np.float32(codebook.NO_ALIGNMENT)

HALF, ROUND = np.uint32(16), np.uint32(0x7FFF)
# candidates whose codes are fetched early: they lie far apart, waiting for each takes most of the
# time
AHEAD = 24


@inner
def _transform(x):  # type: ignore[no-untyped-def]
    """The Walsh-Hadamard transform, in address."""
    width = 1
    while width < len(x):
        for start in range(0, len(x), 2 * width):
            for i in range(start, start + width):
                low, high = x[i], x[i + width]
                x[i], x[i + width] = low + high, low - high
        width *= 2


@kernel
def encode(keys, signs, start, ids, codes, halves, counts):  # type: ignore[no-untyped-def]
    """Write ids [S, n] uint8 and codes [n, S + S / 2] uint32 of keys [m, head_dim], and add to
    counts [S, 256].

    Parameters
    ----------
    start
        where the first key's go in n.

    Returns
    -------
    value
        The first key that is not finite, or too large to square; -1: there is none.
    """
    x = np.zeros(len(signs), np.float32)
    size = np.empty(SUBSPACE, np.float32)
    for key in range(len(keys)):
        for i in range(keys.shape[1]):
            x[i] = keys[key, i] * signs[i]
        x[keys.shape[1] :] = 0
        _transform(x)
        for subspace in range(len(ids)):
            y = x[subspace * SUBSPACE : (subspace + 1) * SUBSPACE]
            square = y[0] * y[0]
            for j in range(1, SUBSPACE):
                square += y[j] * y[j]
            radius = np.sqrt(square)
            if not radius < np.inf:
                return key
            for j in range(SUBSPACE):
                size[j] = abs(y[j]) / max(radius, NO_RADIUS)
            signed, word = np.uint32(0), np.uint32(0)
            alignment = np.float32(0)
            for j in range(SUBSPACE):
                level = np.uint32(0)
                for threshold in THRESHOLDS:
                    level += np.uint32(size[j] > threshold)
                positive = np.uint32(y[j] >= 0)
                signed |= positive << np.uint32(j)
                word |= (positive << np.uint32(3) | level) << np.uint32(4 * j)
                alignment += LEVELS[level] * size[j]
            ids[subspace, start + key], codes[start + key, subspace] = signed, word
            weight = np.float32(radius / max(alignment, NO_ALIGNMENT)).view(np.uint32)
            rounded = weight + ROUND + (weight >> HALF & np.uint32(1))
            halves[start + key, 2 * len(ids) + subspace] = rounded >> HALF
            counts[subspace, signed] += 1
    return -1


@inner
def _nearest(z, counts, reach, falling, number):  # type: ignore[no-untyped-def]
    """Fill number with the centroids c of largest <z, c> that hold `reach` keys or more, nearest
    first; how many.

    Centroids without keys are left out; equal ones come by number.

    Parameters
    ----------
    z
        [8].
    counts
        [256] keys of each centroid.
    falling, number
        [256] float32 and int32, written.
    """
    score = np.zeros(CENTROIDS, np.float32)
    for j in range(SUBSPACE):
        for i in range(1 << j):
            score[i], score[1 << j | i] = score[i] - z[j], score[i] + z[j]
    largest, least = score[0], np.float32(0)
    for i in range(1, CENTROIDS):
        largest = max(largest, score[i])
    # to be sorted, those beyond half of the largest; if they hold too few, beyond 0, ...
    for half in range(1, -3, -1):
        least, reached = np.float32(half) * largest / np.float32(2), 0
        for i in range(CENTROIDS):
            reached += counts[i] if score[i] >= least else 0
        if reached >= reach:
            break
    filled = 0
    for i in range(CENTROIDS):
        falling[filled], number[filled] = -score[i], i
        filled += score[i] >= least and counts[i] > 0
    sort(falling, number, filled)
    return filled


@inner
def tables(queries, signs, counts, spans, votes_of, rotated):  # type: ignore[no-untyped-def]
    """Make a group's queries [G, head_dim] ready to be looked up.

    Parameters
    ----------
    counts
        [S, 256] keys of each id.
    spans
        [tiers] int64, `Quotas.tiers`.
    votes_of
        [S, 256] uint8, written: the votes of each centroid.
    rotated
        [8, S] float32, written: their mean, coordinate by coordinate of all subspaces.
    """
    z = np.zeros(len(signs), np.float32)
    for i in range(queries.shape[1]):
        total = queries[0, i]
        for g in range(1, queries.shape[0]):
            total += queries[g, i]
        z[i] = np.float32(total / np.float32(queries.shape[0])) * signs[i]
    _transform(z)
    falling, number = np.empty(CENTROIDS, np.float32), np.empty(CENTROIDS, np.int32)
    votes_of[:] = 0
    for subspace in range(counts.shape[0]):
        subvector = z[subspace * SUBSPACE : (subspace + 1) * SUBSPACE]
        nearer = tier = 0
        for rank in range(_nearest(subvector, counts[subspace], spans[-1], falling, number)):
            while tier < len(spans) and nearer >= spans[tier]:
                tier += 1
            votes_of[subspace, number[rank]] = len(spans) - tier
            nearer += counts[subspace, number[rank]]
        for j in range(SUBSPACE):
            rotated[j, subspace] = subvector[j]


@inner
def _having(votes, length, first, least):  # type: ignore[no-untyped-def]
    """Which of the tokens first .. first + 63 of `length` have so many votes: a bit each."""
    word = at_least(votes, first, least)
    return word & ALL >> np.uint64(first + LANES - length) if first + LANES > length else word


@inner
def vote(ids, length, votes_of, most, votes, candidates):  # type: ignore[no-untyped-def]
    """Fill candidates [C] int32 with the tokens that have most votes, ascending; of equal ones the
    earlier.

    Parameters
    ----------
    ids
        [S, n] uint8; n is a multiple of 64.
    length
        tokens in the zone, the first of these.
    votes_of
        [S, 256] uint8, of each centroid.
    most
        votes that a token can have.
    votes
        [n] uint8, written.
    """
    for first in range(0, length, LANES):
        look_up(votes_of, ids, first, votes)
    # votes that a candidate has at least, by bisection; with one more they are too few
    least, more = 0, most
    while least < more:
        middle = (least + more + 1) >> 1
        count = 0
        for first in range(0, length, LANES):
            count += ones(_having(votes, length, first, middle))
        if count >= len(candidates):
            least = middle
        else:
            more = middle - 1
    remaining = len(candidates)  # for those that have just these votes
    for first in range(0, length, LANES):
        remaining -= ones(_having(votes, length, first, least + 1))
    filled = 0
    for first in range(0, length, LANES):
        above = _having(votes, length, first, least + 1)
        equal = _having(votes, length, first, least) & ~above
        if ones(equal) > remaining:
            equal = lowest_ones(equal, remaining)
        remaining -= ones(equal)
        taken = above | equal
        while taken:
            candidates[filled] = first + lowest(taken)
            taken &= taken - np.uint64(1)
            filled += 1


@inner
def rerank(codes, halves, rotated, candidates, estimates, picked, tokens, scores):  # type: ignore[no-untyped-def]
    """Fill tokens, scores [k] with the candidates of the largest estimates of <query, key>, best
    first, then -1.

    Parameters
    ----------
    codes, halves
        [n, ...] uint32 and uint16.
    rotated
        [8, S], see `tables`.
    candidates
        [C] int32, ascending.
    estimates, picked
        [C] float32 and int32, written.
    """
    count, terms = len(candidates), np.empty(rotated.shape[1], np.float32)
    for i in range(count):
        later = candidates[min(i + AHEAD, count - 1)]
        prefetch(codes, later, 0)
        prefetch(codes, later, codes.shape[1] - 1)
        if len(terms) % EIGHT:
            terms_plainly(codes, halves, candidates[i], 0, rotated, terms)
        else:
            for first in range(0, len(terms), EIGHT):
                terms_of(codes, halves, candidates[i], first, rotated, terms)
        total = np.float32(0)
        for term in terms:
            total += term
        estimates[i] = total
    write_best(estimates, count, tokens, scores, picked)
    for i in range(len(tokens)):
        if tokens[i] >= 0:
            tokens[i] = candidates[tokens[i]]


@kernel
def search(threads, zone, queries, signs, rows, spans, retrieved, estimated):  # type: ignore[no-untyped-def]
    """Search the zones of all KV heads of the rows that ask, in so many threads.

    Parameters
    ----------
    zone
        ids [B, Hkv, S, n], codes, halves and counts of all rows.
    queries
        [B, Hkv, G, head_dim].
    rows
        [R, 5], of each row that asks: which, tokens of its zone, the first of these, candidates,
        and tokens to retrieve.
    spans
        [R, tiers] int64, `Quotas.tiers`.
    retrieved
        [R * Hkv, k] int64, written: tokens of the sequence, best first, then -1.
    estimated
        [R * Hkv, k] float32, written: their estimates, then -inf.
    """
    arguments = zone, queries, signs, rows, spans, retrieved, estimated
    in_threads(threads, _search, (np.zeros(1, np.int64), *arguments))


@inner
def _search(_, claims, zone, queries, signs, rows, spans, retrieved, estimated):  # type: ignore[no-untyped-def]
    ids, counts = zone[0], zone[3]
    heads, subspaces = ids.shape[1], ids.shape[2]
    most = rows[:, 3].max()
    votes, votes_of = np.empty(ids.shape[3], np.uint8), np.empty((subspaces, CENTROIDS), np.uint8)
    candidates, picked = np.empty(most, np.int32), np.empty(most, np.int32)
    estimates = np.empty(most, np.float32)
    rotated = np.empty((SUBSPACE, subspaces), np.float32)
    at = claim(claims)
    while at < len(retrieved):
        asks, head = at // heads, at % heads
        row, length = rows[asks, 0], rows[asks, 1]
        voted, k = candidates[: rows[asks, 3]], rows[asks, 4]
        tables(queries[row, head], signs, counts[row, head], spans[asks], votes_of, rotated)
        vote(ids[row, head], length, votes_of, spans.shape[1] * subspaces, votes, voted)
        tokens, scores = np.empty(k, np.int32), np.empty(k, np.float32)
        codes, halves = zone[1][row, head, :length], zone[2][row, head, :length]
        rerank(codes, halves, rotated, voted, estimates, picked, tokens, scores)
        retrieved[at, k:], estimated[at, k:] = -1, -np.inf
        for i in range(k):
            retrieved[at, i] = rows[asks, 2] + tokens[i] if tokens[i] >= 0 else -1
            estimated[at, i] = scores[i]
        at = claim(claims)
