// What the kernels of methods share: how they are called, stored numbers, the best of many scores, and sorting.
//
// Python passes a line of int64 (`kvbench.kernels.library.CppFile`): of an array its address, its type with its number
// of dimensions, and its sizes; of a float64 its bits.
#pragma once

#include <numeric>
#include <tuple>

#include "rows.h"
#include "threads.h"

// -- arguments -------------------------------------------------------------------------------------------------------

// As `kvbench.kernels.library.TYPE_CODES` numbers them.
template <class T>
constexpr int64_t type_code() {
    constexpr bool IS_FLOAT = std::is_floating_point_v<T>;
    return sizeof(T) * 32 + (IS_FLOAT ? 16 : std::is_signed_v<T> ? 8 : 0);
}

// A contiguous array.
template <class T, int N>
struct Array {
    T* data;
    int64_t sizes[N];

    decltype(auto) operator[](int64_t i) const {
        if constexpr (N == 1) {
            return (data[i]);
        } else {
            Array<T, N - 1> inner;
            std::copy_n(sizes + 1, N - 1, inner.sizes);
            int64_t size = 1;
            for (int64_t of_inner : inner.sizes) size *= of_inner;
            inner.data = data + i * size;
            return inner;
        }
    }
    int64_t size() const { return sizes[0]; }
    T* begin() const { return data; }
    T* end() const { return data + sizes[0]; }
    // Array[:count] of the first dimension.
    Array first(int64_t count) const {
        Array part = *this;
        part.sizes[0] = count;
        return part;
    }
};

// An array of numbers as keys are stored, float32 or bfloat16; `as_stored` says which.
template <int N>
struct Stored {
    const char* data;
    int64_t sizes[N];
    bool is_bfloat16;
};

template <class Number, int N>
struct Rows : Stored<N> {
    // Where the row of these indexes begins.
    template <class... I>
    const char* row(I... indexes) const {
        static_assert(sizeof...(I) == N - 1);
        int64_t at = 0, dimension = 0;
        ((at = at * this->sizes[dimension++] + indexes), ...);
        return this->data + at * this->sizes[N - 1] * Number::SIZE;
    }
};

// work(Float32{}) or work(Bfloat16{}).
template <int N, class Work>
auto as_stored(const Stored<N>& numbers, Work work) {
    return numbers.is_bfloat16 ? work(Bfloat16{}) : work(Float32{});
}

struct Line {
    const int64_t* next;
    bool fits;

    template <class T>
    void take(T& number) {
        std::memcpy(&number, next++, sizeof number);
    }
    template <class T, int N>
    void take(Array<T, N>& array) {
        fits = fits && next[1] == type_code<T>() + N;
        array.data = reinterpret_cast<T*>(next[0]);
        std::copy_n(next + 2, fits ? N : 0, array.sizes);
        next += fits ? N + 2 : 0;
    }
    template <int N>
    void take(Stored<N>& array) {
        array.is_bfloat16 = next[1] == type_code<uint16_t>() + N;
        fits = fits && (array.is_bfloat16 || next[1] == type_code<float>() + N);
        array.data = reinterpret_cast<const char*>(next[0]);
        std::copy_n(next + 2, fits ? N : 0, array.sizes);
        next += fits ? N + 2 : 0;
    }
    template <class T>
    T taken() {
        T value{};
        if (fits) take(value);
        return value;
    }
};

constexpr int64_t WRONG_TYPES = INT64_MIN;  // what a kernel returns that is called with other arrays

template <class... A>
int64_t call(int64_t (*kernel)(A...), const int64_t* arguments) {
    Line line{arguments, true};
    std::tuple<A...> values{line.taken<A>()...};
    return line.fits ? std::apply(kernel, values) : WRONG_TYPES;
}

// Lets Python call a function, which returns int64 and takes arrays, int64 and double.
#define KERNEL(name) \
    extern "C" int64_t kvbench_##name(const int64_t* line) { return call(name, line); }

// -- numbers ---------------------------------------------------------------------------------------------------------

// See `kvbench.method.capped`; 0: no cap.
inline float capped(float logit, float softcap) {
    return softcap && logit > -INFINITY ? softcap * std::tanh(logit / softcap) : logit;
}

