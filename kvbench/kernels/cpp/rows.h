// Stored rows of keys and values, in any number of bits, and queries that meet them.
//
// A stored row is an address: of a device block, a host block, replaced keys or extra entries. It holds numbers in
// their type, or codes, which become numbers in the registers into which they are read. The scale and the minimum of a
// whole row go into its logit, or its weight. Of 32 neighbours in bfloat16, or in 4 bits, those of even indexes are one
// vector, and those of odd indexes the next, an operation each; what meets them, and what they are added to, is laid
// out in that order (`lay_out`).
#pragma once

#include "vectors.h"

constexpr int BLOCK = 64;  // rows whose logits are computed before their values are read
constexpr int GROUP = 32;  // tokens, or channels of a row, that share parameters
constexpr float TINY = 1e-16f;  // is added to the sum of a row's squares, whose root divides it

// -- formats: see `kvbench.kernels.coded.Coded` ----------------------------------------------------------------------

struct Float32 {
    using Bits = float;
    static constexpr int SIZE = sizeof(Bits);
    using Register = Floats;
    static INLINE float number(const char* address) { return read<float>(address); }
    static INLINE Floats widen(Floats x) { return x; }
};
struct Float16 {
    using Bits = uint16_t;
    static constexpr int SIZE = sizeof(Bits);
    using Register = Halves;
    static INLINE float number(const char* address) { return from_float16(read<uint16_t>(address)); }
    static INLINE Floats widen(Halves x) { return from_float16(x); }
};
struct Bfloat16 {
    using Bits = uint16_t;
    static constexpr int SIZE = sizeof(Bits);
    using Register = Halves;
    static INLINE float number(const char* address) { return from_bfloat16(read<uint16_t>(address)); }
    static INLINE Floats widen(Halves x) { return (Floats)(widened(x) << 16); }
};

// The vector of numbers at an address.
template <class Number>
INLINE Vector vector_at(const char* address) {
    auto widen = [](typename Number::Register x) INLINED { return Number::widen(x); };
    return lanewise(widen, load_lanes<typename Number::Register>(address));
}

// The vector of numbers at sixteen addresses.
template <class Number, int... I>
INLINE Floats some_at(const char* const* addresses, std::integer_sequence<int, I...>) {
    return Number::widen(typename Number::Register{read<typename Number::Bits>(addresses[I])...});
}
template <class Number>
INLINE Vector vector_at(const char* const* addresses) {
    Vector result;
    UNROLLED for (int i = 0; i < PARTS; i++)
        result.part[i] = some_at<Number>(addresses + i * WIDTH, std::make_integer_sequence<int, WIDTH>{});
    return result;
}

enum Parameters { NONE, SCALE, RANGE };  // x = number, number * scale, number * scale + minimum
// What has its parameters: a row, GROUP channels of a row, or each channel of GROUP tokens.
enum Granularity { ROW, CHANNELS, TOKENS };

struct Pair {
    Vector first, second;
};

// Numbers as they are.
template <class Number>
struct Plain {
    static constexpr bool SPREAD = Number::SIZE == 2, SCALED = false, RANGED = false, GROUPED = false, UNIT = false;
    static constexpr bool BYTES = true;  // a number of a row can be read by itself

    static float number(const char* row, int channel) { return Number::number(row + channel * Number::SIZE); }
    static INLINE Vector vector(const char* row, const char*, int block, int, const float*) {
        return vector_at<Number>(row + block * LANES * Number::SIZE);
    }
    static INLINE Pair two(const char* row, const char* by, int pair, int whole, const float* table) {
        if constexpr (!SPREAD) {
            return {vector(row, by, 2 * pair, whole, table), vector(row, by, 2 * pair + 1, whole, table)};
        } else {
            Integers both = load_lanes<Words>(row + pair * PAIR * Number::SIZE);
            return {as_floats(lanewise([](Words x) INLINED { return x << 16; }, both)),
                    as_floats(lanewise([](Words x) INLINED { return x & int32_t(0xFFFF0000); }, both))};
        }
    }
};

// Codes of 8 bits: int8, or e4m3fn, which is read as float16, whose exponent is one bit longer: the sign fills it, and
// is taken out but for the highest; FACTOR is what the exponents' biases are apart.
template <bool SIGNED>
struct ByteCodes {
    static constexpr int BITS = 8;
    static constexpr float FACTOR = SIGNED ? 1 : 256;

