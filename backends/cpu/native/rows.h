// Rows of fp32 or bf16 values, read and written as vectors of 16 fp32 lanes.
#pragma once
#include <vector>

#include "tile.h"

namespace k3hal {

typedef float v8f __attribute__((vector_size(32), aligned(4)));
typedef float v4f __attribute__((vector_size(16), aligned(4)));
typedef uint16_t bf16;

static inline v16f load16(const float *p) { return *(const v16f *)p; }
static inline v16f load16(const bf16 *p) { return from_bf16(p); }

static inline void store16(float *p, v16f x) { *(v16f *)p = x; }

// To nearest even; NaN stays NaN.
static inline void store16(bf16 *p, v16f x) {
    const v16u bits = (v16u)x, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const v16u kept = (x == x ? rounded : bits | 0x400000u) >> 16;
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)kept));
}

// The last `count` < 16 values of a row, with zeros in the lanes beyond.
template <typename T> static inline v16f load_some(const T *p, long count) {
    T lanes[16] = {};
    std::memcpy(lanes, p, count * sizeof(T));
    return load16(lanes);
}

template <typename T> static inline void store_some(T *p, v16f x, long count) {
    T lanes[16];
    store16(lanes, x);
    std::memcpy(p, lanes, count * sizeof(T));
}

template <typename T> static inline v16f load_up_to(const T *p, long count) {
    return count >= 16 ? load16(p) : load_some(p, count);
}

template <typename T> static inline void store_up_to(T *p, v16f x, long count) {
    count >= 16 ? store16(p, x) : store_some(p, x, count);
}

static inline float sum16(v16f x) {
    v8f halves[2];
    std::memcpy(halves, &x, sizeof x);
    const v8f eight = halves[0] + halves[1];
    v4f quarters[2];
    std::memcpy(quarters, &eight, sizeof eight);
    const v4f four = quarters[0] + quarters[1];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

// The calling thread's own memory of `count` floats, not initialised, valid until it asks for the same USE again. Kept
// from call to call: fresh pages of the system take longer to get than most calls take to compute.
template <int USE = 0> static inline float *scratch(long count) {
    static thread_local std::vector<float> memory;
    if ((long)memory.size() < count) memory.resize(count);
    return memory.data();
}

// Values a thread must have to be worth waking.
constexpr long VALUES_PER_THREAD = 1 << 14;

static inline int useful_threads(long values, int threads) {
    const long useful = values / VALUES_PER_THREAD;
    return useful < 1 ? 1 : useful < threads ? useful : threads;
}

}  // namespace k3hal
