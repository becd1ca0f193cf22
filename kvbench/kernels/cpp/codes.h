// Rows of new tokens as codes, to the bit as `kvbench.memory.codecs` computes them in torch.
#pragma once

#include "rows.h"

// The nearest e4m3fn of a number of at most 448, of two the even one.
inline uint8_t to_e4m3(float x) {
    uint32_t bits = read<uint32_t>(&x), sign = bits & 0x80000000u, denormal = 141u << 23;
    bits ^= sign;
    if (bits > 0x43E00000u) return 0x7F | sign >> 24;  // NaN
    if (bits < 121u << 23) {
        float shifted = float_of(bits) + float_of(denormal);
        return (read<uint32_t>(&shifted) - denormal) | sign >> 24;
    }
    return (bits + (uint32_t(7 - 127) << 23) + 0x7FFFF + (bits >> 20 & 1)) >> 20 | sign >> 24;
}

// Codes one after the other, the first in the low bits.
class Packer {
  public:
    explicit Packer(char* to) : to_(to) {}
    void put(uint32_t code, int bits) {
        word_ |= code << filled_;
        for (filled_ += bits; filled_ >= 8; filled_ -= 8, word_ >>= 8) *to_++ = char(word_);
    }

  private:
    char* to_;
    uint32_t word_ = 0;
    int filled_ = 0;
};

struct Extremes {
    float least = INFINITY, most = -INFINITY;
    Extremes(const float* x, int64_t count) {
        bool is_nan = false;
        for (int64_t i = 0; i < count; i++) {
            is_nan |= x[i] != x[i];
            least = std::min(least, x[i]), most = std::max(most, x[i]);
        }
        if (is_nan) least = most = NAN;
    }
};

// A byte a channel, int8 or e4m3fn, then the scale.
inline void encode_bytes(const float* x, int64_t count, bool is_int8, char* out) {
    float largest = is_int8 ? 127 : 448;
    Extremes of(x, count);
    float scale = std::max(std::abs(of.least), std::abs(of.most)) / largest, by = scale > 0 ? scale : 1;
    for (int64_t i = 0; i < count; i++) {
        float place = std::clamp(x[i] / by, -largest, largest);
        out[i] = is_int8 ? char(int8_t(std::rint(place))) : char(to_e4m3(place));
    }
    write(out + count, scale);
}

// Groups of channels: packed codes, all scales, all minima, both in float32 or bfloat16.
inline void encode_channels(const float* x, int64_t count, int bits, bool is_bfloat16, char* out) {
    Packer codes(out);
    int size = is_bfloat16 ? 2 : 4;
    float largest = (1 << bits) - 1;
    char *scales = out + count * bits / 8, *minima = scales + count / GROUP * size;
    auto rounded = [&](float y) { return is_bfloat16 ? from_bfloat16(to_bfloat16(y)) : y; };
    auto put = [&](char* to, float y) { is_bfloat16 ? write(to, to_bfloat16(y)) : write(to, y); };
    for (int64_t group = 0; group < count / GROUP; group++, x += GROUP) {
        Extremes of(x, GROUP);
        float least = rounded(of.least), scale = rounded((of.most - least) / largest), by = scale > 0 ? scale : 1;
        for (int i = 0; i < GROUP; i++) codes.put(std::rint(std::clamp((x[i] - least) / by, 0.0f, largest)), bits);
        put(scales + group * size, scale), put(minima + group * size, least);
    }
}

// To the nearest float16, of two the even one.
inline uint16_t to_float16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
    __fp16 half = x;
    return read<uint16_t>(&half);
#else
    uint32_t bits = read<uint32_t>(&x), sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return sign | 0x7E00;
    if (bits >= 0x47800000) return sign | 0x7C00;
    if (bits < 0x38800000) {  // numbers without a leading one
        float shifted = float_of(bits) + 0.5f;
        return sign | (read<uint32_t>(&shifted) - 0x3F000000);
    }
    return sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
#endif
}

// Even steps from the least number to the largest: packed codes, of the step before it is rounded; step and least.
inline void encode_steps(const float* x, int64_t count, int bits, char* out) {
    Packer codes(out);
    float largest = (1 << bits) - 1;
    Extremes of(x, count);
    float step = std::max((of.most - of.least) / largest, 1e-8f);
    for (int64_t i = 0; i < count; i++) {
        float place = (x[i] - of.least) / step;
        codes.put(std::clamp(std::floor(place + 0.5f), 0.0f, largest), bits);
    }
    write(out + count * bits / 8, to_float16(step)), write(out + count * bits / 8 + 2, to_float16(of.least));
}

// Packed codes alone, of the nearest of numbers with these bounds between them; a number at a bound goes up.
inline void encode_nearest(const float* x, int64_t count, int bits, const float* bounds, char* out) {
    Packer codes(out);
    for (int64_t i = 0; i < count; i++) {
        uint32_t code = 0;
        for (int j = 0; j < (1 << bits) - 1; j++) code += !(x[i] < bounds[j]);
        codes.put(code, bits);
    }
}

enum Encoding { INT8_BYTES, E4M3_BYTES, CHANNEL_GROUPS, STEPS, NEAREST };

// Rows [count, D], in float32 or bfloat16, as rows of `width` bytes.
struct Encode {
    int64_t encoding;
    const char* rows;
    int64_t is_bfloat16;
    char* out;
    int64_t count, head_dim, width, bits, parameters_bfloat16;
    const float* bounds;
};

inline void encode(const Encode& of) {
    std::vector<float> x(of.head_dim);
    for (int64_t row = 0; row < of.count; row++) {
        for (int64_t j = 0; j < of.head_dim; j++) {
            int64_t at = row * of.head_dim + j;
            x[j] = of.is_bfloat16 ? Bfloat16::number(of.rows + 2 * at) : Float32::number(of.rows + 4 * at);
        }
        char* out = of.out + row * of.width;
        switch (of.encoding) {
            case CHANNEL_GROUPS: encode_channels(x.data(), of.head_dim, of.bits, of.parameters_bfloat16, out); break;
            case STEPS: encode_steps(x.data(), of.head_dim, of.bits, out); break;
            case NEAREST: encode_nearest(x.data(), of.head_dim, of.bits, of.bounds, out); break;
            default: encode_bytes(x.data(), of.head_dim, of.encoding == INT8_BYTES, out);
        }
    }
}
