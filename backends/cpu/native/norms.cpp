// RMSNorm and the attention-residual mix, a row at a time; T is the type of the rows.
#include <algorithm>
#include <cmath>

#include "rows.h"

using namespace k3hal;

// Four accumulators hide the latency of adding; one order for every row.
struct Sums {
    v16f lanes[4] = {};
    void add(long i, v16f x) { lanes[i / 16 % 4] += x; }
    float total() const { return sum16((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])); }
};

// Calls step(i, count) for each 16 channels from i, of which `count` exist.
template <typename Step> static inline void vectors(long dim, Step step) {
    long i = 0;
    for (; i + 64 <= dim; i += 64) step(i, 16), step(i + 16, 16), step(i + 32, 16), step(i + 48, 16);
    for (; i < dim; i += 16) step(i, dim - i);
}

static inline float rms_factor(float squares, long dim, float eps) { return 1.0f / std::sqrt(squares / dim + eps); }

template <typename T, typename W>
static inline void normalise(const T *x, const W *weight, long dim, float factor, T *out) {
    vectors(dim, [&](long i, long n) {
        store_up_to(out + i, load_up_to(x + i, n) * factor * load_up_to(weight + i, n), n);
    });
}

template <typename T, typename W>
static inline void norm_row(const T *x, T *residual, const W *weight, long dim, float eps, T *out) {
    if (residual) {
        vectors(dim, [&](long i, long n) {
            store_up_to(residual + i, load_up_to(residual + i, n) + load_up_to(x + i, n), n);
        });
        x = residual;
    }
    Sums squares;
    vectors(dim, [&](long i, long n) {
        const v16f v = load_up_to(x + i, n);
        squares.add(i, v * v);
    });
    normalise(x, weight, dim, rms_factor(squares.total(), dim, eps), out);
}

template <typename T, typename W>
static void norm(const void *x, long ldx, void *residual, long ldr, const void *weight, void *out, long rows, long dim,
                 float eps, int threads) {
    const int team = useful_threads(rows * dim, threads);
#pragma omp parallel for num_threads(team) schedule(static) if (team > 1)
    for (long t = 0; t < rows; t++)
        norm_row((const T *)x + t * ldx, residual ? (T *)residual + t * ldr : nullptr, (const W *)weight, dim, eps,
                 (T *)out + t * dim);
}

extern "C" void k3hal_rms_norm(const void *x, long ldx, void *residual, long ldr, const void *weight, void *out,
                               long rows, long dim, float eps, int wide, int wide_weight, int threads) {
    const auto run = wide ? norm<float, float> : wide_weight ? norm<bf16, float> : norm<bf16, bf16>;
    run(x, ldx, residual, ldr, weight, out, rows, dim, eps, threads);
}

// rsqrt(mean V^2 + eps) V . key, the score of one source.
template <typename T> static inline float score(const T *source, const float *key, long dim, float eps) {
    Sums squares, dot;
    vectors(dim, [&](long i, long n) {
        const v16f v = load_up_to(source + i, n);
        squares.add(i, v * v), dot.add(i, v * load_up_to(key + i, n));
    });
    return dot.total() * rms_factor(squares.total(), dim, eps);
}

static inline void softmax(float *scores, long count) {
    const float top = *std::max_element(scores, scores + count);
    float sum = 0;
    for (long j = 0; j < count; j++) sum += scores[j] = std::exp(scores[j] - top);
    for (long j = 0; j < count; j++) scores[j] /= sum;
}

struct Mix {
    long num_blocks, block_stride, dim;  // stride in values from one block to the next
    int reset, store;
    const float *key;
    float eps, out_eps;
};

// One row of the operator; `blocks` is its row in the first block, `weight` may be null.
template <typename T>
static void mix_row(T *prefix, const T *delta, T *blocks, const T *weight, const Mix &m, T *out) {
    const long dim = m.dim, count = m.num_blocks;
    if (delta)
        vectors(dim, [&](long i, long n) {
            const v16f d = load_up_to(delta + i, n);
            store_up_to(prefix + i, m.reset ? d : load_up_to(prefix + i, n) + d, n);
        });
    float weights[count + 1];
    for (long j = 0; j < count; j++) weights[j] = score(blocks + j * m.block_stride, m.key, dim, m.eps);
    weights[count] = score(prefix, m.key, dim, m.eps);
    softmax(weights, count + 1);
    Sums squares;
    vectors(dim, [&](long i, long n) {
        v16f sum = weights[count] * load_up_to(prefix + i, n);
        for (long j = 0; j < count; j++) sum += weights[j] * load_up_to(blocks + j * m.block_stride + i, n);
        store_up_to(out + i, sum, n);
        const v16f rounded = load_up_to(out + i, n);
        squares.add(i, rounded * rounded);
    });
    if (m.store) std::memcpy(blocks + count * m.block_stride, prefix, dim * sizeof(T));
    if (weight) normalise(out, weight, dim, rms_factor(squares.total(), dim, m.out_eps), out);
}

template <typename T>
static void mix(void *prefix, long ldp, const void *delta, long ldd, void *blocks, long ldb, const void *weight,
                const Mix &m, void *out, long rows, int threads) {
    const int team = useful_threads(rows * m.dim * (m.num_blocks + 1), threads);
#pragma omp parallel for num_threads(team) schedule(static) if (team > 1)
    for (long t = 0; t < rows; t++)
        mix_row((T *)prefix + t * ldp, delta ? (const T *)delta + t * ldd : nullptr, (T *)blocks + t * ldb,
                (const T *)weight, m, (T *)out + t * m.dim);
}

extern "C" void k3hal_attn_res_mix(void *prefix, long ldp, const void *delta, long ldd, void *blocks, long ldb,
                                   long block_stride, long num_blocks, int reset, int store, const float *key,
                                   const void *weight, float eps, float out_eps, void *out, long rows, long dim,
                                   int wide, int threads) {
    const Mix m = {num_blocks, block_stride, dim, reset, store, key, eps, out_eps};
    const auto run = wide ? mix<float> : mix<bf16>;
    run(prefix, ldp, delta, ldd, blocks, ldb, weight, m, out, rows, threads);
}
