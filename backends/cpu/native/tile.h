// Matrix tiles for the CPU kernels: several rows of activations times 32 rows of packed weights, in fp32.
//
// A packed weight is cut into blocks of 32 output rows; a block stores, for each STEP input channels, 32 values or
// words side by side, so that one vector holds 16 outputs and the weights stream once, in order.
//   F32    float  [blocks][D][32]
//   BF16   uint32 [blocks][ceil(D / 2)][32], the even channel in the low half and the odd one in the high half
//   MXFP4  uint32 [blocks][D / 8][32], eight channels from the lowest four bits up,
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

// Asks for what a stream will read BYTES further on: the processor's own prefetchers stop at the end of a page. Into
// the second-level cache, since the first has room for fewer outstanding lines.
template <long BYTES = 8192> static inline void prefetch(const void *p) {
    _mm_prefetch((const char *)p + BYTES, _MM_HINT_T1);
}

// One block of 32 output rows, or one half of it. `take<HALVES>(k)` reads STEP channels from k on, `value<J>(half)` is
// channel k + J of 16 outputs.
template <int KIND> struct Panel;

template <> struct Panel<F32> {
    static constexpr int STEP = 1;
    const float *w;
    v16f values[2];
    Panel(const void *base, const void *, long block, long depth) : w((const float *)base + block * depth * LANES) {}
    Panel upper() const {
        Panel other = *this;
        other.w += 16;
        return other;
    }
    template <int HALVES> inline void take(long k) {
        for (int half = 0; half < HALVES; half++) {
            const float *at = w + k * LANES + half * 16;
            prefetch(at);
            values[half] = *(const v16f *)at;
        }
    }
    template <int J> inline v16f value(int half) const { return values[half]; }
};

struct Words {
    const uint32_t *w;
    v16u words[2];
    template <int HALVES> inline void read(long step) {
        for (int half = 0; half < HALVES; half++) {
            const uint32_t *at = w + step * LANES + half * 16;
            prefetch(at);
            words[half] = *(const v16u *)at;
        }
    }
};

template <> struct Panel<BF16> : Words {
    static constexpr int STEP = 2;
    Panel(const void *base, const void *, long block, long depth)
        : Words{(const uint32_t *)base + block * ((depth + 1) / 2) * LANES, {}} {}
    Panel upper() const {
        Panel other = *this;
        other.w += 16;
        return other;
    }
    template <int HALVES> inline void take(long k) { read<HALVES>(k / 2); }
    template <int J> inline v16f value(int half) const {
        return (v16f)(J ? words[half] & 0xffff0000u : words[half] << 16);
    }
};

template <> struct Panel<MXFP4> : Words {
    static constexpr int STEP = 8;
    const uint8_t *codes;
    v16f scales[2];
    Panel(const void *base, const void *s, long block, long depth)
        : Words{(const uint32_t *)base + block * (depth / 8) * LANES, {}},
          codes((const uint8_t *)s + block * (depth / 32) * LANES) {}
    Panel upper() const {
        Panel other = *this;
        other.w += 16;
        other.codes += 16;
        return other;
    }
    template <int HALVES> inline void take(long k) {
        if (k % 32 == 0)
            for (int half = 0; half < HALVES; half++) scales[half] = e8m0(codes + k + half * 16);
        read<HALVES>(k / 8);
    }
    template <int J> inline v16f value(int half) const {
        const v16f values = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
        // The permutation heeds only the low four bits of a lane.
        return (v16f)_mm512_permutexvar_ps((__m512i)(words[half] >> 4 * J), (__m512)values) * scales[half];
    }
};

// MR rows of activations, a fixed stride apart: four to a pointer, as x86 addresses reach three strides from one.
template <int MR> struct Activations {
    const float *of_four[(MR + 3) / 4];
    long stride, three;
    Activations(const float *x, long stride) : stride(stride), three(3 * stride) {
        for (int i = 0; i < (MR + 3) / 4; i++) of_four[i] = x + 4 * i * stride;
    }
    inline float at(int m, long k) const {
        const long row = m % 4 == 0 ? 0 : m % 4 == 1 ? stride : m % 4 == 2 ? 2 * stride : three;
        return of_four[m / 4][row + k];
    }
};

// sums[m] = sum_k x[m][k] w[k], 16 outputs to a vector. Every row is summed in the same order whatever rows are beside
// it, so its result does not depend on its batch.
template <int MR, int HALVES, int KIND> struct Tile {
    Panel<KIND> panel;
    const Activations<MR> x;
    v16f sums[MR][HALVES] = {};

    template <int J = 0> inline void add(long k, int count) {
        if (J >= count) return;
        v16f w[HALVES];
        for (int half = 0; half < HALVES; half++) w[half] = panel.template value<J>(half);
#pragma GCC unroll 24
        for (int m = 0; m < MR; m++)
            for (int half = 0; half < HALVES; half++) sums[m][half] += w[half] * x.at(m, k + J);
        if constexpr (J + 1 < Panel<KIND>::STEP) add<J + 1>(k, count);
    }

    inline void run(long depth) {
        constexpr int STEP = Panel<KIND>::STEP;
        long k = 0;
        for (; k + STEP <= depth; k += STEP) panel.template take<HALVES>(k), add(k, STEP);
        if (k < depth) panel.template take<HALVES>(k), add(k, depth - k);
    }
};

// What fits 32 vector registers beside a channel's weights: few rows of a whole block, or many of half a block.
constexpr int FEW = 12, MANY = 16, MOST = 24;

// y[m] = x[m] w^T for `rows` <= FEW rows of x, `stride` apart, and one block of 32 outputs.
template <int KIND, int MR = FEW>
static inline void few(Panel<KIND> panel, const float *x, long stride, int rows, long depth, v16f (*y)[2]) {
    if (rows == MR) {
        Tile<MR, 2, KIND> tile{panel, Activations<MR>(x, stride)};
        tile.run(depth);
        std::memcpy(y, tile.sums, sizeof tile.sums);
    } else if constexpr (MR > 1) {
        few<KIND, MR - 1>(panel, x, stride, rows, depth, y);
    }
}

template <int KIND, int MR>
static inline void many(Panel<KIND> panel, const float *x, long stride, long depth, v16f (*y)[2]) {
    for (int half = 0; half < 2; half++, panel = panel.upper()) {
        Tile<MR, 1, KIND> tile{panel, Activations<MR>(x, stride)};
        tile.run(depth);
        for (int m = 0; m < MR; m++) y[m][half] = tile.sums[m][0];
    }
}

// How many of the `rows` left to take together.
static inline long rows_at_once(long rows) {
    return rows >= MOST ? MOST : rows >= MANY ? MANY : rows > FEW ? (rows + 1) / 2 : rows;
}

// y[m] = x[m] w^T for the rows of one `rows_at_once`.
template <int KIND>
static inline void multiply(Panel<KIND> panel, const float *x, long stride, int rows, long depth, v16f (*y)[2]) {
    if (rows == MOST) return many<KIND, MOST>(panel, x, stride, depth, y);
    if (rows == MANY) return many<KIND, MANY>(panel, x, stride, depth, y);
    few<KIND>(panel, x, stride, rows, depth, y);
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
