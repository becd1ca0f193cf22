// The arrays of a DCI tree, as `methods.icecache.kernels` passes them, and products of keys.
//
// Words: a point is a row of the key memory. A node is the parent of points: node 0 is the root, every other node is
// itself a point of level 2 or more. A node's children lie in its chain of pages. The height of a key is
// sqrt(c^2 - |k|^2), the last coordinate of c T_K(k), where c is the largest norm.
#pragma once

#include "methods.h"

constexpr int32_t ABSENT = -1, ROOT = 0;
enum State { POINTS, NODES, PAGES, FREE, TOP };  // indexes in Tree::state

struct Point {
    int32_t page, slot, node;
    float norm2, affinity;
};
struct Page {
    int32_t node, count, next;
};
struct Node {
    int32_t point, level, first, children;
};

// One array of a line: its address, rows and columns.
template <class T>
struct Column {
    T* data;
    int64_t size, one;
    T& operator[](int64_t i) const { return data[i]; }
};
template <class T>
struct Matrix {
    T* data;
    int64_t rows, width;
    T* operator[](int64_t row) const { return data + row * width; }
};

// See `methods.icecache.kernels.Tree`.
struct Tree {
    struct {
        const char* data;
        int64_t itemsize, width;  // bytes of a number, which is float32 or bfloat16, and numbers of a key
    } keys;
    Column<Point> point;
    Column<Page> page;
    Matrix<int32_t> slots;
    Column<Node> node;
    Matrix<float> node_key, node_sum, projection, direction;
    Column<int64_t> level_size, state;
    Column<float> largest;
    Column<int32_t> token;
    Matrix<int8_t> sketch;
    Column<float> step;

    int64_t width() const { return keys.width; }
    bool is_bfloat16() const { return keys.itemsize == 2; }
    int64_t nodes() const { return state[NODES]; }

    // A key as float32.
    void read_key(int64_t row, float* key) const {
        for (int64_t k = 0; k < width(); k++)
            key[k] = is_bfloat16() ? Bfloat16::number(keys.data + 2 * (row * width() + k))
                                 : Float32::number(keys.data + 4 * (row * width() + k));
    }
    std::vector<float> key(int64_t row) const {
        std::vector<float> key(width());
        read_key(row, key.data());
        return key;
    }
    // The height of a key, from its norm and the largest one.
    float height(int64_t row) const { return std::sqrt(std::max(largest[0] - point[row].norm2, 0.0f)); }
    float height_of_node(int64_t number) const { return height(node[number].point); }
    // The last coordinate of a direction, which meets the height.
    float upright(int64_t j) const { return direction[j][direction.width - 1]; }
};

// See `methods.icecache.kernels.WorkArrays`: memory for one kernel at a time.
struct Workspace {
    Column<int32_t> nodes;
    Matrix<float> node_score;
    Column<uint8_t> marked, opened;
    Column<int32_t> rows;
    Column<float> step;
    Matrix<float> score;
    Column<int32_t> pages, starts;
    Column<float> scratch;
    Column<int32_t> picked, members;
    Matrix<float> exact;
};

using Lined = Array<const int64_t, 1>;  // the line of a tree, or of a workspace
inline const Tree& tree_at(const int64_t* line) { return *reinterpret_cast<const Tree*>(line); }
inline const Workspace& work_at(const int64_t* line) { return *reinterpret_cast<const Workspace*>(line); }

// -- products --------------------------------------------------------------------------------------------------------

// Keys, and queries at most, whose products are summed side by side: no sum waits for another.
constexpr int64_t TILE = 4;
// keys that are fetched early; the hardware looks no farther than a page of memory
constexpr int64_t KEYS_AHEAD = 16, SKETCHES_AHEAD = 32;

// Vectors [n, width] that rows choose from.
struct Vectors {
    const char* data;
    int64_t width, itemsize;

    Vectors(const Tree& tree) : data(tree.keys.data), width(tree.width()), itemsize(tree.keys.itemsize) {}
    Vectors(const Matrix<float>& matrix)
        : data(reinterpret_cast<const char*>(matrix.data)), width(matrix.width), itemsize(4) {}
    const char* at(int64_t row) const { return data + row * width * itemsize; }
    void fetch_tile(const int32_t* rows) const {
        for (int64_t t = 0; t < TILE; t++) fetch_all(at(rows[t]), width * itemsize);
    }
};

