// ParisKV's stages on a CPU; `vectorised.py` has the same in torch, and says what they compute.
//
// Built without fused products: both give the same bits. A token's codes are words of one subspace, and after them the
// weights of all subspaces as halves of words.
#include "methods.h"

constexpr int SUBSPACE = 8, CENTROIDS = 256;  // see codebook.py
constexpr int EIGHT = 8;                      // subspaces whose codes are decoded at once, if there are so many
// candidates whose codes are fetched early: they lie far apart, waiting for each takes most of the time
constexpr int64_t CANDIDATES_AHEAD = 24;

// The Walsh-Hadamard transform, in place.
static void transform(std::vector<float>& x) {
    for (size_t width = 1; width < x.size(); width *= 2)
        for (size_t start = 0; start < x.size(); start += 2 * width)
            for (size_t i = start; i < start + width; i++) {
                float low = x[i], high = x[i + width];
                x[i] = low + high, x[i + width] = low - high;
            }
}

// -- encoding --------------------------------------------------------------------------------------------------------

// What codebook.py says of magnitudes: where levels end, what they stand for, and what a subspace without length is
// divided by.
struct Codebook {
    Array<const float, 1> thresholds, levels;
    float no_radius, no_alignment;
};

struct Subcode {
    uint8_t id;
    uint32_t word;
    uint16_t weight;
};

// Of a subspace y [8] and its length.
static Subcode subcode(const float* y, float radius, const Codebook& book) {
    Subcode code{};
    float alignment = 0;
    for (int j = 0; j < SUBSPACE; j++) {
        float size = std::fabs(y[j]) / std::max(radius, book.no_radius);
        uint32_t level = 0, positive = y[j] >= 0;
        for (float threshold : book.thresholds) level += size > threshold;
        code.id |= positive << j;
        code.word |= (positive << 3 | level) << 4 * j;
        alignment += book.levels[level] * size;
    }
    float weight = radius / std::max(alignment, book.no_alignment);
    uint32_t bits = read<uint32_t>(&weight);
    code.weight = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return code;
}

// Write ids [S, n] and codes [n, S + S / 2] of keys [m, head_dim], the first at `start` of n, and add to counts [S,
// 256]. Returns the first key that is not finite, or too large to square; -1: there is none.
static int64_t encode(Array<const float, 2> keys, Array<const float, 1> signs, Array<const float, 1> thresholds,
                      Array<const float, 1> levels, double no_radius, double no_alignment, int64_t start,
                      Array<uint8_t, 2> ids, Array<int32_t, 2> codes, Array<int32_t, 2> counts) {
    Codebook book{thresholds, levels, float(no_radius), float(no_alignment)};
    std::vector<float> x(signs.size());
    for (int64_t key = 0; key < keys.size(); key++) {
        std::fill(x.begin(), x.end(), 0.0f);
        for (int64_t i = 0; i < keys.sizes[1]; i++) x[i] = keys[key][i] * signs[i];
        transform(x);
        int32_t* words = codes[start + key].data;
        uint16_t* halves = reinterpret_cast<uint16_t*>(words + ids.size());
        for (int64_t subspace = 0; subspace < ids.size(); subspace++) {
            const float* y = &x[subspace * SUBSPACE];
            float square = y[0] * y[0];
            for (int j = 1; j < SUBSPACE; j++) square += y[j] * y[j];
            float radius = std::sqrt(square);
            if (!(radius < INFINITY)) return key;
            Subcode code = subcode(y, radius, book);
            ids[subspace][start + key] = code.id, words[subspace] = code.word, halves[subspace] = code.weight;
            counts[subspace][code.id]++;
        }
    }
    return -1;
}
KERNEL(encode)

// -- a query's tables ------------------------------------------------------------------------------------------------

