// Attention over rows where they lie; `kvbench.kernels.attend` says what its structures hold.
//
// Work is cut into pieces of a list or of a sequence; each leaves the largest logit, the sum of the weights and the
// weighted sum of the values, and `join` joins those of a list (flash-decoding). Pieces do not depend on the number of
// threads, so neither does the result.
#pragma once

#include "rows.h"
#include "threads.h"

constexpr int64_t LIST_PIECE = 256;  // entries of a selected list
constexpr int64_t DENSE_PIECE = 512;

// -- formats ---------------------------------------------------------------------------------------------------------

struct Format {
    const char* name;  // see `kvbench.kernels.coded.Coded.name`
    bool spread, grouped;
    void (*score)(const float*, int, int, const Block&, const Ahead&, float*);
    void (*add_values)(float*, int, int, const Block&, const Ahead&, float*);
};

template <class F>
constexpr Format format(const char* name) {
    return {name, F::SPREAD, F::GROUPED, score<F>, add_values<F>};
}
// Of keys alone.
template <class F>
constexpr Format of_keys(const char* name) {
    return {name, F::SPREAD, F::GROUPED, score<F>, nullptr};
}

template <int BITS, class Parameter, Granularity OF>
using Ranged = Coded<PackedCodes<BITS, false>, RANGE, OF, Parameter>;
template <int BITS, bool UNIT>
using Scaled = Coded<PackedCodes<BITS, true>, SCALE, ROW, Float16, UNIT>;

constexpr Format FORMATS[] = {
    format<Plain<Float32>>("float32"),
    format<Plain<Bfloat16>>("bfloat16"),
    format<Coded<ByteCodes<true>, SCALE>>("8 signed scale row float32"),
    format<Coded<ByteCodes<false>, SCALE>>("8 e4m3 scale row float32"),
    format<Coded<ByteCodes<false>>>("8 e4m3 none row float32"),
    format<Ranged<3, Float16, ROW>>("3 unsigned range row float16"),
    format<Ranged<4, Float16, ROW>>("4 unsigned range row float16"),
    format<Ranged<2, Float32, CHANNELS>>("2 unsigned range channels float32"),
    format<Ranged<2, Bfloat16, CHANNELS>>("2 unsigned range channels bfloat16"),
    format<Ranged<4, Float32, CHANNELS>>("4 unsigned range channels float32"),
    format<Ranged<4, Bfloat16, CHANNELS>>("4 unsigned range channels bfloat16"),
    of_keys<Ranged<2, Float32, TOKENS>>("2 unsigned range tokens float32"),
    of_keys<Ranged<2, Bfloat16, TOKENS>>("2 unsigned range tokens bfloat16"),
    of_keys<Ranged<4, Float32, TOKENS>>("4 unsigned range tokens float32"),
    of_keys<Ranged<4, Bfloat16, TOKENS>>("4 unsigned range tokens bfloat16"),
    format<Scaled<2, false>>("2 table scale row float16"),
    format<Scaled<3, false>>("3 table scale row float16"),
    format<Scaled<4, false>>("4 table scale row float16"),
    of_keys<Scaled<2, true>>("2 table unit scale row float16"),
    of_keys<Scaled<3, true>>("3 table unit scale row float16"),
    of_keys<Scaled<4, true>>("4 table unit scale row float16"),
};

// -- what callers pass: ctypes structures have the same names --------------------------------------------------

struct Kind {
    int64_t format, size, offset;
    const float* table;
    const Format& of() const { return FORMATS[format]; }
};

struct Kinds {
    Kind key, value;
    int64_t group_size;
};

struct Request {
    int64_t threads, worth;
    const char* query;
    int64_t lists, rows, head_dim, is_bfloat16;
    double scaling, softcap;  // 0: no cap
    float* logits;
    int64_t columns, before, pieces;
    float* results;
    char* out;

    int64_t threads_for(int64_t pieces, int64_t bytes) const {
        return std::max<int64_t>(1, std::min({threads, pieces, bytes / worth}));
    }
};

struct ResidentRows {
    const int64_t *used, *first, *column;
    const char *keys, *values, *parameters;
    Kinds kinds;
};

struct NearRows {
    const char *keys, *values, *parameters;
    const int64_t *ids, *first, *used, *begin, *end;
    int64_t heads, slots;
};