// Products of `TILE` keys with so many queries, each vector loaded once for all.
template <class Number, int QUERIES>
INLINE void tile(const char* const* keys, const float* queries, int64_t width, float* out, int64_t stride) {
    Vector sums[QUERIES][TILE];
    UNROLLED for (int q = 0; q < QUERIES; q++) UNROLLED for (int t = 0; t < TILE; t++) sums[q][t] = splat(0);
    int64_t whole = width / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        Vector key[TILE];
        UNROLLED for (int t = 0; t < TILE; t++) key[t] = vector_at<Number>(keys[t] + k * Number::SIZE);
        UNROLLED for (int q = 0; q < QUERIES; q++) {
            Vector query = load(queries + q * width + k);
            UNROLLED for (int t = 0; t < TILE; t++) sums[q][t] = fma(query, key[t], sums[q][t]);
        }
    }
    for (int q = 0; q < QUERIES; q++) {
        Four four = four_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
        for (int64_t k = whole; k < width; k++)
            for (int t = 0; t < TILE; t++)
                four[t] += queries[q * width + k] * Number::number(keys[t] + k * Number::SIZE);
        write(out + q * stride, four);
    }
}

// out[g][i] = queries[g] . vector of rows[i], start <= i < stop; three entries from `stop` on are overwritten.
inline void products(const Vectors& vectors, Column<int32_t> rows, int64_t start, int64_t stop,
                     const Matrix<float>& queries, const Matrix<float>& out) {
    if (start == stop) return;
    std::fill_n(&rows[stop], 3, rows[stop - 1]);
    auto all = [&](auto number) {
        using Number = decltype(number);
        int64_t width = vectors.width;
        for (int64_t i = start; i < stop; i += TILE) {
            if (i + KEYS_AHEAD + TILE < stop) vectors.fetch_tile(&rows[i + KEYS_AHEAD]);
            const char* keys[TILE];
            for (int64_t t = 0; t < TILE; t++) keys[t] = vectors.at(rows[i + t]);
            for (int64_t g = 0; g < queries.rows; g += TILE) {
                const float* query = queries[g];
                float* here = out[g] + i;
                switch (queries.rows - g) {
                    case 1: tile<Number, 1>(keys, query, width, here, out.width); break;
                    case 2: tile<Number, 2>(keys, query, width, here, out.width); break;
                    case 3: tile<Number, 3>(keys, query, width, here, out.width); break;
                    default: tile<Number, 4>(keys, query, width, here, out.width);
                }
            }
        }
    };
    vectors.itemsize == 2 ? all(Bfloat16{}) : all(Float32{});
}
// The same of one query, from 0 on.
inline void products(const Vectors& vectors, Column<int32_t> rows, int64_t stop, const float* query,
                     const Matrix<float>& out) {
    products(vectors, rows, 0, stop, {const_cast<float*>(query), 1, vectors.width}, out);
}

// work.score[0][i] = c^2 <T_K(row), T_K(rows[i])> and work.scratch[i] = row . rows[i].
inline void affinities(const Tree& tree, int64_t row, Column<int32_t> rows, int64_t count, const Workspace& work) {
    products(tree, rows, count, tree.key(row).data(), work.score);
    float height = tree.height(row);
    for (int64_t i = 0; i < count; i++) {
        work.scratch[i] = work.score[0][i];
        work.score[0][i] += height * tree.height(rows[i]);
    }
}

// -- sketches: a key in whole steps of 1/127 of its largest number ----------------------------------------------------

constexpr float STEPS = 127;  // largest number of a sketch
// largest number of a query that sketches are asked: int32 holds the sum of 1,032 products
constexpr float UNITS = 16383;
// of a step or unit: how far a number is from its sketch, and what products lose in rounding
constexpr float HALF = 0.52f;
constexpr float NOTHING = 1e-30f;         // below, a sketch has no steps
constexpr int64_t SKETCH_LANES = 16;      // a sketch is a whole number of so many wide

