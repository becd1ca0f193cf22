// A model's own layers in bfloat16, for a few tokens: linear, feed-forward and attention's projections, RMS norm; and
// products of queries with keys, rotary positions. Sums and what lies between are float32; results are rounded once.
#pragma once

#include "rows.h"
#include "threads.h"

constexpr int64_t OUTPUTS_PIECE = 2 * BLOCK;  // of a linear layer
// bytes after those of a weight that are read, on their way to the cache; past its end nothing happens
constexpr int64_t AHEAD = 4608;

// A linear layer: weight [outputs, inputs]; what it writes is float32, or bfloat16 with a bias [outputs] or none.
struct Linear {
    const char* weight;
    char* out;
    int64_t outputs;
    const char* bias = nullptr;
    bool writes_float32 = false;
};

// bfloat16 numbers [rows, width] in float32, laid out for weights.
inline std::vector<float> laid_out(const char* x, int64_t rows, int64_t width) {
    std::vector<float> laid(rows * width), plain(width);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < width; j++) plain[j] = Bfloat16::number(x + 2 * (r * width + j));
        lay_out(plain.data(), &laid[r * width], width, true);
    }
    return laid;
}

// block [rows, BLOCK] = x [rows, inputs] . `count` rows of a weight, from `first` on.
inline void some_products(const float* x, int rows, int inputs, const Linear& layer, int64_t first, int count,
                          float* block) {
    int64_t size = 2 * inputs;
    int whole = inputs / LANES * LANES;
    const char *at = layer.weight + first * size, *last = at + (count - 1) * size;
    for (int i = 0; i < count; i += 4, at += 4 * size) {
        const char* four[4];
        for (int n = 0; n < 4; n++) four[n] = std::min(at + n * size, last);
        for (int64_t line = AHEAD; line < AHEAD + 4 * size; line += LINE) fetch(at + line);
        meet<Plain<Bfloat16>>(x, rows, inputs, four, four, whole, nullptr, block + i);
    }
    for (int j = whole; j < inputs; j++)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < count; i++)
                block[r * BLOCK + i] +=
                    x[r * inputs + j] * Plain<Bfloat16>::number(layer.weight + (first + i) * size, j);
}

// Linear layers of the same x [rows, inputs], laid out.
//
// A thread takes the pieces of a stretch of its own, and then what others leave: where a core reads one long stretch,
// its own hardware is ahead of it; lines on the way to one core and read by the other are read twice.
inline void linear(int64_t threads, const float* x, int rows, int inputs, const Linear* layers, int count) {
    int64_t pieces = 0;
    for (int i = 0; i < count; i++) pieces += (layers[i].outputs + OUTPUTS_PIECE - 1) / OUTPUTS_PIECE;
    threads = std::max<int64_t>(1, std::min(threads, pieces));
    std::vector<Claims> claims(threads);
    for (int64_t i = 0; i < threads; i++) claims[i] = Claims(pieces * (i + 1) / threads - pieces * i / threads);
    in_threads(threads, [&](int number) {
        std::vector<float> block(rows * BLOCK);
        for (int64_t turn = 0, piece; turn < threads; turn++) {
            int64_t stretch = (number + turn) % threads;
            while (claims[stretch].take(piece)) {
                piece += pieces * stretch / threads;
                const Linear* layer = layers;
                for (int64_t of; piece >= (of = (layer->outputs + OUTPUTS_PIECE - 1) / OUTPUTS_PIECE); layer++)
                    piece -= of;
                int64_t start = piece * OUTPUTS_PIECE, stop = std::min(layer->outputs, start + OUTPUTS_PIECE);
                for (int64_t first = start; first < stop; first += BLOCK) {
                    int some = std::min<int64_t>(BLOCK, stop - first);
                    some_products(x, rows, inputs, *layer, first, some, block.data());
                    for (int r = 0; r < rows; r++) {
                        float* of_row = &block[r * BLOCK];
                        for (int i = 0; layer->bias && i < some; i++)
                            of_row[i] += Bfloat16::number(layer->bias + 2 * (first + i));
                        int64_t at = r * layer->outputs + first;
                        if (layer->writes_float32) {
                            std::copy_n(of_row, some, reinterpret_cast<float*>(layer->out) + at);
                        } else {
                            char* to = layer->out + 2 * at;
                            int full = some / LANES * LANES;
                            for (int i = 0; i < full; i += LANES) store_bfloat16(to + 2 * i, load(of_row + i));
                            for (int i = full; i < some; i++) write(to + 2 * i, to_bfloat16(of_row[i]));
                        }
                    }
                }
            }
        }
    });
}