// Of a stored vector with a query.
template <class Number>
float dot(const char* stored, const float* query, int64_t size) {
    Vector sum = splat(0);
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES)
        sum = fma(load(query + k), vector_at<Number>(stored + k * Number::SIZE), sum);
    float total = sum_of(sum);
    for (; k < size; k++) total += query[k] * Number::number(stored + k * Number::SIZE);
    return total;
}
inline float dot(const float* first, const float* second, int64_t size) {
    return dot<Float32>(reinterpret_cast<const char*>(first), second, size);
}

// Have the stored vector at an address on its way to the cache.
inline void fetch_all(const char* address, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) fetch(address + at);
}

// -- the best of many scores -----------------------------------------------------------------------------------------

// Float32 number `number` in the order of all float32, that of zero being 0.
inline float from_order(int64_t number) { return number >= 0 ? float_of(number) : -float_of(-number); }

// Put the indexes of the `k` largest scores in `picked`, ascending; returns how many.
//
// Of equal ones the first count, NaN and -inf never. The smallest score that belongs to them is found by bisection over
// the float32 numbers in their order: some twenty counts in vectors, where a heap mispredicts every other branch.
inline int64_t best(const float* scores, int64_t count, int64_t k, int32_t* picked) {
    constexpr int64_t MOST = 0x7F800000;  // float32 numbers above zero, infinity included
    int64_t low = -MOST, high = MOST;     // -inf belongs, NaN does not
    bool enough = count <= k;
    while (low < high && !enough) {
        int64_t middle = (low + high + 1) >> 1;
        float threshold = from_order(middle);
        int32_t above = 0;
        for (int64_t i = 0; i < count; i++) above += scores[i] >= threshold;
        enough = above == k;
        above >= k ? low = middle : high = middle - 1;
    }
    float threshold = from_order(low);
    int64_t equal = k, filled = 0;
    for (int64_t i = 0; i < count && !enough; i++) equal -= scores[i] > threshold;
    if (!(threshold > -INFINITY)) equal = 0;
    for (int64_t i = 0; i < count && filled < k; i++) {
        bool also = scores[i] == threshold && equal > 0;
        // another takes its place where it is not among them: no branch depends on a score
        picked[filled] = i;
        filled += scores[i] > threshold || also;
        equal -= also;
    }
    return filled;
}

// Sort both by rising values, equal ones as they stood; NaN anywhere.
//
// A short list by insertion, others by one byte of the numbers in their order after the other, the lowest first: no
// branch depends on what they are.
inline void sort(float* values, int32_t* items, int64_t count) {
    constexpr int64_t SHORT = 8;
    if (count <= SHORT) {
        for (int64_t index = 1; index < count; index++)
            for (int64_t at = index; at > 0 && values[at - 1] > values[at]; at--) {
                std::swap(values[at - 1], values[at]);
                std::swap(items[at - 1], items[at]);
            }
        return;
    }
    struct Item {
        uint32_t number;
        int32_t item;
    };
    std::vector<Item> from(count), to(count);
    int32_t ends[4][256] = {};
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = read<int32_t>(values + i);
        int64_t order = bits >= 0 ? bits : -int64_t(bits & 0x7FFFFFFF);
        from[i] = {uint32_t(order + (int64_t(1) << 31)), items[i]};
        for (int byte = 0; byte < 4; byte++) ends[byte][from[i].number >> 8 * byte & 255]++;
    }
    for (int byte = 0; byte < 4; byte++, from.swap(to)) {
        int32_t start = 0;
        for (int32_t& end : ends[byte]) start += std::exchange(end, start);
        for (const Item& item : from) to[ends[byte][item.number >> 8 * byte & 255]++] = item;
    }
    for (int64_t i = 0; i < count; i++) {
        values[i] = from_order(int64_t(from[i].number) - (int64_t(1) << 31));
        items[i] = from[i].item;
    }
}

// Fill indexes [k] and scores [k] with the best of `count` values, best first, then -1 and -inf.
template <class Index>
void write_best(const float* values, int64_t count, int64_t k, Index* indexes, float* scores) {
    std::vector<int32_t> picked(k);
    int64_t filled = best(values, count, k, picked.data());
    for (int64_t i = 0; i < filled; i++) scores[i] = -values[picked[i]];
    sort(scores, picked.data(), filled);
    std::copy_n(picked.data(), filled, indexes);
    for (int64_t i = 0; i < filled; i++) scores[i] = -scores[i];
    std::fill(indexes + filled, indexes + k, -1);
    std::fill(scores + filled, scores + k, -INFINITY);
}