// The centroids c of largest <z, c>, z [8], that hold `reach` of the keys counted [256] or more, nearest first; those
// without keys are left out, equal ones come by number.
static std::vector<int32_t> nearest(const float* z, const int32_t* counts, int64_t reach) {
    float score[CENTROIDS] = {};
    for (int j = 0; j < SUBSPACE; j++)
        for (int i = 0; i < 1 << j; i++) {
            score[1 << j | i] = score[i] + z[j];
            score[i] -= z[j];
        }
    float largest = *std::max_element(score, score + CENTROIDS), least = 0;
    // to be sorted, those beyond half of the largest; if they hold too few, beyond 0, ...
    for (int half = 1; half > -3; half--) {
        int64_t reached = 0;
        least = float(half) * largest / 2.0f;
        for (int i = 0; i < CENTROIDS; i++) reached += score[i] >= least ? counts[i] : 0;
        if (reached >= reach) break;
    }
    std::vector<float> falling(CENTROIDS);
    std::vector<int32_t> number(CENTROIDS);
    int64_t filled = 0;
    for (int i = 0; i < CENTROIDS; i++) {
        falling[filled] = -score[i], number[filled] = i;
        filled += (score[i] >= least) & (counts[i] > 0);
    }
    number.resize(filled);
    sort(falling.data(), number.data(), filled);
    return number;
}

// Make a group's queries [G, head_dim] ready to be looked up. counts [S, 256], keys of each id; spans [tiers],
// `Quotas.tiers`. Written: votes_of [S, 256], the votes of each centroid; rotated [8, S], their mean, coordinate by
// coordinate of all subspaces.
static int64_t tables(Array<const float, 2> queries, Array<const float, 1> signs, Array<const int32_t, 2> counts,
                      Array<const int64_t, 1> spans, Array<uint8_t, 2> votes_of, Array<float, 2> rotated) {
    std::vector<float> z(signs.size());
    for (int64_t i = 0; i < queries.sizes[1]; i++) {
        float total = queries[0][i];
        for (int64_t g = 1; g < queries.size(); g++) total += queries[g][i];
        z[i] = total / float(queries.size()) * signs[i];
    }
    transform(z);
    std::fill_n(votes_of.data, votes_of.size() * CENTROIDS, 0);
    for (int64_t subspace = 0; subspace < counts.size(); subspace++) {
        const float* part = &z[subspace * SUBSPACE];
        const int32_t* held = counts[subspace].data;
        int64_t nearer = 0, tier = 0;
        for (int32_t number : nearest(part, held, spans[spans.size() - 1])) {
            while (tier < spans.size() && nearer >= spans[tier]) tier++;
            votes_of[subspace][number] = spans.size() - tier;
            nearer += held[number];
        }
        for (int j = 0; j < SUBSPACE; j++) rotated[j][subspace] = part[j];
    }
    return 0;
}
KERNEL(tables)

// -- the vote --------------------------------------------------------------------------------------------------------

constexpr int64_t TOKENS_AT_ONCE = 64;  // arrays have room for so many at their ends

// Sums [64] of tables [S, 256], each at the ids of 64 tokens in its row of ids [S, n], modulo 256.
static void look_up_plainly(Array<const uint8_t, 2> tables, const uint8_t* ids, int64_t stride, uint8_t* sums) {
    std::fill_n(sums, TOKENS_AT_ONCE, 0);
    for (int64_t row = 0; row < tables.size(); row++, ids += stride) {
        const uint8_t* table = tables[row].data;
        for (int64_t i = 0; i < TOKENS_AT_ONCE; i++) sums[i] += table[ids[i]];
    }
}

#if defined(__x86_64__)
// The same where a processor looks up 64 bytes in one instruction (Intel's since 2019, AMD's since 2022): a table is
// four registers, either half of it looked up at once, and an id's highest bit decides.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) static void look_up_quickly(Array<const uint8_t, 2> tables,
                                                                                   const uint8_t* ids, int64_t stride,
                                                                                   uint8_t* sums) {
    __m512i total = _mm512_setzero_si512();
    for (int64_t row = 0; row < tables.size(); row++, ids += stride) {
        const uint8_t* table = tables.data + row * CENTROIDS;
        __m512i id = _mm512_loadu_si512(ids);
        __m512i lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), id, _mm512_loadu_si512(table + 64));
        __m512i upper = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), id, _mm512_loadu_si512(table + 192));
        total = _mm512_add_epi8(total, _mm512_mask_blend_epi8(_mm512_movepi8_mask(id), lower, upper));
    }
    _mm512_storeu_si512(sums, total);
}
static const auto look_up = __builtin_cpu_supports("avx512vbmi") ? look_up_quickly : look_up_plainly;
#else
static const auto look_up = look_up_plainly;
#endif

// Which of 64 numbers are no less than `least`, 0 .. 255: a bit each.
static uint64_t at_least(const uint8_t* numbers, int64_t least) {
#if defined(__AVX512BW__)
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(numbers), _mm512_set1_epi8(char(least)));
#else
    uint64_t word = 0;
    for (int i = 0; i < 64; i++) word |= uint64_t(numbers[i] >= least) << i;
    return word;