    static float number(const char* row, int channel) {
        int8_t code = read<int8_t>(row + channel);
        return SIGNED ? float(code) : from_float16(uint16_t(code << 7) & 0xBFFF);
    }
    static INLINE Vector vector(const char* row, int block, const float*) {
        auto codes = load_lanes<SignedBytes>(row + block * LANES);
        if constexpr (SIGNED)
            return to_floats(lanewise([](SignedBytes x) INLINED { return widened(x); }, codes));
        auto decoded = [](SignedBytes x) INLINED { return from_float16(half_widened(x) << 7 & uint16_t(0xBFFF)); };
        return lanewise(decoded, codes);
    }
};

// Packed codes of 1 to 4 bits, the first in the low bits; a number is its code, or stands in a table.
template <int BITS_, bool TABLE>
struct PackedCodes {
    static constexpr int BITS = BITS_;
    static constexpr float FACTOR = 1;

    static float number(const char*, int) { return 0; }  // not of packed codes: heads have whole vectors of them
    static INLINE Vector numbers(Integers codes, const float* table) {
        if constexpr (!TABLE)
            return to_floats(lanewise([](Words x) INLINED { return x & ((1 << BITS) - 1); }, codes));
        auto look_up = [&](Words x) INLINED { return looked_up<BITS < 4>(table, x); };
        return lanewise(look_up, codes);
    }
    static INLINE Vector vector(const char* row, int block, const float* table) {
        // words that hold the first eight codes and the last eight; no byte is read but those of these codes
        constexpr int STEP = BITS > 2 ? 2 * BITS - 4 : 0;
        const char* at = row + block * LANES * BITS / 8;
        int32_t low, high;
        if constexpr (BITS == 1)
            low = high = read<uint16_t>(at);
        else
            low = read<int32_t>(at), high = read<int32_t>(at + STEP);
        Integers shifted;
        UNROLLED for (int i = 0; i < PARTS; i++) {
            Words of_low, places;
            UNROLLED for (int j = 0; j < WIDTH; j++) {
                int lane = i * WIDTH + j;
                of_low[j] = lane < LANES / 2 ? -1 : 0;
                places[j] = lane * BITS - lane / (LANES / 2) * 8 * STEP;
            }
            shifted.part[i] = (of_low ? low - Words{} : high - Words{}) >> places;
        }
        return numbers(shifted, table);
    }
};

template <class Codes, Parameters PARAMETERS = NONE, Granularity OF = ROW, class Parameter = Float32,
          bool UNIT_ = false>
struct Coded : Codes {
    static constexpr bool GROUPED = OF == TOKENS, UNIT = UNIT_, BYTES = Codes::BITS == 8;
    static constexpr bool SPREAD = Codes::BITS == 4 && !GROUPED;
    static constexpr bool SCALED = OF == ROW && (PARAMETERS != NONE || Codes::FACTOR != 1);
    static constexpr bool RANGED = SCALED && PARAMETERS == RANGE;

    static float parameter(const char* by, int n) { return Parameter::number(by + n * Parameter::SIZE); }
    // The scales and minima of sixteen rows.
    static INLINE Pair of_rows(const char* (&by)[LANES]) {
        Vector scale = splat(Codes::FACTOR), least = splat(0);
        if constexpr (PARAMETERS != NONE) scale = scale * vector_at<Parameter>(by);
        if constexpr (PARAMETERS == RANGE) {
            for (int i = 0; i < LANES; i++) by[i] += Parameter::SIZE;
            least = vector_at<Parameter>(by);
        }
        return {scale, least};
    }

    static INLINE Vector vector(const char* row, const char* by, int block, int whole, const float* table) {
        return with_parameters(Codes::vector(row, block, table), by, block, whole);
    }
    static INLINE Pair two(const char* row, const char* by, int pair, int whole, const float* table) {
        if constexpr (!SPREAD) {
            return {vector(row, by, 2 * pair, whole, table), vector(row, by, 2 * pair + 1, whole, table)};
        } else {
            auto bytes = load_lanes<Bytes>(row + pair * LANES);
            Integers even = lanewise([](Bytes x) INLINED { return widened(x); }, bytes);
            Integers odd = lanewise([](Words x) INLINED { return x >> 4; }, even);
            return {with_parameters(Codes::numbers(even, table), by, 2 * pair, whole),
                    with_parameters(Codes::numbers(odd, table), by, 2 * pair, whole)};
        }
    }

