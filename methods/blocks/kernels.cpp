// What blocks do on a CPU, all lists in one call: rank, join ranges, page; pages' bounds; product quantisation.
#include "methods.h"

// -- lists -----------------------------------------------------------------------------------------------------------

// The best of each list of scores [B, H, n], best first, in so many threads; see `best` for what is equal or no number.
// counts [B, 1 or H], wanted of a row or list; ids [B, H, k], written, trailing -1.
static int64_t best_lists(int64_t threads, Array<const float, 3> scores, Array<const int64_t, 2> counts,
                          Array<int64_t, 3> ids) {
    int64_t lists = scores.sizes[1], longest = ids.sizes[2];
    Claims claims(scores.size() * lists);
    in_threads(threads, [&](int) {
        std::vector<float> values(longest);
        for (int64_t at; claims.take(at);) {
            int64_t row = at / lists, head = at % lists;
            int64_t most = std::min(longest, counts[row][head * counts.sizes[1] / lists]);
            Array<int64_t, 1> chosen = ids[row][head];
            write_best(scores[row][head].data, scores.sizes[2], most, chosen.data, values.data());
            std::fill(chosen.data + most, chosen.end(), -1);
        }
    });
    return 0;
}
KERNEL(best_lists)

// The numbers of the ranges of each list, see `methods.blocks.ragged.entries`: starts [L, K], where each range begins;
// ends [L, K], entries of a list up to the end of each range; numbers, source [L, T], written: the first T entries,
// trailing -1, and the range of each.
static int64_t entries(Array<const int64_t, 2> starts, Array<const int64_t, 2> ends, Array<int64_t, 2> numbers,
                       Array<int64_t, 2> source) {
    int64_t spans = starts.sizes[1], room = numbers.sizes[1];
    for (int64_t row = 0; row < starts.size(); row++) {
        int64_t done = 0, *out = numbers[row].data, *from = source[row].data;
        for (int64_t span = 0; span < spans; span++)
            for (int64_t first = starts[row][span] - done; done < std::min(ends[row][span], room); done++)
                out[done] = first + done, from[done] = span;
        std::fill(out + done, out + room, -1);
        std::fill(from + done, from + room, spans - 1);
    }
    return 0;
}
KERNEL(entries)

// Write ids [B, H, most], see `methods.blocks.recent.sinks_and_recent`.
static int64_t sinks_and_recent(Array<const int64_t, 1> lengths, Array<const int64_t, 2> counts, int64_t sinks,
                                Array<int64_t, 3> ids) {
    for (int64_t row = 0; row < ids.size(); row++)
        for (int64_t head = 0; head < ids.sizes[1]; head++) {
            int64_t count = counts[row][head], valid = std::min(lengths[row], count), *out = ids[row][head].data;
            for (int64_t at = 0; at < ids.sizes[2]; at++) {
                int64_t token = lengths[row] - 1 - at;
                if (at >= count - sinks) token = std::min(token, count - 1 - at);
                out[at] = at < valid ? token : -1;
            }
        }
    return 0;
}
KERNEL(sinks_and_recent)

// -- pages and their bounds (Quest) ----------------------------------------------------------------------------------

constexpr int64_t PAGES_AHEAD = 16;  // pages whose bounds are on their way while one is scored

// Widen low, high [B, Hkv, P, D] of page last[row] of every row and head by keys [B, Hkv, D].
static int64_t take_in(Stored<4> low, Stored<4> high, Array<const int64_t, 1> last, Stored<3> keys) {
    return as_stored(keys, [&](auto number) {
        using Number = decltype(number);
        Rows<Number, 4> lows{low}, highs{high};
        Rows<Number, 3> of_keys{keys};
        for (int64_t row = 0; row < keys.sizes[0]; row++)
            for (int64_t head = 0; head < keys.sizes[1]; head++)
                for (int64_t at = 0; at < keys.sizes[2] * Number::SIZE; at += Number::SIZE) {
                    const char* key = of_keys.row(row, head) + at;
                    char* least = const_cast<char*>(lows.row(row, head, last[row])) + at;
                    char* most = const_cast<char*>(highs.row(row, head, last[row])) + at;
                    float x = Number::number(key);  // if it is no number, neither are the bounds
                    if (x < Number::number(least) || x != x) std::memcpy(least, key, Number::SIZE);
                    if (x > Number::number(most) || x != x) std::memcpy(most, key, Number::SIZE);
                }
        return int64_t(0);
    });
}
KERNEL(take_in)

// The negative and the positive elements of queries: max(q l, q h) is q h where q > 0.
struct SplitQuery {
    std::vector<float> falling, rising;

