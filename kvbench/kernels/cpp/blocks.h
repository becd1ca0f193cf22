// Attention over a serving engine's blocks, and copies out of them; see `kvbench.backends.vllm.paged`.
#pragma once

#include "attend.h"

// Blocks [n, H, 2, block_words], a block's keys and its values, in words of one number, or of two where they are
// packed: keys by words of neighbouring dimensions, in tiles of 16 tokens, and values by words of neighbouring tokens,
// in tiles of 16 dimensions.
struct Blocks {
    const int64_t* tables;  // [B, table_length], which blocks each row of the batch has
    int64_t table_length;
    const char* cache;
    int64_t heads, block_words, pair, number_size, head_dim;

    int64_t size() const { return block_words * pair / head_dim; }  // tokens of a block
    // The keys (side 0) or values (side 1) of a token's block.
    const char* half(int64_t row, int64_t head, int64_t token, int side) const {
        int64_t block = tables[row * table_length + token / size()];
        return cache + ((block * heads + head) * 2 + side) * block_words * pair * number_size;
    }
};

// Copy the rows of `count` tokens; -1 is read as 0.
template <class Number>
void copy_rows(const Blocks& from, int64_t row, int64_t head, const int64_t* ids, int64_t count, char* keys,
               char* values) {
    int64_t head_dim = from.head_dim, size = from.size();
    for (int64_t i = 0; i < count; i++) {
        int64_t token = std::max<int64_t>(ids[i], 0), at = token % size;
        const Number* key = reinterpret_cast<const Number*>(from.half(row, head, token, 0));
        const Number* value = reinterpret_cast<const Number*>(from.half(row, head, token, 1));
        Number* to_key = reinterpret_cast<Number*>(keys) + i * head_dim;
        Number* to_value = reinterpret_cast<Number*>(values) + i * head_dim;
        if (from.pair == 2) {
            key += at / LANES * LANES * head_dim + at % LANES * 2;
            for (int64_t j = 0; j < head_dim; j += 2)
                to_key[j] = key[j * LANES], to_key[j + 1] = key[j * LANES + 1];
            value += at / 2 * LANES * 2 + at % 2;
            for (int64_t j = 0; j < head_dim; j++)
                to_value[j] = value[j / LANES * LANES * size + j % LANES * 2];
        } else {
            for (int64_t j = 0; j < head_dim; j++) to_key[j] = key[j * size + at];
            std::copy_n(value + at * head_dim, head_dim, to_value);
        }
    }
}
inline void copy_rows(const Blocks& from, int64_t row, int64_t head, const int64_t* ids, int64_t count, char* keys,
                      char* values) {
    (from.number_size == 2 ? copy_rows<uint16_t> : copy_rows<uint32_t>)(from, row, head, ids, count, keys, values);
}

// Copy keys and values of tokens [H, count] of the first row, to [H, count, D].
inline void gather(int64_t threads, const Blocks& from, const int64_t* ids, int64_t count, char* keys, char* values) {
    int64_t pieces = (count + BLOCK - 1) / BLOCK, bytes = from.head_dim * from.number_size;
    Claims claims(from.heads * pieces);
    in_threads(threads, [&](int) {
        for (int64_t item; claims.take(item);) {
            int64_t head = item / pieces, first = item % pieces * BLOCK, at = head * count + first;
            copy_rows(from, 0, head, ids + at, std::min<int64_t>(BLOCK, count - first), keys + at * bytes,
                      values + at * bytes);
        }
    });
}