  private:
    // The `block`-th vector with the parameters of its channels, or of their group.
    static INLINE Vector with_parameters(Vector numbers, const char* by, int block, int whole) {
        if constexpr (PARAMETERS == NONE || OF == ROW) {
            return numbers;
        } else {
            Vector scale, least{};
            if constexpr (OF == CHANNELS) {
                int group = block * LANES / GROUP;
                scale = splat(parameter(by, group));
                if constexpr (PARAMETERS == RANGE) least = splat(parameter(by, group + whole / GROUP));
            } else {
                const char* at = by + block * LANES * Parameter::SIZE;
                scale = vector_at<Parameter>(at);
                if constexpr (PARAMETERS == RANGE) least = vector_at<Parameter>(at + whole * Parameter::SIZE);
            }
            return PARAMETERS == RANGE ? fma(numbers, scale, least) : numbers * scale;
        }
    }
};

// -- work on a block of rows -----------------------------------------------------------------------------------------

// Rows that are fetched while others are read: those at addresses, or neighbours from one on.
struct Ahead {
    const char* const* rows;
    int count;
    const char* stretch;
    int64_t size;  // of a row

    INLINE void fetch_some(int first, int some) const {
        if (stretch)
            for (int64_t at = first * size; at < (first + some) * size; at += LINE) fetch(stretch + at);
        for (int i = first; i < std::min(first + some, count); i++)
            for (int64_t at = 0; at < size; at += LINE) fetch(rows[i] + at);
    }
};

// Rows at addresses.
struct Block {
    const char* const* rows;
    const char* const* groups;  // the parameters of each row's group, of formats with groups
    int count;
    int64_t offset;      // bytes from a row to its parameters
    const float* table;  // what codes stand for
};

// -- keys ------------------------------------------------------------------------------------------------------------

// The products of Q queries, `stride` numbers apart, with four rows, four numbers to each row of logits [Q, BLOCK]. A
// row is read once for all queries, whose sums stay in registers.
template <class Format, int Q>
INLINE void score_four(const float* queries, int64_t stride, const char* const (&rows)[4], const char* const (&by)[4],
                       int whole, const float* table, float* logits) {
    Vector sums[Q][4] = {}, squares[4] = {};
    auto meet = [&](const Vector (&y)[4], int64_t first) INLINED {
        if constexpr (Format::UNIT)
            UNROLLED for (int n = 0; n < 4; n++) squares[n] = fma(y[n], y[n], squares[n]);
        UNROLLED for (int q = 0; q < Q; q++) {
            Vector x = load(queries + q * stride + first);
            UNROLLED for (int n = 0; n < 4; n++) sums[q][n] = fma(x, y[n], sums[q][n]);
        }
    };
    int pairs = whole / PAIR;
    for (int pair = 0; pair < pairs; pair++) {
        Vector first[4], second[4];
        UNROLLED for (int n = 0; n < 4; n++) {
            Pair two = Format::two(rows[n], by[n], pair, whole, table);
            first[n] = two.first, second[n] = two.second;
        }
        meet(first, pair * PAIR);
        meet(second, pair * PAIR + LANES);
    }
    if (pairs * PAIR < whole) {
        Vector last[4];
        UNROLLED for (int n = 0; n < 4; n++) last[n] = Format::vector(rows[n], by[n], 2 * pairs, whole, table);
        meet(last, pairs * PAIR);
    }
    Four lengths;
    if constexpr (Format::UNIT) {
        lengths = four_sums(squares[0], squares[1], squares[2], squares[3]) + TINY;
        for (int n = 0; n < 4; n++) lengths[n] = std::sqrt(lengths[n]);
    }
    UNROLLED for (int q = 0; q < Q; q++) {
        Four products = four_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
        if constexpr (Format::UNIT) products = products / lengths;
        write(logits + q * BLOCK, products);
    }
}

// As `score_four`, of any number of queries.
template <class Format>
INLINE void meet(const float* query, int many, int64_t stride, const char* const (&rows)[4],
                 const char* const (&by)[4], int whole, const float* table, float* logits) {
    for (int r = 0; r < many; r += 4) {
        const float* first = query + r * stride;
        float* to = logits + r * BLOCK;
        switch (many - r) {
            case 1: score_four<Format, 1>(first, stride, rows, by, whole, table, to); break;
            case 2: score_four<Format, 2>(first, stride, rows, by, whole, table, to); break;
            case 3: score_four<Format, 3>(first, stride, rows, by, whole, table, to); break;
            default: score_four<Format, 4>(first, stride, rows, by, whole, table, to);
        }
    }
}

