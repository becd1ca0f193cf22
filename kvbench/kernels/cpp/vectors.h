// Vectors of sixteen float32, in as many registers as the processor needs for them.
//
// Written with the vector extensions of GCC and Clang, so that one source serves AVX-512, AVX2 and NEON; the few
// operations that these lack are intrinsics. Sums run in the same order on all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
#define INLINED __attribute__((always_inline))  // of a lambda

constexpr int LANES = 16;
constexpr int PAIR = 2 * LANES;  // numbers that are read at once
constexpr int LINE = 64;         // bytes of a cache's line
#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // lanes of a register
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int8_t SignedBytes __attribute__((vector_size(WIDTH)));
typedef float Four __attribute__((vector_size(16)));

template <class T>
struct Lanes {
    T part[PARTS];
};
using Vector = Lanes<Floats>;
using Integers = Lanes<Words>;

// f of the registers of vectors.
template <class F, class... A>
INLINE auto lanewise(F f, const A&... a) {
    Lanes<decltype(f(a.part[0]...))> result;
    UNROLLED for (int i = 0; i < PARTS; i++) result.part[i] = f(a.part[i]...);
    return result;
}

template <class T>
INLINE T read(const void* address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

template <class T>
INLINE void write(void* address, T value) {
    std::memcpy(address, &value, sizeof value);
}

template <class T>
INLINE Lanes<T> load_lanes(const void* address) {
    Lanes<T> result;
    const char* at = static_cast<const char*>(address);
    UNROLLED for (int i = 0; i < PARTS; i++) result.part[i] = read<T>(at + i * sizeof(T));
    return result;
}

INLINE Vector load(const float* address) { return load_lanes<Floats>(address); }
INLINE void store(float* address, Vector x) {
    UNROLLED for (int i = 0; i < PARTS; i++) write(address + i * WIDTH, x.part[i]);
}
INLINE Vector splat(float x) {
    Vector result;
    UNROLLED for (int i = 0; i < PARTS; i++) result.part[i] = x - Floats{};
    return result;
}

INLINE Vector operator+(Vector a, Vector b) {
    return lanewise([](Floats x, Floats y) INLINED { return x + y; }, a, b);
}
INLINE Vector operator-(Vector a, Vector b) {
    return lanewise([](Floats x, Floats y) INLINED { return x - y; }, a, b);
}
INLINE Vector operator*(Vector a, Vector b) {
    return lanewise([](Floats x, Floats y) INLINED { return x * y; }, a, b);
}
INLINE Vector operator/(Vector a, Vector b) {
    return lanewise([](Floats x, Floats y) INLINED { return x / y; }, a, b);
}
// a * b + c, rounded once where the processor can (-ffp-contract=fast).
INLINE Vector fma(Vector a, Vector b, Vector c) {
    return lanewise([](Floats x, Floats y, Floats z) INLINED { return x * y + z; }, a, b, c);
}
// The larger of each two numbers; a where b is NaN.
INLINE Vector larger(Vector a, Vector b) {
    return lanewise([](Floats x, Floats y) INLINED { return y > x ? y : x; }, a, b);
}
INLINE Vector to_floats(Integers words) {
    return lanewise([](Words x) INLINED { return __builtin_convertvector(x, Floats); }, words);
}
// Bits of float32.
INLINE Vector as_floats(Integers bits) {
    return lanewise([](Words x) INLINED { return (Floats)x; }, bits);
}

// -- sums and maxima -------------------------------------------------------------------------------------------------

// Lanes joined by halves: the first eight with the last eight, and so on.
template <class Combine>
INLINE float joined(Vector x, Combine combine) {
    Four quarters[4];
    std::memcpy(quarters, &x, sizeof x);
    Four four = combine(combine(quarters[0], quarters[2]), combine(quarters[1], quarters[3]));
    Four two = combine(four, Four{four[2], four[3], four[2], four[3]});
    return combine(two, Four{two[1], two[1], two[1], two[1]})[0];
}
INLINE float sum_of(Vector x) {
    return joined(x, [](Four a, Four b) INLINED { return a + b; });
}
INLINE float largest_of(Vector x) {
    return joined(x, [](Four a, Four b) INLINED { return b > a ? b : a; });
}

// -- widths ----------------------------------------------------------------------------------------------------------

// GCC 12 converts between vectors of different sizes number by number, so x86's instructions are named.
INLINE Words widened(Bytes x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, read<int64_t>(&x)));
#else
    return __builtin_convertvector(x, Words);
#endif
}
INLINE Words widened(SignedBytes x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepi8_epi32(_mm_set_epi64x(0, read<int64_t>(&x)));
#else
    return __builtin_convertvector(x, Words);
#endif
}
INLINE Words widened(Halves x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}
INLINE Halves half_widened(SignedBytes x) {
#if defined(__AVX512F__)
    return (Halves)_mm256_cvtepi8_epi16((__m128i)x);
#elif defined(__AVX2__)
    return (Halves)_mm_cvtepi8_epi16(_mm_set_epi64x(0, read<int64_t>(&x)));
#else
    return __builtin_convertvector(x, Halves);
#endif
}
// The lower half of each word.
INLINE Halves narrowed(Words x) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, Halves);
#endif
}

