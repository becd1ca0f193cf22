// The search of LycheeCluster's index on a CPU, all KV heads of a row in one call.
//
// `ClusterIndex.best_chunks` has the same in torch; there a step is ninety small operations, which cost more than the
// products. Lists stop here as soon as they hold the tokens wanted.
#include "methods.h"

// Coarse units of one KV head: centroids [P, D]; radii [P]; tokens [P], in all chunks of each; starts [P + 1], unit u
// has the clusters starts[u] .. starts[u + 1] - 1.
struct Units {
    const char* centroids;
    Array<const float, 1> radii;
    Array<const int32_t, 1> tokens, starts;
};

// Clusters of one KV head: centroids [L, D]; radii [L]; starts [L + 1], cluster c has the chunks members[starts[c] :
// starts[c + 1]]; codes [M or more, D], or [0, D]: none are kept.
struct FineClusters {
    const char* centroids;
    Array<const float, 1> radii;
    Array<const int32_t, 1> starts, members;
    Array<const int8_t, 2> codes;
};

// A query, or the mean of a group, and its norm times the weight of the radii.
struct Query {
    std::vector<float> numbers;
    float slack;

    // Query `list` of a group [G, D], or their mean and their mean norm.
    Query(Array<const float, 2> group, int64_t list, bool mean, float weight) : numbers(group.sizes[1]) {
        int64_t first = mean ? 0 : list, stop = mean ? group.size() : list + 1;
        float norms = 0, count = stop - first;
        for (int64_t g = first; g < stop; g++) {
            const float* query = group[g].data;
            for (size_t k = 0; k < numbers.size(); k++) numbers[k] += query[k] / count;
            norms += std::sqrt(dot(query, query, numbers.size()));
        }
        slack = weight * (norms / count);
    }

    // The largest product that a member of ball i can have with it: q . centroid + |q| radius.
    template <class Number>
    float bound(Number, const char* centroids, Array<const float, 1> radii, int64_t i) const {
        int64_t size = numbers.size();
        return dot<Number>(centroids + i * size * Number::SIZE, numbers.data(), size) + slack * radii[i];
    }
};

// The clusters of the best units, which are added until they hold 2 `room` tokens.
template <class Number>
std::vector<int32_t> clusters_of_best(Number number, const Units& units, const Query& query, int64_t searched,
                                      int64_t room) {
    int64_t count = units.tokens.size(), total = 0;
    std::vector<float> falling(count, INFINITY);
    std::vector<int32_t> order(count), chosen;
    std::iota(order.begin(), order.end(), 0);
    for (int64_t unit = 0; unit < count; unit++)
        if (units.tokens[unit]) falling[unit] = -query.bound(number, units.centroids, units.radii, unit);
    sort(falling.data(), order.data(), count);
    for (int64_t rank = 0; rank < count && (rank < searched || total < 2 * room); rank++) {
        int32_t unit = order[rank];
        total += units.tokens[unit];
        for (int32_t cluster = units.starts[unit]; cluster < units.starts[unit + 1]; cluster++)
            chosen.push_back(cluster);
    }
    return chosen;
}

// The best of some clusters by their bounds, best first.
template <class Number>
std::vector<int32_t> ranked(Number number, const FineClusters& clusters, const std::vector<int32_t>& chosen,
                            const Query& query, int64_t most) {
    int64_t count = chosen.size(), kept = std::min(most, count);
    std::vector<float> scores(count, -INFINITY), values(kept);
    std::vector<int32_t> order(kept);
    for (int64_t i = 0; i < count; i++)
        if (clusters.starts[chosen[i] + 1] > clusters.starts[chosen[i]])
            scores[i] = query.bound(number, clusters.centroids, clusters.radii, chosen[i]);
    write_best(scores.data(), count, kept, order.data(), values.data());
    while (!order.empty() && order.back() < 0) order.pop_back();
    for (int32_t& cluster : order) cluster = chosen[cluster];
    return order;
}