// Logits [R, BLOCK] of float32 keys in blocks without tiles, whose dimensions lie apart: neighbours in a block are met
// by vectors, a query each. A vector's last lanes may be of what follows in the block, and are passed over.
inline void score_columns(const Blocks& blocks, int64_t row, int64_t head, const int64_t* ids, int count,
                          Scratch& scratch) {
    int64_t size = blocks.size();
    for (int i = 0, run; i < count; i += run) {
        int64_t at = ids[i] % size;
        for (run = 1; run < LANES && i + run < count && at + run < size && ids[i + run] == ids[i] + run;) run++;
        const float* first = reinterpret_cast<const float*>(blocks.half(row, head, ids[i], 0)) + at;
        for (int r = 0; r < scratch.rows; r++) {
            const float* query = &scratch.query[r * scratch.head_dim];
            Vector a = splat(0), b = splat(0);
            for (int j = 0; j < scratch.head_dim; j += 2) {
                a = fma(load(first + j * size), splat(query[j]), a);
                b = fma(load(first + (j + 1) * size), splat(query[j + 1]), b);
            }
            float products[LANES];
            store(products, a + b);
            std::copy_n(products, run, &scratch.logits[r * BLOCK + i]);
        }
    }
    for (int r = 0; r < scratch.rows; r++)
        for (int i = count; i % LANES; i++) scratch.logits[r * BLOCK + i] = -INFINITY;
}

// Lists of tokens that lie in blocks, as `Lists` has them.
struct BlockLists {
    const int64_t* index;
    int64_t batch, lists, count;
    const float* bias;
    int64_t bias_columns;
    const char* rebuilt;
    Blocks blocks;
    Kinds kinds;
};

// Of blocks with float32 in no tiles keys of neighbours are met dimension by dimension, and values where they lie; of
// others a few rows at a time are copied, and attended while they are in the cache.
inline void attend_blocks(const Request& request, const BlockLists& lists) {
    const Blocks& blocks = lists.blocks;
    const Kinds& kinds = lists.kinds;
    int64_t pieces = (lists.count + LIST_PIECE - 1) / LIST_PIECE, per_row = request.lists / lists.batch;
    int64_t size = kinds.key.size;
    Results results(request, pieces);
    Claims claims(request.lists * pieces);
    in_threads(request.threads_for(request.lists * pieces, request.lists * lists.count * 2 * size), [&](int) {
        Scratch scratch(request, BLOCK);
        std::vector<char> keys(BLOCK * size), values(BLOCK * size);
        int64_t ids[BLOCK];
        for (int64_t item; claims.take(item);) {
            int64_t list = item / pieces, piece = item % pieces, row = list / per_row;
            int64_t head = list % per_row * blocks.heads / per_row;
            int64_t of_row = row * lists.lists + std::min(list % per_row, lists.lists - 1);
            const int64_t* tokens = lists.index + of_row * lists.count;
            scratch.begin(request, list, kinds);
            int64_t place = piece * LIST_PIECE, end = std::min(lists.count, place + LIST_PIECE);
            while (place < end) {
                int count = 0, consecutive = 0;
                for (; place < end && count < BLOCK; place++) {
                    if (tokens[place] < 0) continue;
                    ids[count] = tokens[place], scratch.rank[count++] = place;
                }
                if (!count) break;
                for (int i = 1; i < count; i++) consecutive += ids[i] == ids[i - 1] + 1;
                if (blocks.pair == 1 && blocks.number_size == 4 && !lists.rebuilt && 2 * consecutive >= count) {
                    for (int i = 0; i < count; i++)
                        scratch.values[i] = blocks.half(row, head, ids[i], 1) + ids[i] % blocks.size() * size;
                    score_columns(blocks, row, head, ids, count, scratch);
                    scratch.scale(request, count);
                } else {
                    copy_rows(blocks, row, head, ids, count, keys.data(), values.data());
                    for (int i = 0; i < count; i++) {
                        int64_t at = (row * blocks.heads + head) * lists.count + scratch.rank[i];
                        scratch.keys[i] = lists.rebuilt ? lists.rebuilt + at * size : keys.data() + i * size;
                        scratch.values[i] = values.data() + i * size;
                    }
                    scratch.score(request, kinds, 0, count, {});
                }
                scratch.add_bias(request, lists.bias, lists.bias_columns, list, 0, count);
                scratch.add(kinds, 0, count, {});
            }
            scratch.write_to(results.of(list, piece), kinds);
        }
    });
    results.join();
}