inline float total_of(const float* numbers, int count) {
    Vector sum = splat(0);
    float rest = 0;
    int whole = count / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) sum = sum + load(numbers + i);
    for (int i = whole; i < count; i++) rest += numbers[i];
    return sum_of(sum) + rest;
}

// The scales and minima of up to LANES rows; lanes after the last row's are as its own.
template <class Format>
INLINE Pair parameters_of(const Block& block, int first) {
    const char* by[LANES];
    for (int i = 0; i < LANES; i++) by[i] = block.rows[std::min(first + i, block.count - 1)] + block.offset;
    return Format::of_rows(by);
}

// logits [R, BLOCK] of queries [R, D], as `lay_out` has them, with a block of rows; -inf up to a whole vector.
template <class Format>
void score(const float* query, int many, int head_dim, const Block& block, const Ahead& ahead, float* logits) {
    int count = block.count, last = count - 1, whole = head_dim / LANES * LANES;
    for (int i = 0; i < count; i += 4) {
        ahead.fetch_some(i, 4);
        const char *rows[4], *by[4];
        for (int n = 0; n < 4; n++) {
            int row = std::min(i + n, last);
            rows[n] = block.rows[row];
            by[n] = Format::GROUPED ? block.groups[row] : rows[n] + block.offset;
        }
        meet<Format>(query, many, head_dim, rows, by, whole, block.table, logits + i);
    }
    if (Format::BYTES && whole < head_dim)
        for (int r = 0; r < many; r++)
            for (int i = 0; i < count; i++)
                for (int j = whole; j < head_dim; j++)
                    logits[r * BLOCK + i] += query[r * head_dim + j] * Format::number(block.rows[i], j);
    if constexpr (Format::SCALED)
        for (int i = 0; i < count; i += LANES) {
            Pair of = parameters_of<Format>(block, i);
            for (int r = 0; r < many; r++) {
                float* at = logits + r * BLOCK + i;
                Vector products = load(at) * of.first;
                if (Format::RANGED)
                    products = products + of.second * splat(total_of(query + r * head_dim, head_dim));
                store(at, products);
            }
        }
    for (int r = 0; r < many; r++)
        for (int i = count; i % LANES; i++) logits[r * BLOCK + i] = -INFINITY;
}

// -- weights ---------------------------------------------------------------------------------------------------------

// What a piece of a list has come to: the largest logit so far, the sum of the weights [R], and the weighted sum of the
// values [R, D].
struct Work {
    float *most, *total, *sums;
};

// Turn `count` logits [R, BLOCK] into weights, exp of what they are below the largest so far, and scale the sums to it.
inline void weigh(float* logits, int count, int many, int head_dim, const Work& work) {
    for (int r = 0; r < many; r++) {
        float *at = logits + r * BLOCK, *end = at + count;
        Vector maxima = load(at);
        for (float* here = at; here < end; here += LANES) maxima = larger(maxima, load(here));
        float largest = largest_of(maxima);
        if (largest > work.most[r]) {
            float shrink = exponential(work.most[r] - largest);
            work.most[r] = largest;
            work.total[r] *= shrink;
            for (int j = 0; j < head_dim; j++) work.sums[r * head_dim + j] *= shrink;
        }
        Vector below = splat(-work.most[r]), added = splat(0);
        for (float* here = at; here < end; here += LANES) {
            Vector weight = exponential(load(here) + below);
            store(here, weight);
            added = added + weight;
        }
        work.total[r] += sum_of(added);
    }
}

// -- values ----------------------------------------------------------------------------------------------------------

