"""The search of LycheeCluster's index on a CPU, in Numba: all KV heads of a row in one call.

`ClusterIndex.best_chunks` has the same in torch; there a step is ninety small operations, which
cost more than the products. Lists stop here as soon as they hold the tokens wanted.
"""

from __future__ import annotations

import numpy as np

from kvbench.kernels.threads import claim, in_threads
from methods.blocks.kernels import jit, kernel, sort, widen, write_best


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
    centroids, radii, tokens, starts = units
    falling, order = np.empty(len(tokens), np.float32), np.empty(len(tokens), np.int32)
    for unit in range(len(tokens)):
        falling[unit], order[unit] = np.inf, unit
        if tokens[unit]:
            falling[unit] = -_bound(centroids[unit], query, slack, radii[unit])
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
    _, _, starts, members = clusters
    size = starts[cluster + 1] - starts[cluster]
    for i in range(size):
        chunks[i], falling[i] = members[starts[cluster] + i], 0
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
    units
        centroids [H, P, D], radii [H, P], tokens [H, P] and starts [H, P + 1].
    clusters
        centroids [H, L, D], radii [H, L], starts [H, L + 1] and members [H, M].
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
    searched, weight, most_ranked = search
    many, queries_per_head = clusters[1].shape[1], 1 if mean else queries.shape[1]
    chosen, picked, scores = (
        np.empty(many, np.int32),
        np.empty(many, np.int32),
        np.empty(many, np.float32),
    )
    most = clusters[3].shape[1]
    chunks, falling, query = (
        np.empty(most, np.int32),
        np.empty(most, np.float32),
        np.empty(queries.shape[2], np.float32),
    )
    head = claim(claims)
    while head < len(queries):
        head_clusters = clusters[0][head], clusters[1][head], clusters[2][head], clusters[3][head]
        above = units[0][head], units[1][head], units[2][head], units[3][head]
        for asks in range(queries_per_head):
            slack = np.float32(weight) * _load_query(queries[head], asks, mean, query)
            count = _clusters(above, query, slack, searched, room, chosen)
            for i in range(count):
                scores[i] = -np.inf
                if head_clusters[2][chosen[i] + 1] > head_clusters[2][chosen[i]]:
                    scores[i] = _bound(
                        head_clusters[0][chosen[i]], query, slack, head_clusters[1][chosen[i]]
                    )
            ranked_count = min(most_ranked, count)
            ranked, ranked_scores = (
                np.empty(ranked_count, np.int32),
                np.empty(ranked_count, np.float32),
            )
            write_best(scores, count, ranked, ranked_scores, picked)
            out, end = lists[head * queries_per_head + asks], len(fixed)
            for i in range(end):
                out[i] = fixed[i]
            full = end + room
            for i in ranked:
                if i < 0 or end > full:
                    break
                for j in range(
                    _members(head_clusters, chosen[i], codes[head], query, chunks, falling)
                ):
                    first, stop = bounds[chunks[j]], bounds[chunks[j] + 1]
                    if end + stop - first > full:
                        full = -1  # the lists end at the first chunk that is too long
                        break
                    for token in range(first, stop):
                        out[end] = token
                        end += 1
            out[end:] = -1
            lengths[head] = max(lengths[head], end)
        head = claim(claims)