    // Of queries [G, D], for each or, with lists = 1, for their mean.
    template <class Number>
    SplitQuery(Number, const char* queries, int64_t group, int64_t lists, int64_t head_dim)
        : falling(lists * head_dim), rising(lists * head_dim) {
        for (int64_t g = 0; g < group; g++)
            for (int64_t k = 0; k < head_dim; k++) {
                float x = Number::number(queries + (g * head_dim + k) * Number::SIZE) / float(group / lists);
                falling[g % lists * head_dim + k] += std::min(x, 0.0f);
                rising[g % lists * head_dim + k] += std::max(x, 0.0f);
            }
    }
};

// The largest product of each query with any key inside the bounds low, high [P, D] of each page: scores [Q, P].
template <class Number>
void upper_bounds(Number, const char* low, const char* high, const SplitQuery& query, int64_t lists, int64_t pages,
                  int64_t head_dim, float* scores) {
    int64_t size = head_dim * Number::SIZE;
    for (int64_t page = 0; page < pages; page++, low += size, high += size) {
        fetch_all(low + PAGES_AHEAD * size, size);
        fetch_all(high + PAGES_AHEAD * size, size);
        for (int64_t list = 0; list < lists; list++) {
            float total = dot<Number>(high, &query.rising[list * head_dim], head_dim) +
                          dot<Number>(low, &query.falling[list * head_dim], head_dim);
            scores[list * pages + page] = total == total ? total : INFINITY;  // no number: attended, and seen
        }
    }
}

// Mean upper bound of the group, of each page of all KV heads, in so many threads: queries [B, Hkv, G, D]; low, high
// [B, Hkv, P, D]; scores [B * Hkv, P], written.
static int64_t mean_bounds(int64_t threads, Stored<4> queries, Stored<4> low, Stored<4> high, Array<float, 2> scores) {
    return as_stored(queries, [&](auto number) {
        using Number = decltype(number);
        Rows<Number, 4> asks{queries}, lows{low}, highs{high};
        int64_t kv_heads = queries.sizes[1], head_dim = queries.sizes[3];
        Claims claims(scores.size());
        in_threads(threads, [&](int) {
            for (int64_t at; claims.take(at);) {
                int64_t row = at / kv_heads, head = at % kv_heads;
                SplitQuery query(number, asks.row(row, head, 0), queries.sizes[2], 1, head_dim);
                upper_bounds(number, lows.row(row, head, 0), highs.row(row, head, 0), query, 1, scores.sizes[1],
                             head_dim, scores[at].data);
            }
        });
        return int64_t(0);
    });
}
KERNEL(mean_bounds)

// Ranked lists [Q, n] joined by rank, without repeats, after the last of `pages` pages.
static std::vector<int32_t> joined(const std::vector<int32_t>& ranked, int64_t lists, int64_t pages) {
    std::vector<bool> taken(pages);
    std::vector<int32_t> all{int32_t(pages - 1)};
    taken[pages - 1] = true;
    int64_t most = ranked.size() / lists;
    for (int64_t rank = 0; rank < most; rank++)
        for (int64_t list = 0; list < lists; list++) {
            int32_t page = ranked[list * most + rank];
            if (page < 0 || taken[page]) continue;
            all.push_back(page);
            taken[page] = true;
        }
    return all;
}

// Write the tokens of ranked pages, as far as whole pages fit into `room` tokens, then -1; how many.
static int64_t write_tokens(const int32_t* ranked, int64_t count, const int64_t* starts, int64_t room,
                            Array<int64_t, 1> tokens) {
    int64_t filled = 0;
    for (const int32_t* page = ranked; page < ranked + count && *page >= 0; page++) {
        int64_t size = starts[*page + 1] - starts[*page];
        if (filled + size > room) break;
        std::iota(tokens.data + filled, tokens.data + filled + size, starts[*page]);
        filled += size;
    }
    std::fill(tokens.data + filled, tokens.end(), -1);
    return filled;
}

