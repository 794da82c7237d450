// Matrix tiles for the CPU kernels: up to MR rows of activations times 32 rows of packed weights, in fp32.
//
// A packed weight is cut into blocks of 32 output rows; a block stores, for each input channel k, its 32 values side
// by side, so that one vector holds one channel of 16 outputs and the weights stream once, in order.
//   F32    float   [blocks][D][32]
//   BF16   uint16  [blocks][D][32]
//   MXFP4  uint8   [blocks][D][16], lane r in the low nibble and lane r + 16 in the high one of byte r,
//          with scales uint8 (E8M0) [blocks][D / 32][32]
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace k3hal {

typedef float v16f __attribute__((vector_size(64), aligned(4)));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4)));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4)));

enum Kind { F32 = 0, BF16 = 1, MXFP4 = 2 };
constexpr int LANES = 32;

static inline v16f splat(float x) { return x - v16f{}; }

// 16 integers from memory, widened. Intrinsics, as compilers widen vectors by halves or even element by element.
static inline v16u widen(const uint16_t *p) {
    return (v16u)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}

static inline v16u widen(const uint8_t *p) {
    return (v16u)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}

static inline v16f from_bf16(const uint16_t *p) { return (v16f)(widen(p) << 16); }

// 2^(s - 127) for E8M0 codes; 0 is the subnormal 2^-127, 255 is NaN.
static inline v16f e8m0(const uint8_t *codes) {
    const v16u s = widen(codes);
    v16u bits = s << 23;
    bits = s == 0 ? v16u{} + 0x00400000u : bits;
    bits = s == 255 ? v16u{} + 0x7fc00000u : bits;
    return (v16f)bits;
}

// Asks for the weights a page further on: the processor's own prefetchers stop at page ends, this stream does not.
static inline void prefetch(const void *p) { _mm_prefetch((const char *)p + 4096, _MM_HINT_T0); }

template <int KIND> struct Panel;  // one block of 32 output rows

template <> struct Panel<F32> {
    const float *w;
    Panel(const void *base, const void *, long block, long depth) : w((const float *)base + block * depth * LANES) {}
    inline void at(long k, v16f &a, v16f &b) {
        prefetch(w + k * LANES);
        prefetch(w + k * LANES + 16);
        a = *(const v16f *)(w + k * LANES);
        b = *(const v16f *)(w + k * LANES + 16);
    }
};

template <> struct Panel<BF16> {
    const uint16_t *w;
    Panel(const void *base, const void *, long block, long depth) : w((const uint16_t *)base + block * depth * LANES) {}
    inline void at(long k, v16f &a, v16f &b) {
        prefetch(w + k * LANES);
        a = from_bf16(w + k * LANES);
        b = from_bf16(w + k * LANES + 16);
    }
};

template <> struct Panel<MXFP4> {
    const uint8_t *w, *scales;
    v16f sa, sb;
    Panel(const void *base, const void *s, long block, long depth)
        : w((const uint8_t *)base + block * depth * 16), scales((const uint8_t *)s + block * (depth / 32) * LANES) {}
    inline void at(long k, v16f &a, v16f &b) {
        const v16f values = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
        if (k % 32 == 0) {
            sa = e8m0(scales + k);
            sb = e8m0(scales + k + 16);
        }
        // The permutation heeds only the low four bits of a lane.
        const v16u codes = widen(w + k * 16);
        a = (v16f)_mm512_permutexvar_ps((__m512i)codes, (__m512)values) * sa;
        b = (v16f)_mm512_permutexvar_ps((__m512i)(codes >> 4), (__m512)values) * sb;
    }
};

// y[m] = sum_k x[m][k] w[k], two vectors of 16 outputs a row. Every row is summed in the same order whatever MR is
// beside it, so a row's result does not depend on its batch.
template <int MR, int KIND>
static inline void tile(Panel<KIND> panel, const float *const *x, long depth, v16f (*y)[2]) {
    v16f acc[MR][2] = {};
    for (long k = 0; k < depth; k++) {
        v16f a, b;
        panel.at(k, a, b);
        for (int m = 0; m < MR; m++) acc[m][0] += a * x[m][k], acc[m][1] += b * x[m][k];
    }
    for (int m = 0; m < MR; m++) y[m][0] = acc[m][0], y[m][1] = acc[m][1];
}

// 2 * MAX_ROWS accumulators and a channel's weights fit 32 vector registers.
constexpr int MAX_ROWS = 12;

template <int KIND, int MR = MAX_ROWS>
static inline void tiles(Panel<KIND> panel, const float *const *x, int rows, long depth, v16f (*y)[2]) {
    if (rows == MR) return tile<MR, KIND>(panel, x, depth, y);
    if constexpr (MR > 1) return tiles<KIND, MR - 1>(panel, x, rows, depth, y);
}

// e^x, within 2 ulp over the finite range (Cephes' reduction and polynomial).
static inline v16f exp16(v16f x) {
    x = x > 88.3762626647949f ? splat(88.3762626647949f) : x;
    x = x < -87.3f ? splat(-87.3f) : x;
    v16f n = x * 1.44269504088896341f;
    const v16i whole = __builtin_convertvector(n + (n < 0 ? splat(-.5f) : splat(.5f)), v16i);
    n = __builtin_convertvector(whole, v16f);
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16f p = splat(1.9875691500e-4f);
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * x * x + x + 1.0f;
    return p * (v16f)((whole + 127) << 23);
}

// Exactly 0 where fp32 has no normal number left, as a large negative gate times its sigmoid must vanish.
static inline v16f sigmoid16(v16f x) { return x < -87.3f ? v16f{} : 1.0f / (1.0f + exp16(-x)); }

static inline v16f tanh16(v16f x) {
    const v16f z = x * x;
    v16f p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const v16f near = p * z * x + x, far = 1.0f - 2.0f / (exp16(x + x) + 1.0f);
    return (x < .625f) & (x > -.625f) ? near : far;
}

}  // namespace k3hal