// Add rows to each of Q sums, D numbers apart, VECTORS vectors of them, by weights [Q, BLOCK]; the sums stay in
// registers.
template <class Format, int Q, int VECTORS>
INLINE void add_rows(const float* weights, const char* const* rows, int64_t offset, int many, int block, int whole,
                     const float* table, float* sums, int64_t stride) {
    Vector total[Q][VECTORS];
    float* first = sums + int64_t(block) * LANES * VECTORS;
    UNROLLED for (int q = 0; q < Q; q++) {
        UNROLLED for (int n = 0; n < VECTORS; n++) total[q][n] = load(first + q * stride + n * LANES);
    }
    for (int i = 0; i < many; i++) {
        const char *row = rows[i], *by = row + offset;
        Vector y[VECTORS];
        if constexpr (VECTORS == 2) {
            Pair two = Format::two(row, by, block, whole, table);
            y[0] = two.first, y[1] = two.second;
        } else {
            y[0] = Format::vector(row, by, block, whole, table);
        }
        UNROLLED for (int q = 0; q < Q; q++) {
            Vector weight = splat(weights[q * BLOCK + i]);
            UNROLLED for (int n = 0; n < VECTORS; n++) total[q][n] = fma(weight, y[n], total[q][n]);
        }
    }
    UNROLLED for (int q = 0; q < Q; q++) {
        UNROLLED for (int n = 0; n < VECTORS; n++) store(first + q * stride + n * LANES, total[q][n]);
    }
}

template <class Format, int Q>
INLINE void add_some(const float* weights, const char* const* rows, int64_t offset, int many, int whole,
                     const float* table, float* sums, int64_t stride) {
    int pairs = whole / PAIR;
    for (int pair = 0; pair < pairs; pair++)
        add_rows<Format, Q, 2>(weights, rows, offset, many, pair, whole, table, sums, stride);
    if (pairs * PAIR < whole)
        add_rows<Format, Q, 1>(weights, rows, offset, many, 2 * pairs, whole, table, sums, stride);
}

// Add to sums [R, D] a block of rows, by weights [R, BLOCK], which are multiplied in place with the scale that a row
// has.
template <class Format>
void add_values(float* weights, int many, int head_dim, const Block& block, const Ahead& ahead, float* sums) {
    int count = block.count, whole = head_dim / LANES * LANES;
    if constexpr (Format::SCALED)
        for (int i = 0; i < count; i += LANES) {
            Pair of = parameters_of<Format>(block, i);
            for (int r = 0; r < many; r++) {
                float* at = weights + r * BLOCK + i;
                if (Format::RANGED) {
                    float added = sum_of(load(at) * of.second);
                    for (int j = 0; j < head_dim; j++) sums[r * head_dim + j] += added;
                }
                store(at, load(at) * of.first);
            }
        }
    for (int i = 0; i < count; i += LANES) {
        ahead.fetch_some(i, LANES);
        const char* const* rows = block.rows + i;
        int few = std::min(count - i, LANES);
        for (int r = 0; r < many; r += 4) {
            const float* by = weights + r * BLOCK + i;
            float* to = sums + r * head_dim;
            switch (many - r) {
                case 1: add_some<Format, 1>(by, rows, block.offset, few, whole, block.table, to, head_dim); break;
                case 2: add_some<Format, 2>(by, rows, block.offset, few, whole, block.table, to, head_dim); break;
                case 3: add_some<Format, 3>(by, rows, block.offset, few, whole, block.table, to, head_dim); break;
                default: add_some<Format, 4>(by, rows, block.offset, few, whole, block.table, to, head_dim);
            }
        }
    }
    if (Format::BYTES && whole < head_dim)
        for (int r = 0; r < many; r++)
            for (int i = 0; i < count; i++)
                for (int j = whole; j < head_dim; j++)
                    sums[r * head_dim + j] += weights[r * BLOCK + i] * Format::number(block.rows[i], j);
}

// -- order -----------------------------------------------------------------------------------------------------------

// Numbers [D] in the order in which they meet rows whose neighbours are spread over two vectors.
inline void lay_out(const float* numbers, float* laid, int count, bool spread) {
    int pairs = spread ? count / PAIR * PAIR : 0;
    for (int first = 0; first < pairs; first += PAIR)
        for (int i = 0; i < LANES; i++) {
            laid[first + i] = numbers[first + 2 * i];
            laid[first + LANES + i] = numbers[first + 2 * i + 1];
        }
    std::copy(numbers + pairs, numbers + count, laid + pairs);
}

// And back.
inline void lay_back(const float* laid, float* numbers, int count, bool spread) {
    int pairs = spread ? count / PAIR * PAIR : 0;
    for (int first = 0; first < pairs; first += PAIR)
        for (int i = 0; i < LANES; i++) {
            numbers[first + 2 * i] = laid[first + i];
            numbers[first + 2 * i + 1] = laid[first + LANES + i];
        }
    std::copy(laid + pairs, laid + count, numbers + pairs);
}