struct FarRows {
    const char *keys, *values;
    const int64_t* slot_of;
    const bool* present;
    int64_t slots, attended;
};

struct Lists {
    const int64_t* index;
    int64_t batch, lists, count;
    const float* bias;
    int64_t bias_columns;
    NearRows near;
    FarRows far;
    const char* rebuilt;
    int64_t rebuilt_count, rebuilt_near;
    const char *extra_keys, *extra_values;
    int64_t extra_count, extra_column;
    Kinds kinds;
};

// -- a piece ---------------------------------------------------------------------------------------------------------

inline float number_at(const char* numbers, int64_t i, bool is_bfloat16) {
    return is_bfloat16 ? Bfloat16::number(numbers + 2 * i) : Float32::number(numbers + 4 * i);
}

// What a thread works on, of one piece at a time: queries [R, D] as `lay_out` has them for keys, logits [R, BLOCK], and
// where the rows of a piece lie.
struct Scratch {
    int rows, head_dim;
    std::vector<float> query, plain, sums, most, total, logits;
    std::vector<const char*> keys, values, groups;
    std::vector<int64_t> rank;

    Scratch(const Request& request, int64_t room)
        : rows(request.rows), head_dim(request.head_dim), query(rows * head_dim), plain(head_dim),
          sums(rows * head_dim), most(rows), total(rows), logits(rows * BLOCK), keys(room), values(room), groups(room),
          rank(room) {}

    Work running() { return {most.data(), total.data(), sums.data()}; }

    void begin(const Request& request, int64_t list, const Kinds& kinds) {
        // finite, so that its difference from a logit of -inf is one
        std::fill(most.begin(), most.end(), -__FLT_MAX__);
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int r = 0; r < rows; r++) {
            for (int j = 0; j < head_dim; j++)
                plain[j] = number_at(request.query, (list * rows + r) * head_dim + j, request.is_bfloat16);
            lay_out(plain.data(), &query[r * head_dim], head_dim, kinds.key.of().spread);
        }
    }

    // Logits of `count` rows of the piece, from `start` on, scaled.
    void score(const Request& request, const Kinds& kinds, int start, int count, const Ahead& ahead) {
        Block block{&keys[start], &groups[start], count, kinds.key.offset, kinds.key.table};
        kinds.key.of().score(query.data(), rows, head_dim, block, ahead, logits.data());
        scale(request, count);
    }
    void scale(const Request& request, int count) {
        Vector scaling = splat(request.scaling);
        for (int r = 0; r < rows; r++)
            for (float* here = &logits[r * BLOCK]; here < &logits[r * BLOCK] + count; here += LANES) {
                Vector scaled = load(here) * scaling;
                store(here, request.softcap ? capped(scaled, request.softcap) : scaled);
            }
    }

    // Weights of these, and their values.
    void add(const Kinds& kinds, int start, int count, const Ahead& ahead) {
        weigh(logits.data(), count, rows, head_dim, running());
        Block block{&values[start], nullptr, count, kinds.value.offset, kinds.value.table};
        kinds.value.of().add_values(logits.data(), rows, head_dim, block, ahead, sums.data());
    }

    // Add the bias [L, R, columns] to the logits of rows from `start` on, by their places in the list, and note these.
    void add_bias(const Request& request, const float* bias, int64_t columns, int64_t list, int start, int count) {
        for (int r = 0; r < rows; r++) {
            const float* of_bias = bias + (list * rows + r) * columns;
            float* of_row = &logits[r * BLOCK];
            for (int i = 0; bias && i < count; i++) of_row[i] += of_bias[rank[start + i]];
            float* noted = request.logits + (list * rows + r) * request.columns;
            for (int i = 0; request.logits && i < count; i++) noted[rank[start + i]] = of_row[i];
        }
    }

    // The results of a piece, [R, D + 2].
    void write_to(float* result, const Kinds& kinds) const {
        for (int r = 0; r < rows; r++, result += head_dim + 2) {
            lay_back(&sums[r * head_dim], result, head_dim, kinds.value.of().spread);
            result[head_dim] = most[r], result[head_dim + 1] = total[r];
        }
    }
};