#endif
}

// The votes of the tokens of a zone.
struct Votes {
    const uint8_t* of_token;
    int64_t length;

    // Which of the tokens first .. first + 63 have so many votes: a bit each.
    uint64_t having(int64_t first, int64_t least) const {
        uint64_t word = at_least(of_token + first, least);
        return first + 64 > length ? word & ~uint64_t(0) >> (first + 64 - length) : word;
    }
    int64_t count(int64_t least) const {
        int64_t count = 0;
        for (int64_t first = 0; first < length; first += TOKENS_AT_ONCE)
            count += __builtin_popcountll(having(first, least));
        return count;
    }
};

// Fill candidates [C] with the tokens that have most votes, ascending; of equal ones the earlier. ids [S, n], n a
// multiple of 64, of which `length` tokens are in the zone; votes_of [S, 256], of each centroid; most: votes that a
// token can have; votes [n], written.
static int64_t vote(Array<const uint8_t, 2> ids, int64_t length, Array<const uint8_t, 2> votes_of, int64_t most,
                    Array<uint8_t, 1> votes, Array<int32_t, 1> candidates) {
    for (int64_t first = 0; first < length; first += TOKENS_AT_ONCE)
        look_up(votes_of, ids.data + first, ids.sizes[1], votes.data + first);
    Votes cast{votes.data, length};
    // votes that a candidate has at least, by bisection; with one more they are too few
    int64_t least = 0;
    for (int64_t more = most; least < more;) {
        int64_t middle = (least + more + 1) >> 1;
        cast.count(middle) >= candidates.size() ? least = middle : more = middle - 1;
    }
    int64_t remaining = candidates.size() - cast.count(least + 1);  // for those that have just these votes
    int32_t* candidate = candidates.data;
    for (int64_t first = 0; first < length; first += TOKENS_AT_ONCE) {
        uint64_t taken = cast.having(first, least + 1), equal = cast.having(first, least) & ~taken;
        for (; equal && remaining > 0; equal &= equal - 1, remaining--) taken |= equal & -equal;
        for (; taken; taken &= taken - 1) *candidate++ = first + __builtin_ctzll(taken);
    }
    return 0;
}
KERNEL(vote)

// -- the rerank ------------------------------------------------------------------------------------------------------

template <class T, int COUNT>
struct Several {
    typedef T Type __attribute__((vector_size(COUNT * sizeof(T))));
};
template <int COUNT>
using Numbers = typename Several<float, COUNT>::Type;
template <int COUNT>
using Bits = typename Several<uint32_t, COUNT>::Type;

// The magnitudes that codes stand for, by their three low bits.
template <int COUNT>
static INLINE Numbers<COUNT> magnitudes(const float* levels, Bits<COUNT> codes) {
#if defined(__AVX2__)
    __m256 all = _mm256_loadu_ps(levels);
    if constexpr (COUNT == 8) return (Numbers<COUNT>)_mm256_permutevar8x32_ps(all, (__m256i)codes);
    if constexpr (COUNT == 4)
        return (Numbers<COUNT>)_mm256_castps256_ps128(
            _mm256_permutevar8x32_ps(all, _mm256_castsi128_si256((__m128i)codes)));
#endif
    Numbers<COUNT> result;
    for (int i = 0; i < COUNT; i++) result[i] = levels[codes[i] & 7];
    return result;
}

// The bits of float32 numbers whose upper halves are here.
template <int COUNT>
static INLINE Bits<COUNT> widened_halves(const uint16_t* halves) {
#if defined(__AVX2__)  // GCC 12 widens number by number
    if constexpr (COUNT == 8) return (Bits<COUNT>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)halves)) << 16;
    if constexpr (COUNT == 4) return (Bits<COUNT>)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)halves)) << 16;
#endif
    Bits<COUNT> result;
    for (int i = 0; i < COUNT; i++) result[i] = uint32_t(halves[i]) << 16;
    return result;
}