// down . (silu(gate . x) * (up . x)): x, out [rows, inputs], gate, up [hidden, inputs], down [inputs, hidden].
inline void gated(int64_t threads, const char* x, const char* gate, const char* up, const char* down, char* out,
                  int64_t rows, int64_t inputs, int64_t hidden) {
    int64_t count = rows * hidden;
    std::vector<float> gates(count + LANES), ups(count + LANES);  // whole vectors read and write after the last
    std::vector<float> laid = laid_out(x, rows, inputs);
    Linear both[] = {{gate, reinterpret_cast<char*>(gates.data()), hidden, nullptr, true},
                     {up, reinterpret_cast<char*>(ups.data()), hidden, nullptr, true}};
    linear(threads, laid.data(), rows, inputs, both, 2);
    Vector nothing = splat(0), one = splat(1);
    for (int64_t i = 0; i < count; i += LANES) {
        Vector number = load(&gates[i]), negated = nothing - number;
        Vector smaller = exponential(nothing - larger(negated, nothing));  // of min(number, 0)
        Vector whole = one + exponential(nothing - larger(number, negated));
        store(&ups[i], load(&ups[i]) * (number * smaller / whole));
    }
    for (int64_t r = 0; r < rows; r++) lay_out(&ups[r * hidden], &gates[r * hidden], hidden, true);
    Linear last{down, out, inputs};
    linear(threads, gates.data(), rows, hidden, &last, 1);
}

// Queries, keys and values of tokens, the first two turned by their positions' angles (RoPE).
struct RotatedLayers {
    int64_t threads;
    const char* x;
    const char* weights[3];  // [heads * D, inputs]
    const char *cosines, *sines;  // [rows, D]
    char* outs[3];  // [rows, heads * D]
    int64_t rows, inputs, query_heads, kv_heads, head_dim;
};

// Write vectors [rows, heads * D], each half of a head turned against the other.
inline void write_turned(const float* vectors, int64_t width, const RotatedLayers& of, char* out) {
    int64_t half = of.head_dim / 2;
    std::vector<float> cosines(of.head_dim), sines(of.head_dim);
    for (int64_t r = 0; r < of.rows; r++) {
        for (int64_t i = 0; i < of.head_dim; i++) {
            cosines[i] = Bfloat16::number(of.cosines + 2 * (r * of.head_dim + i));
            sines[i] = Bfloat16::number(of.sines + 2 * (r * of.head_dim + i));
        }
        for (int64_t head = 0; head < width; head += of.head_dim, vectors += of.head_dim, out += 2 * of.head_dim) {
            auto put = [&](int64_t i, float other) {
                write(out + 2 * i, to_bfloat16(vectors[i] * cosines[i] + other * sines[i]));
            };
            for (int64_t i = 0; i < half; i++) put(i, -vectors[half + i]);
            for (int64_t i = half; i < of.head_dim; i++) put(i, vectors[i - half]);
        }
    }
}

inline void rotated(const RotatedLayers& of) {
    int64_t widths[] = {of.query_heads * of.head_dim, of.kv_heads * of.head_dim, of.kv_heads * of.head_dim};
    std::vector<float> laid = laid_out(of.x, of.rows, of.inputs), between[2];
    Linear layers[3];
    for (int i = 0; i < 3; i++) {
        layers[i] = {of.weights[i], of.outs[i], widths[i]};
        if (i == 2) continue;
        between[i].resize(of.rows * widths[i]);
        layers[i].out = reinterpret_cast<char*>(between[i].data()), layers[i].writes_float32 = true;
    }
    linear(of.threads, laid.data(), of.rows, of.inputs, layers, 3);
    for (int i = 0; i < 2; i++) write_turned(between[i].data(), widths[i], of, of.outs[i]);
}

// Vectors x [rows, width] over their root mean square, times a weight [width] (Zhang and Sennrich, 2019).
inline void normed(const char* x, const char* weight, char* out, int64_t rows, int64_t width, double epsilon) {
    std::vector<float> numbers(width);
    for (int64_t r = 0; r < rows; r++, x += 2 * width, out += 2 * width) {
        double squares = 0;
        for (int64_t i = 0; i < width; i++) numbers[i] = Bfloat16::number(x + 2 * i);
        for (int64_t i = 0; i < width; i++) squares += double(numbers[i] * numbers[i]);
        float scale = 1 / std::sqrt(squares / width + epsilon);
        for (int64_t i = 0; i < width; i++)
            write(out + 2 * i, to_bfloat16(numbers[i] * scale * Bfloat16::number(weight + 2 * i)));
    }
}