// Join the pieces of each list, results [L, P, R, D + 2], to the output; logits become probabilities.
inline void join(const Request& request, const float* results, int64_t pieces) {
    int64_t rows = request.rows, head_dim = request.head_dim, size = head_dim + 2;
    std::vector<float> sum(head_dim);
    for (int64_t row = 0; row < request.lists * rows; row++) {
        const float* first = results + (row / rows * pieces * rows + row % rows) * size;
        float largest = -__FLT_MAX__, whole = 0;
        for (int64_t piece = 0; piece < pieces; piece++)
            largest = std::max(largest, first[piece * rows * size + head_dim]);
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t piece = 0; piece < pieces; piece++) {
            const float* part = first + piece * rows * size;
            float weight = exponential(part[head_dim] - largest);
            whole += weight * part[head_dim + 1];
            for (int64_t j = 0; j < head_dim; j++) sum[j] += weight * part[j];
        }
        for (int64_t j = 0; j < head_dim; j++) {
            int64_t at = row * head_dim + j;
            float x = sum[j] / whole;
            request.is_bfloat16 ? write(request.out + 2 * at, to_bfloat16(x)) : write(request.out + 4 * at, x);
        }
        if (float* logits = request.logits ? request.logits + row * request.columns : nullptr)
            for (int64_t i = 0; i < request.columns; i++) logits[i] = exponential(logits[i] - largest) / whole;
    }
}

// Where pieces of a call leave their results, and in the end the output if these pieces are all that is attended.
class Results {
  public:
    Results(const Request& request, int64_t pieces)
        : request_(request), pieces_(request.out ? pieces : request.pieces),
          local_(request.out ? request.lists * pieces * piece_size() : 0),
          results_(request.out ? local_.data() : request.results) {}

    float* of(int64_t list, int64_t piece) {
        return results_ + (list * pieces_ + request_.before + piece) * piece_size();
    }
    void join() const {
        if (request_.out) ::join(request_, results_, pieces_);
    }

  private:
    int64_t piece_size() const { return request_.rows * (request_.head_dim + 2); }

    const Request& request_;
    int64_t pieces_;
    std::vector<float> local_;
    float* results_;
};

// -- all slots -------------------------------------------------------------------------------------------------------

inline void attend_resident(const Request& request, const ResidentRows& slots) {
    int64_t longest = 0, total = 0;
    for (int64_t list = 0; list < request.lists; list++)
        longest = std::max(longest, slots.used[list]), total += slots.used[list];
    int64_t pieces = (longest + DENSE_PIECE - 1) / DENSE_PIECE;
    const Kinds& kinds = slots.kinds;
    Results results(request, pieces);
    int64_t threads = request.threads_for(request.lists * pieces, total * (kinds.key.size + kinds.value.size));
    Claims claims(request.lists * pieces);
    in_threads(threads, [&](int) {
        Scratch scratch(request, BLOCK);
        for (int64_t item; claims.take(item);) {
            int64_t list = item / pieces, piece = item % pieces;
            scratch.begin(request, list, kinds);
            int64_t end = std::min((piece + 1) * DENSE_PIECE, slots.used[list]);
            for (int64_t start = piece * DENSE_PIECE; start < end; start += BLOCK) {
                int count = std::min<int64_t>(BLOCK, end - start);
                int64_t slot = slots.first[list] + start;
                const char *key = slots.keys + slot * kinds.key.size, *value = slots.values + slot * kinds.value.size;
                for (int i = 0; i < count; i++) {
                    scratch.keys[i] = key + i * kinds.key.size;
                    scratch.values[i] = value + i * kinds.value.size;
                    scratch.groups[i] = slots.parameters + (slot + i) / GROUP * kinds.group_size;
                }
                scratch.score(request, kinds, 0, count, {nullptr, 0, value, kinds.value.size});
                if (request.logits)
                    for (int r = 0; r < request.rows; r++)
                        std::copy_n(&scratch.logits[r * BLOCK], count,
                                    request.logits + (list * request.rows + r) * request.columns + slots.column[list] +
                                        start);
                scratch.add(kinds, 0, count, {nullptr, 0, key + BLOCK * kinds.key.size, kinds.key.size});
            }
            scratch.write_to(results.of(list, piece), kinds);
        }
    });
    results.join();
}

// -- lists of tokens -------------------------------------------------------------------------------------------------