// The tokens of the best pages of all KV heads, in so many threads: queries [B, Hkv, G, D]; low, high [B, Hkv, P or
// more, D]; starts [B, P + 1], where each page begins and the last one ends; rows [B, 3], of each row: pages, those
// that are ranked, tokens that fit; mean: pages are ranked by the mean bound of the group; join: the lists of the group
// are joined by rank, after the last page; ids [B * Hkv, lists, most], written, trailing -1. Returns tokens of the
// longest list.
static int64_t best_tokens(int64_t threads, Stored<4> queries, Stored<4> low, Stored<4> high,
                           Array<const int64_t, 2> starts, Array<const int64_t, 2> rows, int64_t mean, int64_t join,
                           Array<int64_t, 3> ids) {
    return as_stored(queries, [&](auto number) {
        using Number = decltype(number);
        Rows<Number, 4> asks{queries}, lows{low}, highs{high};
        int64_t kv_heads = queries.sizes[1], group = queries.sizes[2], head_dim = queries.sizes[3];
        int64_t lists = mean ? 1 : group;
        std::atomic<int64_t> longest{0};
        Claims claims(ids.size());
        in_threads(threads, [&](int) {
            for (int64_t at; claims.take(at);) {
                int64_t row = at / kv_heads, head = at % kv_heads, pages = rows[row][0], room = rows[row][2];
                SplitQuery query(number, asks.row(row, head, 0), group, lists, head_dim);
                std::vector<float> scores(lists * pages);
                upper_bounds(number, lows.row(row, head, 0), highs.row(row, head, 0), query, lists, pages, head_dim,
                             scores.data());
                int64_t most = std::min(rows[row][1], pages), written = lists;
                std::vector<float> values(most);
                std::vector<int32_t> ranked(lists * most);
                for (int64_t list = 0; list < lists; list++)
                    write_best(&scores[list * pages], pages, most, &ranked[list * most], values.data());
                if (join) ranked = joined(ranked, lists, pages), most = ranked.size(), written = 1;
                for (int64_t list = 0; list < written; list++) {
                    int64_t count =
                        write_tokens(&ranked[list * most], most, starts[row].data, room, ids[at][list]);
                    for (int64_t before = longest; before < count && !longest.compare_exchange_weak(before, count);) {}
                }
            }
        });
        return longest.load();
    });
}
KERNEL(best_tokens)

// -- product quantisation (PQCache) ----------------------------------------------------------------------------------

// Codes [B, Hkv, m, S] of a new token of a row: the nearest centroid of each part of its keys [Hkv, m, w] by Euclidean
// distance, of equal ones the first. tables [Hkv, m, K, w], the centroids.
static int64_t code(Array<const float, 3> keys, Array<const float, 4> tables, Array<uint8_t, 4> codes, int64_t row,
                    int64_t token) {
    int64_t width = keys.sizes[2];
    for (int64_t head = 0; head < keys.size(); head++)
        for (int64_t part = 0; part < keys.sizes[1]; part++) {
            const float* key = keys[head][part].data;
            int64_t nearest = 0;
            float most = -INFINITY;
            for (int64_t centroid = 0; centroid < tables.sizes[2]; centroid++) {
                const float* center = tables[head][part][centroid].data;
                float near = 0;
                for (int64_t j = 0; j < width; j++) near += (key[j] - 0.5f * center[j]) * center[j];
                if (near > most) nearest = centroid, most = near;
            }
            codes[row][head][part][token] = nearest;
        }
    return 0;
}
KERNEL(code)

// Received [Hkv, n], written: the attention that tokens get by their codes, summed over the query heads of a group. Of
// query [Hkv, G, m, w] and codes [B, Hkv, m, S] of each token, of which `row` and those from `first` on are meant.
// Scaling and softcap are of the logits, 0: no cap.
static int64_t coded_attention(Array<const float, 4> query, Array<const float, 4> tables, Array<const uint8_t, 4> codes,
                               int64_t row, int64_t first, double scaling, double softcap,
                               Array<float, 2> received) {
    int64_t count = received.sizes[1], centroids = tables.sizes[2], width = query.sizes[3];
    std::vector<float> products(centroids), weights(count + LANES);
    for (int64_t head = 0; head < query.size(); head++) {
        std::fill_n(received[head].data, count, 0.0f);
        for (int64_t g = 0; g < query.sizes[1]; g++) {
            std::fill(weights.begin(), weights.end(), 0.0f);
            for (int64_t part = 0; part < query.sizes[2]; part++) {
                const float* asked = query[head][g][part].data;
                for (int64_t centroid = 0; centroid < centroids; centroid++)
                    products[centroid] = dot(tables[head][part][centroid].data, asked, width) * float(scaling);
                const uint8_t* of_tokens = codes[row][head][part].data + first;
                for (int64_t i = 0; i < count; i++) weights[i] += products[of_tokens[i]];
            }
            for (int64_t i = 0; softcap && i < count; i++) weights[i] = capped(weights[i], softcap);
            float most = *std::max_element(weights.begin(), weights.begin() + count), total = 0;
            for (int64_t i = 0; i < count; i += LANES)
                store(&weights[i], exponential(load(&weights[i]) - splat(most)));
            for (int64_t i = 0; i < count; i++) total += weights[i];
            for (int64_t i = 0; i < count; i++) received[head][i] += weights[i] / total;
        }
    }
    return 0;
}
KERNEL(coded_attention)