// The chunks of a cluster, those nearest to the query first if representatives are kept.
static std::vector<int32_t> chunks_of(const FineClusters& clusters, int32_t cluster, const Query& query) {
    std::vector<int32_t> chunks(clusters.members.data + clusters.starts[cluster],
                                clusters.members.data + clusters.starts[cluster + 1]);
    std::vector<float> falling(chunks.size());
    for (size_t i = 0; i < chunks.size() && clusters.codes.size(); i++) {
        const int8_t* code = clusters.codes[chunks[i]].data;
        for (size_t k = 0; k < query.numbers.size(); k++) falling[i] -= code[k] * query.numbers[k];
    }
    sort(falling.data(), chunks.data(), chunks.size());
    return chunks;
}

// Write the tokens of the clusters' chunks from out[end] on, as many whole chunks as fit into `room` tokens, up to the
// first that does not; where they end.
static int64_t write_tokens(const std::vector<int32_t>& best, const FineClusters& clusters, const Query& query,
                            Array<const int64_t, 1> bounds, int64_t room, int64_t end, int64_t* out) {
    int64_t full = end + room;
    for (int32_t cluster : best)
        for (int32_t chunk : chunks_of(clusters, cluster, query)) {
            int64_t first = bounds[chunk], stop = bounds[chunk + 1];
            if (end + stop - first > full) return end;
            std::iota(out + end, out + end + stop - first, first);
            end += stop - first;
        }
    return end;
}

// `fixed` [n] tokens and, of the best clusters' chunks, as many whole chunks as fit into `room` tokens; KV heads are
// shared out between so many threads. queries [H, G, D]; mean: the group asks as one, see `ClusterIndex.best_tokens`;
// then `Units` and `FineClusters` of all KV heads; bounds [M + 1], where chunks begin and the last one ends; units
// searched; weight of the radii; most clusters ranked; lists [lists, n + room or more], written, trailing -1. Returns
// tokens of the longest list.
static int64_t best_tokens(int64_t threads, Array<const float, 3> queries, int64_t mean, Stored<3> unit_centroids,
                           Array<const float, 2> unit_radii, Array<const int32_t, 2> unit_tokens,
                           Array<const int32_t, 2> unit_starts, Stored<3> centroids, Array<const float, 2> radii,
                           Array<const int32_t, 2> starts, Array<const int32_t, 2> members,
                           Array<const int8_t, 3> codes, Array<const int64_t, 1> bounds, int64_t searched,
                           double weight, int64_t most, int64_t room, Array<const int64_t, 1> fixed,
                           Array<int64_t, 2> lists) {
    int64_t per_head = mean ? 1 : queries.sizes[1];
    std::vector<int64_t> longest(queries.size());
    Claims claims(queries.size());
    as_stored(centroids, [&](auto number) {
        using Number = decltype(number);
        Rows<Number, 3> of_units{unit_centroids}, of_clusters{centroids};
        in_threads(threads, [&](int) {
            for (int64_t head; claims.take(head);) {
                Units above{of_units.row(head, 0), unit_radii[head], unit_tokens[head], unit_starts[head]};
                FineClusters below{of_clusters.row(head, 0), radii[head], starts[head], members[head], codes[head]};
                for (int64_t list = 0; list < per_head; list++) {
                    Query query(queries[head], list, mean, weight);
                    auto chosen = clusters_of_best(number, above, query, searched, room);
                    auto best = ranked(number, below, chosen, query, most);
                    Array<int64_t, 1> out = lists[head * per_head + list];
                    std::copy_n(fixed.data, fixed.size(), out.data);
                    int64_t end = write_tokens(best, below, query, bounds, room, fixed.size(), out.data);
                    std::fill(out.data + end, out.end(), -1);
                    longest[head] = std::max(longest[head], end);
                }
            }
        });
    });
    return *std::max_element(longest.begin(), longest.end());
}
KERNEL(best_tokens)
