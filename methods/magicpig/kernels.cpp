// Hash tables: keys in buckets, the keys that a query meets in two tables or more, and their weights.
#include "methods.h"

constexpr int ENOUGH = 2;          // tables in which a key must meet the query to be sampled
constexpr int64_t AHEAD = 8;       // tables whose buckets are on their way to the cache while one is looked up
constexpr double LEAST = 1e-4;     // added to the likelihood of every key, as in the published code
constexpr double PI = 3.14159265358979323846;

// Sort the keys of every table by their codes [T, n], below the number of buckets. Written: starts [T, buckets + 1],
// zeros: where each bucket begins, and where the last one ends; members [T, n], the keys of one bucket after the other,
// ascending.
static int64_t fill(Array<const int32_t, 2> codes, Array<int32_t, 2> starts, Array<int32_t, 2> members) {
    for (int64_t table = 0; table < codes.size(); table++) {
        Array<int32_t, 1> begin = starts[table];
        Array<const int32_t, 1> code = codes[table];
        for (int32_t bucket : code) begin[bucket + 1]++;
        for (int64_t bucket = 1; bucket < begin.size(); bucket++) begin[bucket] += begin[bucket - 1];
        std::vector<int32_t> free(begin.begin(), begin.end());
        for (int64_t key = 0; key < code.size(); key++) members[table][free[code[key]]++] = key;
    }
    return 0;
}
KERNEL(fill)

// The tables of one KV head: starts [L, buckets + 1] and members [L, n] as `fill` has written them; the mean [D], taken
// from the keys before they were hashed, and the norms [n] of what was; K; and the token id of the first key.
struct Tables {
    Array<const int32_t, 2> starts, members;
    const float *mean, *norms;
    int64_t bits, first;
};

// What the query heads of a KV head have sampled: ids and weights of each from its `free` first ones on, and how many.
struct Sampled {
    Array<int64_t, 2> ids;
    Array<float, 2> weights;
    int64_t free, *counts;
};

// The keys before `limit` that queries with codes [G, L] meet; returns the tables that were looked up.
static int64_t look_up(const Tables& tables, const std::vector<int32_t>& codes, int64_t group, const char* keys,
                       int64_t key_size, int64_t limit, int64_t room, const Sampled& sampled) {
    int64_t many = tables.members.size(), count = tables.members.sizes[1], distinct = 0;
    std::vector<uint8_t> times(group * count), shared(count);
    std::vector<int64_t> before(group);
    for (int64_t table = 0; table < many; table++) {
        for (int64_t head = 0; head < group; head++) {
            const int32_t* code = &codes[head * many + table];
            if (table + 2 * AHEAD < many)
                fetch(reinterpret_cast<const char*>(&tables.starts[table + 2 * AHEAD][code[2 * AHEAD]]));
            if (table + AHEAD < many)
                fetch(reinterpret_cast<const char*>(
                    tables.members[table + AHEAD].data + tables.starts[table + AHEAD][code[AHEAD]]));
            before[head] = sampled.counts[head];
            const int32_t *start = &tables.starts[table][*code], *members = tables.members[table].data;
            for (const int32_t* at = members + start[0]; at < members + start[1] && *at < limit; at++) {
                uint8_t& met = times[head * count + *at];
                met += met < ENOUGH + 1;  // no further, whatever the number of tables
                if (met != ENOUGH) continue;
                sampled.ids[head][sampled.free + sampled.counts[head]++] = *at;
                distinct += !shared[*at], shared[*at] = 1;
                fetch_all(keys + (tables.first + *at) * key_size, key_size);
            }
        }
        if (distinct > room) {
            std::copy(before.begin(), before.end(), sampled.counts);
            return table;
        }
    }
    return many;
}

// The power of a number: a call of `pow` a number takes longer than all else.
static double power(double number, int64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent >>= 1, number *= number)
        if (exponent & 1) result *= number;
    return result;
}