// A token's weight_b <v_b, z_b> of COUNT subspaces: its words, its weights, and rotated [8, S] from the first of these
// subspaces on. The sums run in the order of `Codes.estimates`.
template <int COUNT>
static INLINE Numbers<COUNT> terms_of(const int32_t* words, const uint16_t* halves, const float* levels,
                                      const float* rotated, int64_t stride) {
    Bits<COUNT> code = read<Bits<COUNT>>(words);
    Numbers<COUNT> product{}, before{};
    for (int coordinate = 0; coordinate < SUBSPACE; coordinate++, rotated += stride) {
        Bits<COUNT> shifted = code >> (4 * coordinate), sign = ~(shifted << 28) & 0x80000000u;
        Bits<COUNT> magnitude = (Bits<COUNT>)magnitudes<COUNT>(levels, shifted);
        Numbers<COUNT> summand = (Numbers<COUNT>)(magnitude ^ sign) * read<Numbers<COUNT>>(rotated);
        if (coordinate % 2 == 0)
            before = summand;
        else
            product = coordinate == 1 ? before + summand : product + (before + summand);
    }
    return product * (Numbers<COUNT>)widened_halves<COUNT>(halves);
}

// Estimates of <query, key> of the candidates; see `rerank`. S is a multiple of COUNT.
template <int COUNT>
static void estimate(Array<const int32_t, 2> codes, Array<const float, 1> levels, Array<const float, 2> rotated,
                     Array<const int32_t, 1> candidates, float* estimates) {
    int64_t count = candidates.size(), subspaces = rotated.sizes[1], size = codes.sizes[1];
    for (int64_t i = 0; i < count; i++) {
        const int32_t* later = codes.data + candidates[std::min(i + CANDIDATES_AHEAD, count - 1)] * size;
        fetch(reinterpret_cast<const char*>(later));
        fetch(reinterpret_cast<const char*>(later + size - 1));
        const int32_t* words = codes.data + candidates[i] * size;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(words + subspaces);
        float total = 0;
        for (int64_t first = 0; first < subspaces; first += COUNT) {
            Numbers<COUNT> terms =
                terms_of<COUNT>(words + first, halves + first, levels.data, rotated.data + first, subspaces);
            for (int j = 0; j < COUNT; j++) total += terms[j];
        }
        estimates[i] = total;
    }
}

// Fill tokens, scores [k] with the candidates [C], ascending, of the largest estimates of <query, key>, best first, then
// -1. codes [n, S + S / 2]; levels [8]; rotated [8, S], see `tables`; S is a power of two.
static int64_t rerank(Array<const int32_t, 2> codes, Array<const float, 1> levels, Array<const float, 2> rotated,
                      Array<const int32_t, 1> candidates, Array<int32_t, 1> tokens, Array<float, 1> scores) {
    std::vector<float> estimates(candidates.size());
    switch (std::min<int64_t>(rotated.sizes[1], EIGHT)) {
        case 1: estimate<1>(codes, levels, rotated, candidates, estimates.data()); break;
        case 2: estimate<2>(codes, levels, rotated, candidates, estimates.data()); break;
        case 4: estimate<4>(codes, levels, rotated, candidates, estimates.data()); break;
        default: estimate<EIGHT>(codes, levels, rotated, candidates, estimates.data());
    }
    write_best(estimates.data(), candidates.size(), tokens.size(), tokens.data, scores.data);
    for (int32_t& token : tokens)
        if (token >= 0) token = candidates[token];
    return 0;
}
KERNEL(rerank)

// -- a search --------------------------------------------------------------------------------------------------------