// Of each quarter of a register the lanes A, B of a and C, D of b.
template <int A, int B, int C, int D, int... I>
INLINE Floats picked(Floats a, Floats b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(
        a, b, (I / 4 * 4 + (I % 4 == 0 ? A : I % 4 == 1 ? B : I % 4 == 2 ? WIDTH + C : WIDTH + D))...);
#else
    return __builtin_shuffle(
        a, b, Words{(I / 4 * 4 + (I % 4 == 0 ? A : I % 4 == 1 ? B : I % 4 == 2 ? WIDTH + C : WIDTH + D))...});
#endif
}
template <int A, int B, int C, int D>
INLINE Vector picked(Vector a, Vector b) {
    return lanewise(
        [](Floats x, Floats y) INLINED {
            return picked<A, B, C, D>(x, y, std::make_integer_sequence<int, WIDTH>{});
        },
        a, b);
}

// The sums of four vectors.
INLINE Four four_sums(Vector a, Vector b, Vector c, Vector d) {
    Vector ab = picked<0, 1, 0, 1>(a, b) + picked<2, 3, 2, 3>(a, b);
    Vector cd = picked<0, 1, 0, 1>(c, d) + picked<2, 3, 2, 3>(c, d);
    Vector sums = picked<0, 2, 0, 2>(ab, cd) + picked<1, 3, 1, 3>(ab, cd);
    Four quarters[4];
    std::memcpy(quarters, &sums, sizeof sums);
    return (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
}

// exp of numbers that are at most 0 or NaN; 0 below -87. 2^n exp(r), n = x / ln 2 to the nearest, r = x - n ln 2:
// Cephes' expf, whose relative error is below 2e-7.
INLINE Floats exponential(Floats x) {
    constexpr float LOW = -87.0f, ROUND = 12582912.0f;
    Floats low = LOW - Floats{}, within = x < low ? low : x;
    Floats rounded = within * 1.44269504088896341f + ROUND;  // its lowest bits are n
    Floats n = rounded - ROUND;
    Floats r = n * 2.12194440e-4f + (n * -0.693359375f + within);
    Floats sum = 1.9875691500e-4f - Floats{};
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * (r * r) + (r + 1.0f);
    Words power = ((Words)rounded << 23) + (127 << 23);
    return x < low ? Floats{} : sum * (Floats)power;
}
INLINE Vector exponential(Vector x) {
    return lanewise([](Floats y) INLINED { return exponential(y); }, x);
}
INLINE float exponential(float x) { return exponential(x - Floats{})[0]; }

// c tanh(x / c), in float32's precision: Lambert's continued fraction below c, else by exp(-2 |x| / c). -inf, which
// stands for no number, stays.
INLINE Vector capped(Vector numbers, float c) {
    return lanewise([c](Floats x) INLINED {
        Floats t = (x < 0.0f ? -x : x) / c, s = t * t, e = exponential(-2.0f * t);
        Floats over = t < 1.0f ? t * (10395.0f + s * (1260.0f + s * 21.0f)) : 1.0f - e;
        Floats under = t < 1.0f ? 10395.0f + s * (4725.0f + s * (210.0f + s)) : 1.0f + e;
        Floats size = c * over / under;
        return x < -__FLT_MAX__ ? x : x < 0.0f ? -size : size;
    }, numbers);
}

INLINE void fetch(const char* address) { __builtin_prefetch(address, 0, 3); }

// -- numbers in other types ------------------------------------------------------------------------------------------

INLINE float float_of(uint32_t bits) { return read<float>(&bits); }
INLINE float from_bfloat16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

// To the nearest, of two the even one.
INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = read<uint32_t>(&x);
    return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
INLINE void store_bfloat16(void* address, Vector x) {
    auto nearest = [](Floats y) INLINED {
        Words bits = (Words)y, odd = (Words)(bits >> 16) & 1;
        Words rounded = y != y ? Words{} + 0x7FC00000 : bits + 0x7FFF + odd;
        return narrowed(rounded >> 16);
    };
    Lanes<Halves> halves = lanewise(nearest, x);
    std::memcpy(address, &halves, sizeof halves);
}

INLINE float from_float16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#elif defined(__aarch64__)
    return read<__fp16>(&bits);
#else
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7FFF;
    if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    return float_of(sign | rest << 13) * 0x1p112f;
#endif
}

// Bits of float16 as float32.
INLINE Floats from_float16(Halves bits) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)bits);
#else
    Floats result;
    for (int i = 0; i < WIDTH; i++) result[i] = from_float16(bits[i]);
    return result;
#endif
}

// table[code] of 16 numbers, which repeat where codes have fewer bits than four; FEW: of the first 8. Higher bits of a
// code are ignored.
template <bool FEW>
INLINE Floats looked_up(const float* table, Words codes) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)read<Floats>(table));
#elif defined(__AVX2__)
    Floats low = (Floats)_mm256_permutevar8x32_ps((__m256)read<Floats>(table), (__m256i)codes);
    if (FEW) return low;
    Floats high = (Floats)_mm256_permutevar8x32_ps((__m256)read<Floats>(table + 8), (__m256i)codes);
    return (codes & 8) != 0 ? high : low;
#else
    Floats result;
    for (int i = 0; i < WIDTH; i++) result[i] = table[codes[i] & 15];
    return result;
#endif
}
