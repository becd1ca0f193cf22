"""The search of LycheeCluster's index on a CPU, in Numba: all KV heads of a row in one call.

`ClusterIndex.best_chunks` has the same in torch; there a step is ninety small operations, which
cost more than the products. Lists stop here as soon as they hold the tokens wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, sort, widen, write_best


class Units(NamedTuple):
    """Coarse units of one KV head, or of all, whose dimension then comes first.

    Attributes
    ----------
    centroids, radii
        [P, D] as stored, and [P].
    tokens
        [P], in all chunks of each.
    starts
        [P + 1], unit u has the clusters starts[u] .. starts[u + 1] - 1.
    """

    centroids: Any
    radii: Any
    tokens: Any
    starts: Any


class FineClusters(NamedTuple):
    """Clusters of one KV head, or of all, whose dimension then comes first.

    Attributes
    ----------
    centroids, radii
        [L, D] as stored, and [L].
    starts
        [L + 1], cluster c has the chunks members[starts[c] : starts[c + 1]].
    members
        [M].
    """

    centroids: Any
    radii: Any
    starts: Any
    members: Any


@jit
def _bound(centroid, query, slack, radius):  # type: ignore[no-untyped-def]
    """The largest product that a member of a ball can have with a query: q . centroid +
    |q| radius.
    """
    total = np.float32(0)
    for k in range(len(query)):
        total += widen(centroid[k]) * query[k]
    return total + slack * radius


@jit
def _clusters(units, query, slack, searched, room, chosen):  # type: ignore[no-untyped-def]
    """Put the clusters of the best units in `chosen`; how many.

    Units are added until they hold 2 `room` tokens.
    """
    tokens, starts = units.tokens, units.starts
    falling, order = np.empty(len(tokens), np.float32), np.empty(len(tokens), np.int32)
    for unit in range(len(tokens)):
        falling[unit], order[unit] = np.inf, unit
        if tokens[unit]:
            falling[unit] = -_bound(units.centroids[unit], query, slack, units.radii[unit])
    sort(falling, order, len(order))
    count = total = 0
    for rank in range(len(order)):
        unit = order[rank]
        if rank >= searched and total >= 2 * room:
            break
        total += tokens[unit]
        for cluster in range(starts[unit], starts[unit + 1]):
            chosen[count] = cluster
            count += 1
    return count


@jit
def _members(clusters, cluster, codes, query, chunks, falling):  # type: ignore[no-untyped-def]
    """Put the chunks of a cluster in `chunks`, those nearest to the query first if representatives
    are kept.
    """
    first = clusters.starts[cluster]
    size = clusters.starts[cluster + 1] - first
    for i in range(size):
        chunks[i], falling[i] = clusters.members[first + i], 0
        if len(codes):
            for k in range(len(query)):
                falling[i] -= np.float32(codes[chunks[i], k]) * query[k]
    sort(falling, chunks, size)
    return size


@jit
def _load_query(queries, asks, mean, query):  # type: ignore[no-untyped-def]
    """Put query `asks` of a group [G, D] in `query`, or the mean query; its norm, or the
    mean norm.
    """
    first, stop = (0, len(queries)) if mean else (asks, asks + 1)
    query[:], norms = 0, np.float32(0)
    for g in range(first, stop):
        squares = np.float32(0)
        for k in range(len(query)):
            query[k] += queries[g, k] / np.float32(stop - first)
            squares += queries[g, k] * queries[g, k]
        norms += np.sqrt(squares)
    return norms / np.float32(stop - first)


@kernel
def best_tokens(threads, queries, mean, units, clusters, codes, bounds, search, room, fixed, lists):  # type: ignore[no-untyped-def]
    """`fixed` tokens and, of the best clusters' chunks, as many whole chunks as fit into `room`
    tokens.

    KV heads are shared out between so many threads.

    Parameters
    ----------
    queries
        [H, G, D] float32.
    mean
        the group asks as one, see `ClusterIndex.best_tokens`.
    units, clusters
        `Units` and `FineClusters` of all KV heads, as tuples.
    codes
        [H, M or more, D] int8, or [H, 0, D]: none are kept.
    bounds
        [M + 1], where chunks begin and the last one ends.
    search
        units searched, weight of the radii, most clusters ranked.
    fixed
        [n].
    lists
        [lists, n + room or more] int64; written, trailing -1.

    Returns
    -------
    value
        tokens of the longest list.
    """
    lengths = np.zeros(len(queries), np.int64)
    arguments = queries, mean, units, clusters, codes, bounds, search, room, fixed, lists, lengths
    in_threads(threads, _best_tokens, (np.zeros(1, np.int64), *arguments))
    longest = 0
    for head in range(len(lengths)):
        longest = max(longest, lengths[head])
    return longest


@jit
def _best_tokens(  # type: ignore[no-untyped-def]
    _, claims, queries, mean, units, clusters, codes, bounds, search, room, fixed, lists, lengths
):
    lists_per_head = 1 if mean else queries.shape[1]
    query = np.empty(queries.shape[2], np.float32)
    head = claim(claims)
    while head < len(queries):
        above = Units(units[0][head], units[1][head], units[2][head], units[3][head])
        below = FineClusters(
            clusters[0][head], clusters[1][head], clusters[2][head], clusters[3][head]
        )
        for asks in range(lists_per_head):
            norm = _load_query(queries[head], asks, mean, query)
            slack = np.float32(search[1]) * norm
            ranked = _ranked(above, below, query, slack, search, room)
            out = lists[head * lists_per_head + asks]
            for i in range(len(fixed)):
                out[i] = fixed[i]
            end = _write_tokens(ranked, below, codes[head], query, bounds, room, len(fixed), out)
            out[end:] = -1
            lengths[head] = max(lengths[head], end)
        head = claim(claims)


@jit
def _ranked(units, clusters, query, slack, search, room):  # type: ignore[no-untyped-def]
    """The best clusters of the best units by their bounds, best first; see `best_tokens`."""
    many = len(clusters.radii)
    chosen, picked = np.empty(many, np.int32), np.empty(many, np.int32)
    scores = np.empty(many, np.float32)
    count = _clusters(units, query, slack, search[0], room, chosen)
    for i in range(count):
        cluster = chosen[i]
        scores[i] = -np.inf
        if clusters.starts[cluster + 1] > clusters.starts[cluster]:
            scores[i] = _bound(clusters.centroids[cluster], query, slack, clusters.radii[cluster])
    ranked = np.empty(min(search[2], count), np.int32)
    write_best(scores, count, ranked, np.empty(len(ranked), np.float32), picked)
    for i in range(len(ranked)):
        if ranked[i] >= 0:
            ranked[i] = chosen[ranked[i]]
    return ranked


@jit
def _write_tokens(ranked, clusters, codes, query, bounds, room, end, out):  # type: ignore[no-untyped-def]
    """Write the tokens of the clusters' chunks from out[end] on, as many whole chunks as fit into
    `room` tokens; where they end.
    """
    full = end + room
    chunks = np.empty(len(clusters.members), np.int32)
    falling = np.empty(len(clusters.members), np.float32)
    for cluster in ranked:
        if cluster < 0:
            break
        for j in range(_members(clusters, cluster, codes, query, chunks, falling)):
            first, stop = bounds[chunks[j]], bounds[chunks[j] + 1]
            if end + stop - first > full:
                return end  # at the first chunk that is too long
            for token in range(first, stop):
                out[end] = token
                end += 1
    return end