// Search the zones of all KV heads of the rows that ask, in so many threads. ids [B, Hkv, S, n], codes and counts of
// all rows; queries [B, Hkv, G, head_dim]; rows [R, 5], of each row that asks: which, tokens of its zone, the first of
// these, candidates, and tokens to retrieve; spans [R, tiers], `Quotas.tiers`. Written, [R * Hkv, k] each: retrieved,
// tokens of the sequence, best first, then -1; estimated, their estimates, then -inf.
static int64_t search(int64_t threads, Array<const uint8_t, 4> ids, Array<const int32_t, 4> codes,
                      Array<const int32_t, 4> counts, Array<const float, 4> queries, Array<const float, 1> signs,
                      Array<const float, 1> levels, Array<const int64_t, 2> rows, Array<const int64_t, 2> spans,
                      Array<int64_t, 2> retrieved, Array<float, 2> estimated) {
    int64_t heads = ids.sizes[1], subspaces = ids.sizes[2];
    Claims claims(retrieved.size());
    in_threads(threads, [&](int) {
        std::vector<uint8_t> votes(ids.sizes[3]), votes_of(subspaces * CENTROIDS);
        std::vector<float> rotated(SUBSPACE * subspaces);
        Array<uint8_t, 2> of_votes{votes_of.data(), {subspaces, CENTROIDS}};
        Array<float, 2> of_query{rotated.data(), {SUBSPACE, subspaces}};
        for (int64_t at; claims.take(at);) {
            int64_t asks = at / heads, head = at % heads;
            const int64_t *of_row = rows[asks].data, row = of_row[0], k = of_row[4];
            std::vector<int32_t> candidates(of_row[3]), tokens(k);
            Array<int32_t, 1> voted{candidates.data(), {of_row[3]}};
            tables(queries[row][head], signs, counts[row][head], spans[asks], of_votes, of_query);
            vote(ids[row][head], of_row[1], {of_votes.data, {subspaces, CENTROIDS}}, spans.sizes[1] * subspaces,
                 {votes.data(), {ids.sizes[3]}}, voted);
            Array<float, 1> scores = estimated[at];
            rerank(codes[row][head], levels, {of_query.data, {SUBSPACE, subspaces}}, {voted.data, {of_row[3]}},
                   {tokens.data(), {k}}, scores.first(k));
            std::fill(scores.data + k, scores.end(), -INFINITY);
            int64_t* out = retrieved[at].data;
            for (int64_t i = 0; i < k; i++) out[i] = tokens[i] >= 0 ? of_row[2] + tokens[i] : -1;
            std::fill(out + k, retrieved[at].end(), -1);
        }
    });
    return 0;
}
KERNEL(search)

// -- a k of each KV head's own ---------------------------------------------------------------------------------------

// The best candidates by benefit, as many as are enough, of all KV heads of a row; see `adaptive.enough`. keys [H, n, D]
// of the tokens always attended; queries [H, G, D], whose mean counts; norms [H, N], of the values of all tokens;
// always [n], which these are; tokens [H, C], candidates, trailing -1; estimates [H, C], of their products with the
// mean query; scale, softcap: of the logits, 0: no cap; least: how many are attended whatever they hold; ids [H, most],
// written, the best first, trailing -1. Returns how many all heads attend together.
static int64_t write_enough(Array<const float, 3> keys, Array<const float, 3> queries, Array<const float, 2> norms,
                            Array<const int64_t, 1> always, Array<const int64_t, 2> tokens,
                            Array<const float, 2> estimates, double scale, double softcap, double theta, int64_t least,
                            Array<int64_t, 2> ids) {
    int64_t count = tokens.sizes[1], most = ids.sizes[1], size = keys.sizes[2], total = 0;
    float scaling = scale;
    std::vector<float> mean(size), logits(always.size()), benefit(count), scores(most);
    std::vector<int32_t> order(most);
    for (int64_t head = 0; head < keys.size(); head++) {
        std::fill(mean.begin(), mean.end(), 0.0f);
        for (int64_t g = 0; g < queries.sizes[1]; g++)
            for (int64_t d = 0; d < size; d++) mean[d] += queries[head][g][d];
        for (float& number : mean) number /= float(queries.sizes[1]);
        float peak = -INFINITY;
        for (int64_t at = 0; at < always.size(); at++) {
            logits[at] = capped(scaling * dot(keys[head][at].data, mean.data(), size), softcap);
            peak = std::max(peak, logits[at]);
        }
        for (int64_t at = 0; at < count; at++) {
            benefit[at] = capped(scaling * estimates[head][at], softcap);
            peak = std::max(peak, benefit[at]);
        }
        double sum = 0, whole = 0;
        for (int64_t at = 0; at < always.size(); at++) sum += std::exp(logits[at] - peak) * norms[head][always[at]];
        for (int64_t at = 0; at < count; at++) {
            float norm = norms[head][std::max<int64_t>(tokens[head][at], 0)];
            benefit[at] = std::exp(benefit[at] - peak) * norm;
            whole += benefit[at];
        }
        whole += sum;
        write_best(benefit.data(), count, most, order.data(), scores.data());
        int64_t used = 0, *out = ids[head].data;
        for (; used < most && (used < least || used == 0 || sum < theta * whole); used++) {
            out[used] = order[used] >= 0 ? tokens[head][order[used]] : -1;
            sum += std::max(scores[used], 0.0f);
        }
        std::fill(out + used, out + most, -1);
        total += used;
    }
    return total;
}
KERNEL(write_enough)