// Make tokens of the keys that a query [D] has met, and write minus the logarithm of how likely each was to be.
//
// A key at an angle of theta shares a code of K bits with p = (1 - theta / pi)^K, and two of L or more with
// 1 - (1 - p)^L - L p (1 - p)^(L - 1).
template <class Number>
void weigh(Number, const Tables& tables, Array<const float, 1> query, const char* keys, int64_t used, int64_t count,
           int64_t* ids, float* weights) {
    int64_t size = query.size();
    double norm = std::sqrt(dot(query.data, query.data, size));
    float shift = dot(tables.mean, query.data, size);
    for (int64_t at = 0; at < count; at++) {
        double both = norm * tables.norms[ids[at]];
        ids[at] += tables.first;
        float product = dot<Number>(keys + ids[at] * size * Number::SIZE, query.data, size);
        double cosine = both > 0 ? (product - shift) / both : 0;
        double met = power(1 - std::acos(std::min(1.0, std::max(-1.0, cosine))) / PI, tables.bits);
        double missed = power(1 - met, used - 1);
        double likely = 1 - missed * (1 - met) - used * met * missed;
        weights[at] = -std::log(likely + LEAST);
    }
}

// The tokens that each query head attends, and what is added to their logits, in so many threads.
//
// First those that are always attended, tokens 0 .. sinks - 1 and start .. length - 1; then the keys before `limit`
// that it meets in two tables or more. A KV head's query heads look up one table after the other, and end before the
// one with which they would have found more than `room` keys between them.
//
// products [Hq, L, K or more], of the queries with the directions of the tables; query [Hq, D]; keys [Hkv, S, D], by
// token id; then `Tables` of all KV heads. Written up to the longest list: ids, weights [Hq, always + n], trailing -1
// and 0; and counts [Hq], zeros: keys sampled. Returns tokens of the longest list.
static int64_t sample(int64_t threads, Array<const float, 3> products, Array<const float, 2> query, Stored<3> keys,
                      Array<const int32_t, 3> starts, Array<const int32_t, 3> members, Array<const float, 2> mean,
                      Array<const float, 2> norms, int64_t bits, int64_t first, int64_t sinks, int64_t start,
                      int64_t length, int64_t limit, int64_t room, Array<int64_t, 2> ids, Array<float, 2> weights,
                      Array<int64_t, 1> counts) {
    int64_t group = query.size() / members.size(), many = members.sizes[1], free = sinks + length - start;
    Claims claims(members.size());
    as_stored(keys, [&](auto number) {
        using Number = decltype(number);
        Rows<Number, 3> rows{keys};
        in_threads(threads, [&](int) {
            for (int64_t kv_head; claims.take(kv_head);) {
                Tables tables{starts[kv_head], members[kv_head], mean[kv_head].data, norms[kv_head].data, bits, first};
                int64_t begin = kv_head * group;
                Sampled sampled{{ids[begin].data, {group, ids.sizes[1]}}, {weights[begin].data, {group, ids.sizes[1]}},
                                free, counts.data + begin};
                std::vector<int32_t> codes(group * many);
                for (int64_t at = 0; at < group * many; at++) {
                    const float* product = products[begin + at / many][at % many].data;
                    for (int64_t bit = 0; bit < bits; bit++) codes[at] |= (product[bit] > 0) << bit;
                }
                const char* stored = rows.row(kv_head, 0);
                int64_t size = query.sizes[1] * Number::SIZE;
                int64_t used = look_up(tables, codes, group, stored, size, limit, room, sampled);
                for (int64_t head = 0; head < group; head++) {
                    int64_t* out = sampled.ids[head].data;
                    float* added = sampled.weights[head].data;
                    std::iota(out, out + sinks, 0);
                    std::iota(out + sinks, out + free, start);
                    std::fill(added, added + free, 0.0f);
                    weigh(number, tables, query[begin + head], stored, used, sampled.counts[head], out + free,
                          added + free);
                }
            }
        });
    });
    int64_t longest = free + *std::max_element(counts.begin(), counts.end());
    for (int64_t head = 0; head < query.size(); head++) {
        std::fill(ids[head].data + free + counts[head], ids[head].data + longest, -1);
        std::fill(weights[head].data + free + counts[head], weights[head].data + longest, 0.0f);
    }
    return longest;
}
KERNEL(sample)
