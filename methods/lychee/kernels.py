"""The search of LycheeCluster's index on a CPU, in Numba: all KV heads of a row in one call.

`ClusterIndex.best_chunks` has the same in torch; there a step is ninety small operations, which cost more than the
products. Lists stop here as soon as they hold the tokens wanted.
"""

from __future__ import annotations

import numpy as np

from methods.blocks.kernels import jit, kernel, sort, widen, write_best


@jit
def _bound(centroid, query, slack, radius):  # type: ignore[no-untyped-def]
    """The largest product that a member of a ball can have with a query: q . centroid + |q| radius."""
    total = np.float32(0)
    for k in range(len(query)):
        total += widen(centroid[k]) * query[k]
    return total + slack * radius


@jit
def _clusters(units, query, slack, searched, room, chosen):  # type: ignore[no-untyped-def]
    """Put the clusters of the best units in `chosen`; how many. Units are added until they hold 2 `room` tokens."""
    centroids, radii, tokens, starts = units
    falling, order = np.empty(len(tokens), np.float32), np.arange(len(tokens)).astype(np.int32)
    for unit in range(len(tokens)):
        falling[unit] = np.inf
        if tokens[unit]:
            falling[unit] = -_bound(centroids[unit], query, slack, radii[unit])
    sort(falling, order, len(order))
    count = held = 0
    for rank in range(len(order)):
        unit = order[rank]
        if rank >= searched and held >= 2 * room:
            break
        held += tokens[unit]
        for cluster in range(starts[unit], starts[unit + 1]):
            chosen[count] = cluster
            count += 1
    return count


@jit
def _members(clusters, cluster, codes, query, chunks):  # type: ignore[no-untyped-def]
    """Put the chunks of a cluster in `chunks`, those nearest to the query first if representatives are kept."""
    _, _, starts, members = clusters
    size = starts[cluster + 1] - starts[cluster]
    falling = np.zeros(size, np.float32)
    for i in range(size):
        chunks[i] = members[starts[cluster] + i]
        if len(codes):
            for k in range(len(query)):
                falling[i] -= np.float32(codes[chunks[i], k]) * query[k]
    sort(falling, chunks, size)
    return size


@kernel
def best_tokens(queries, norms, units, clusters, codes, bounds, search, room, found):  # type: ignore[no-untyped-def]
    """The tokens of the best clusters' chunks, as many whole chunks as fit into `room`.

    Args:
        queries, norms: [H, Q, D] and [H, Q] float32, see `ClusterIndex.best_chunks`.
        units: centroids [H, P, D], radii [H, P], tokens [H, P] and starts [H, P + 1].
        clusters: centroids [H, L, D], radii [H, L], starts [H, L + 1] and members [H, M].
        codes: [H, M or more, D] int8, or [H, 0, D]: none are kept.
        bounds: [M + 1], where chunks begin and the last one ends.
        search: units searched, weight of the radii, tokens that every chunk has.
        found: [H * Q, room] int64, filled with -1; written.
    """
    searched, weight, shortest = search
    many = clusters[1].shape[1]
    chosen, picked, scores = np.empty(many, np.int32), np.empty(many, np.int32), np.empty(many, np.float32)
    chunks = np.empty(clusters[3].shape[1], np.int32)
    for head in range(queries.shape[0]):
        own = clusters[0][head], clusters[1][head], clusters[2][head], clusters[3][head]
        above = units[0][head], units[1][head], units[2][head], units[3][head]
        for asks in range(queries.shape[1]):
            query, slack = queries[head, asks], np.float32(weight) * norms[head, asks]
            count = _clusters(above, query, slack, searched, room, chosen)
            for i in range(count):
                scores[i] = -np.inf
                if own[2][chosen[i] + 1] > own[2][chosen[i]]:
                    scores[i] = _bound(own[0][chosen[i]], query, slack, own[1][chosen[i]])
            wanted = min(room // shortest + 2, count)
            ranked, ranked_scores = np.empty(wanted, np.int32), np.empty(wanted, np.float32)
            write_best(scores, count, ranked, ranked_scores, picked)
            left, out = room, found[head * queries.shape[1] + asks]
            for i in ranked:
                if i < 0 or left < 0:
                    break
                for j in range(_members(own, chosen[i], codes[head], query, chunks)):
                    first, stop = bounds[chunks[j]], bounds[chunks[j] + 1]
                    if stop - first > left:
                        left = -1  # the lists end at the first chunk that is too long
                        break
                    for token in range(first, stop):
                        out[room - left] = token
                        left -= 1
