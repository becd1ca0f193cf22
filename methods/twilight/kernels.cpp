// Twilight's pruning on a CPU: all query heads in one call. Codes are those of `methods.twilight.estimate.quantised`.
#include "methods.h"

constexpr float LEVELS = 15, LEAST = 1e-9f;

// Code a key of each row and KV head: keys [B, Hkv, D]; tokens [B], whose they are; codes, steps as of `top_p`, written.
static int64_t write_codes(Array<const float, 3> keys, Array<const int64_t, 1> tokens, Array<uint8_t, 4> codes,
                           Array<float, 4> steps) {
    for (int64_t row = 0; row < keys.size(); row++)
        for (int64_t head = 0; head < keys.sizes[1]; head++) {
            Array<const float, 1> key = keys[row][head];
            float low = *std::min_element(key.begin(), key.end()), high = *std::max_element(key.begin(), key.end());
            float step = std::max((high - low) / LEVELS, LEAST);
            auto level = [&](float x) { return uint8_t(std::min(std::rint((x - low) / step), LEVELS)); };
            Array<uint8_t, 1> code = codes[row][head][tokens[row]];
            for (int64_t k = 0; k < code.size(); k++) code[k] = level(key[2 * k]) | level(key[2 * k + 1]) << 4;
            float* parameters = steps[row][head][tokens[row]].data;
            parameters[0] = step, parameters[1] = low;
        }
    return 0;
}
KERNEL(write_codes)

// Write the fewest tokens whose estimated weights sum to p or more, for all query heads, in so many threads: query [B,
// Hq, D], times the scaling; codes [B, Hkv, S, D / 2], two numbers each, the first in the low half; steps [B, Hkv, S,
// 2], the step and the smallest number of each key; index [B, Hs, M] token ids, trailing -1; softcap of the logits, 0:
// none; p [B], of each row; ids [B, Hq, M], written: the largest weight first, trailing -1; counted [2], to which tokens
// weighed and tokens kept are added. Returns tokens of the longest list.
static int64_t top_p(int64_t threads, Array<const float, 3> query, Array<const uint8_t, 4> codes,
                     Array<const float, 4> steps, Array<const int64_t, 3> index, double softcap,
                     Array<const double, 1> p, Array<int64_t, 3> ids, Array<int64_t, 1> counted) {
    int64_t query_heads = query.sizes[1], count = index.sizes[2], half = codes.sizes[3];
    std::vector<int64_t> weighed(query.size() * query_heads), kept(weighed.size());
    Claims claims(weighed.size());
    in_threads(threads, [&](int) {
        std::vector<float> weights(count), low(half), high(half);
        std::vector<int32_t> order(count);
        for (int64_t at; claims.take(at);) {
            int64_t row = at / query_heads, head = at % query_heads, kv_head = head * codes.sizes[1] / query_heads;
            const int64_t* tokens = index[row][head * index.sizes[1] / query_heads].data;
            Array<const uint8_t, 2> head_codes = codes[row][kv_head];
            Array<const float, 2> head_steps = steps[row][kv_head];
            Array<const float, 1> asked = query[row][head];
            float whole = 0, most = -INFINITY;
            for (int64_t k = 0; k < half; k++) {
                low[k] = asked[2 * k], high[k] = asked[2 * k + 1];
                whole += low[k] + high[k];
            }
            int64_t valid = 0, used = 0;
            for (; valid < count && tokens[valid] >= 0; valid++) {
                const uint8_t* code = head_codes[tokens[valid]].data;
                const float* step = head_steps[tokens[valid]].data;
                Vector lanes = splat(0);
                float total = 0;
                int64_t k = 0;
                for (; k + LANES <= half; k += LANES) {
                    Integers both = lanewise([](Bytes x) INLINED { return widened(x); }, load_lanes<Bytes>(code + k));
                    Integers lower = lanewise([](Words x) INLINED { return x & 15; }, both);
                    Integers upper = lanewise([](Words x) INLINED { return x >> 4; }, both);
                    lanes = lanes + to_floats(lower) * load(&low[k]) + to_floats(upper) * load(&high[k]);
                }
                for (; k < half; k++) total += float(code[k] & 15) * low[k] + float(code[k] >> 4) * high[k];
                weights[valid] = capped(step[0] * (sum_of(lanes) + total) + step[1] * whole, softcap);
                most = std::max(most, weights[valid]), order[valid] = valid;
            }
            double mass = 0, sum = 0;
            for (int64_t i = 0; i < valid; i++) {
                weights[i] = -std::exp(weights[i] - most);
                mass -= weights[i];
            }
            sort(weights.data(), order.data(), valid);
            int64_t* out = ids[row][head].data;
            for (; used < valid && (p[row] == 1 || sum < p[row] * mass); used++) {
                out[used] = tokens[order[used]];
                sum -= weights[used];
            }
            std::fill(out + used, out + count, -1);
            weighed[at] = valid, kept[at] = used;
        }
    });
    for (size_t at = 0; at < kept.size(); at++) counted[0] += weighed[at], counted[1] += kept[at];
    return *std::max_element(kept.begin(), kept.end());
}
KERNEL(top_p)