// Where the tokens of a piece lie, from the `first` of a list on: their keys, values and groups' parameters, and the
// place of each in the list. Returns how many are to be attended, -1 where one is in neither tier, or has no key.
inline int find(const Lists& lists, const int64_t* tokens, int64_t first, int64_t head, Scratch& scratch) {
    const NearRows& near = lists.near;
    const FarRows& far = lists.far;
    int64_t key_size = lists.kinds.key.size, value_size = lists.kinds.value.size, used = near.used[head], guess = 0;
    const int64_t *here = near.ids + head * near.slots, *end = here + used;
    int count = 0;
    for (int64_t i = first; i < std::min(first + LIST_PIECE, lists.count); i++) {
        int64_t token = tokens[i], slot = -1;
        if (token < 0) continue;
        if (near.slots) {
            // lists often name neighbours, one after the other
            if (guess >= used || here[guess] != token) guess = std::lower_bound(here, end, token) - here;
            if (guess < used && here[guess] == token) slot = guess++;
        } else if (token < used) {
            slot = token;
        }
        if (slot >= 0) {
            if (slot < near.begin[head] || slot >= near.end[head]) continue;
            int64_t at = near.first[head] + slot;
            scratch.keys[count] = near.keys + at * key_size;
            scratch.values[count] = near.values + at * value_size;
            scratch.groups[count] = near.parameters + at / GROUP * lists.kinds.group_size;
        } else if (token < far.slots && far.present[head * far.slots + token]) {
            if (!far.attended) continue;
            int64_t at = head * far.slots + far.slot_of[head * far.slots + token];
            scratch.keys[count] = far.keys + at * key_size;
            scratch.values[count] = far.values + at * value_size;
            if (lists.rebuilt && i >= lists.rebuilt_count) return -1;
        } else {
            return -1;
        }
        if (lists.rebuilt && (lists.rebuilt_near || slot < 0))
            scratch.keys[count] = lists.rebuilt + (head * lists.rebuilt_count + i) * key_size;
        if (count < BLOCK)
            for (int64_t at = 0; at < key_size; at += LINE) fetch(scratch.keys[count] + at);
        scratch.rank[count++] = i;
    }
    return count;
}

// The same for extra entries.
inline int find_extra(const Lists& lists, int64_t head, Scratch& scratch) {
    for (int64_t i = 0; i < lists.extra_count; i++) {
        int64_t at = head * lists.extra_count + i;
        scratch.keys[i] = lists.extra_keys + at * lists.kinds.key.size;
        scratch.values[i] = lists.extra_values + at * lists.kinds.value.size;
        scratch.rank[i] = lists.extra_column + i;
    }
    return lists.extra_count;
}

inline int64_t attend_lists(const Request& request, const Lists& lists) {
    int64_t list_pieces = (lists.count + LIST_PIECE - 1) / LIST_PIECE, pieces = list_pieces + (lists.extra_count > 0);
    const Kinds& kinds = lists.kinds;
    Results results(request, pieces);
    int64_t per_row = request.lists / lists.batch, heads = lists.near.heads / lists.batch;
    int64_t bytes = request.lists * lists.count * (kinds.key.size + kinds.value.size);
    Claims claims(request.lists * pieces);
    std::atomic<int64_t> lost{0};
    in_threads(request.threads_for(request.lists * pieces, bytes), [&](int) {
        Scratch scratch(request, std::max(LIST_PIECE, lists.extra_count));
        for (int64_t item; claims.take(item);) {
            int64_t list = item / pieces, piece = item % pieces, row = list / per_row;
            int64_t head = row * heads + list % per_row * heads / per_row;
            scratch.begin(request, list, kinds);
            int entries;
            if (piece == list_pieces) {
                entries = find_extra(lists, head, scratch);
            } else {
                int64_t of_row = row * lists.lists + std::min(list % per_row, lists.lists - 1);
                entries = find(lists, lists.index + of_row * lists.count, piece * LIST_PIECE, head, scratch);
                if (entries < 0) lost++, entries = 0;
            }
            for (int start = 0; start < entries; start += BLOCK) {
                int count = std::min(BLOCK, entries - start), next = start + count;
                scratch.score(request, kinds, start, count,
                              {&scratch.values[start], count, nullptr, kinds.value.size});
                scratch.add_bias(request, lists.bias, lists.bias_columns, list, start, count);
                scratch.add(kinds, start, count, {scratch.keys.data() + next, entries - next, nullptr, kinds.key.size});
            }
            scratch.write_to(results.of(list, piece), kinds);
        }
    });
    results.join();
    return lost;
}