// Sketch a key; what is next to nothing is less than half of one step.
inline void sketch(const Tree& tree, int64_t row, const float* key) {
    float largest = 0;
    for (int64_t k = 0; k < tree.width(); k++) largest = std::max(largest, std::fabs(key[k]));
    bool nothing = largest < NOTHING;
    tree.step[row] = nothing ? 2 * largest : largest / STEPS;
    float steps = nothing ? 0 : STEPS / largest;
    for (int64_t k = 0; k < tree.width(); k++) tree.sketch[row][k] = int8_t(std::rint(key[k] * steps));
}

// Queries [G, D] as sketches [G, width] are asked: numbers in units; the unit of each; and how many steps of a key's
// sketch its q.k can be off: half a step of each number, half a unit of each of the query, and what is lost in rounding.
struct SketchedQueries {
    std::vector<int16_t> numbers;
    std::vector<float> unit, half;

    SketchedQueries(const Matrix<float>& queries, int64_t width)
        : numbers(queries.rows * width), unit(queries.rows), half(queries.rows) {
        for (int64_t g = 0; g < queries.rows; g++) {
            const float* query = queries[g];
            float largest = 0;
            for (int64_t k = 0; k < queries.width; k++) {
                largest = std::max(largest, std::fabs(query[k]));
                half[g] += HALF * std::fabs(query[k]);
            }
            if (largest < NOTHING) {
                half[g] *= 2 * STEPS + 2;
                continue;
            }
            unit[g] = largest / UNITS;
            half[g] += HALF * float(queries.width) * STEPS * unit[g];
            for (int64_t k = 0; k < queries.width; k++)
                numbers[g * width + k] = int16_t(std::rint(query[k] / unit[g]));
        }
    }
};

// A sketch times a query, in whole numbers, added up in pairs, for which CPUs have an instruction.
INLINE int32_t sketched(const int8_t* key, const int16_t* query, int64_t width) {
#if defined(__AVX2__)
    __m256i sum = _mm256_setzero_si256();
    for (int64_t k = 0; k < width; k += SKETCH_LANES) {
        __m256i numbers = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(key + k)));
        __m256i asked = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query + k));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(numbers, asked));
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
#else
    int32_t sum = 0;
    for (int64_t k = 0; k < width; k++) sum += int16_t(key[k]) * query[k];
    return sum;
#endif
}

// work.score[g][i] = queries[g] . sketch of work.rows[i], and work.step[i] its step, i < stop.
inline void sketched_products(const Tree& tree, int64_t stop, const SketchedQueries& queries, const Workspace& work) {
    int64_t width = tree.sketch.width, group = queries.unit.size();
    for (int64_t i = 0; i < stop; i++) {
        if (i + SKETCHES_AHEAD < stop) {
            int32_t later = work.rows[i + SKETCHES_AHEAD];
            fetch(reinterpret_cast<const char*>(&tree.step[later]));
            fetch_all(reinterpret_cast<const char*>(tree.sketch[later]), width);
        }
        work.step[i] = tree.step[work.rows[i]];
        const int8_t* key = tree.sketch[work.rows[i]];
        for (int64_t g = 0; g < group; g++) work.score[g][i] = sketched(key, &queries.numbers[g * width], width);
    }
}

// Norms, projections without the height's share, and sketches of rows start .. stop - 1, and c. Returns the first row
// that is not finite, then nothing changed but norms, or `ABSENT`.
inline int64_t measure(const Tree& tree, int64_t start, int64_t stop) {
    std::vector<float> key(tree.width());
    for (int64_t row = start; row < stop; row++) {
        tree.read_key(row, key.data());
        float total = dot(key.data(), key.data(), key.size());
        if (!(total < INFINITY)) return row;
        tree.point[row].norm2 = total;
    }
    for (int64_t row = start; row < stop; row++) {
        tree.read_key(row, key.data());
        tree.largest[0] = std::max(tree.largest[0], tree.point[row].norm2);
        for (int64_t j = 0; j < tree.direction.rows; j++)
            tree.projection[row][j] = dot(tree.direction[j], key.data(), key.size());
        sketch(tree, row, key.data());
    }
    return ABSENT;
}
