// A new token's keys and values: whether they are finite, and the slots they go into; stored keys at other positions;
// products of queries with all keys. In torch each of these takes some ten operations on a few numbers, in every layer
// of every step.
#pragma once

#include "attend.h"

inline bool is_finite(const char* numbers, int64_t count, bool is_bfloat16) {
    bool wrong = false;
    for (int64_t i = 0; i < count; i++)
        wrong |= is_bfloat16 ? (read<uint16_t>(numbers + 2 * i) & 0x7F80) == 0x7F80
                             : (read<uint32_t>(numbers + 4 * i) & 0x7F800000) == 0x7F800000;
    return !wrong;
}

// Where the next token of each of H KV heads goes.
struct Slots {
    char *keys, *values;
    int64_t key_size, value_size;
    const int64_t* first;  // [H], where the slots of each begin
    int64_t* ids;          // [H, slots], the tokens in them; slots = 0 where slot = id
    int64_t slots, heads, per_row;
};

// Put a token's key and value into the slot after the used ones [H], which is used from now on.
inline void put(const Slots& to, const char* key, const char* value, int64_t* used, const int64_t* tokens) {
    for (int64_t head = 0; head < to.heads; head++) {
        int64_t slot = to.first[head] + used[head];
        std::memcpy(to.keys + slot * to.key_size, key + head * to.key_size, to.key_size);
        std::memcpy(to.values + slot * to.value_size, value + head * to.value_size, to.value_size);
        if (to.slots) to.ids[head * to.slots + used[head]] = tokens[head / to.per_row];
        used[head]++;
    }
}

// Put rows of `size` bytes, one of each of H KV heads, into the slots [H, slots] of their tokens, which are there from
// now on.
inline void put_in_place(const char* rows, char* pool, int64_t size, const int64_t* slot_of, bool* present,
                         const int64_t* tokens, int64_t heads, int64_t per_row, int64_t slots) {
    for (int64_t head = 0; head < heads; head++) {
        int64_t at = head * slots + tokens[head / per_row];
        std::memcpy(pool + (head * slots + slot_of[at]) * size, rows + head * size, size);
        present[at] = true;
    }
}

// Turn vectors [B, H, n, D] by their positions [B, P, n], P = 1 or H, one half of the first R channels against the
// other (RoPE as Llama has it); cosines and sines [length, R], of each position.
struct RotaryTurn {
    const float* vectors;
    const int64_t* positions;
    const float *cosines, *sines;
    float* turned;
    int64_t batch, heads, position_heads, count, head_dim, width;
};

inline void turn(const RotaryTurn& of) {
    int64_t half = of.width / 2;
    for (int64_t list = 0; list < of.batch * of.heads; list++)
        for (int64_t i = 0; i < of.count; i++) {
            int64_t row = list / of.heads, of_row = list % of.heads * of.position_heads / of.heads;
            int64_t place = of.positions[(row * of.position_heads + of_row) * of.count + i];
            const float *cosine = of.cosines + place * of.width, *sine = of.sines + place * of.width;
            const float* x = of.vectors + (list * of.count + i) * of.head_dim;
            float* __restrict out = of.turned + (list * of.count + i) * of.head_dim;
            for (int64_t j = 0; j < half; j++) out[j] = x[j] * cosine[j] - x[half + j] * sine[j];
            for (int64_t j = 0; j < half; j++) out[half + j] = x[half + j] * cosine[half + j] + x[j] * sine[half + j];
            std::copy(x + 2 * half, x + of.head_dim, out + 2 * half);
        }
}

// Products of queries [B, Hkv, G, D] with the keys of their KV head where they lie: scores [B, Hkv, G, n].
struct Products {
    int64_t threads;
    const float* query;
    const char* keys;
    int64_t row_size, head_size, size, is_bfloat16;  // bytes from one row of the batch, head and token to the next
    float* scores;
    int64_t batch, kv_heads, group, count, head_dim;
};

inline void products(const Products& of) {
    const Format& format = FORMATS[of.is_bfloat16];  // float32 and bfloat16 stand first
    int64_t pieces = (of.count + DENSE_PIECE - 1) / DENSE_PIECE;
    Claims claims(of.batch * of.kv_heads * pieces);
    in_threads(of.threads, [&](int) {
        std::vector<float> queries(of.group * of.head_dim), block(of.group * BLOCK);
        const char* rows[BLOCK];
        for (int64_t item; claims.take(item);) {
            int64_t list = item / pieces, piece = item % pieces;
            const float* query = of.query + list * of.group * of.head_dim;
            float* scores = of.scores + list * of.group * of.count;
            for (int64_t g = 0; g < of.group; g++)
                lay_out(query + g * of.head_dim, &queries[g * of.head_dim], of.head_dim, format.spread);
            int64_t end = std::min((piece + 1) * DENSE_PIECE, of.count);
            for (int64_t first = piece * DENSE_PIECE; first < end; first += BLOCK) {
                int count = std::min<int64_t>(BLOCK, end - first);
                const char* key = of.keys + list / of.kv_heads * of.row_size + list % of.kv_heads * of.head_size +
                                  first * of.size;
                for (int i = 0; i < count; i++) rows[i] = key + i * of.size;
                format.score(queries.data(), of.group, of.head_dim, {rows, rows, count, 0, nullptr},
                             {nullptr, 0, key + BLOCK * of.size, of.size}, block.data());
                for (int64_t g = 0; g < of.group; g++)
                    std::copy_n(&block[g * BLOCK], count, scores + g * of.count + first);
            }
        }
    });
}
