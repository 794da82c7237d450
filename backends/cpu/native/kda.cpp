// One token of a KDA layer for every sequence: convolution, gates, delta rule and gated norm, a head at a time.
#include <cmath>

#include "rows.h"

using namespace k3hal;

struct Weights {
    const float *taps, *rate, *dt_bias, *norm;  // [W, C], [H], [H, K], [K]
    long width;
    int bounded;
    float lower_bound, eps;
};

// log(1 + z) for z in [0, 1]: 2 artanh(z / (2 + z)) as a series in at most 1 / 9.
static inline v16f log1p16(v16f z) {
    const v16f s = z / (2.0f + z), t = s * s;
    v16f p = splat(1.f / 17);
    for (int n = 15; n >= 1; n -= 2) p = p * t + 1.0f / n;
    return 2.0f * s * p;
}

static inline v16f softplus16(v16f x) {
    const v16f size = x < 0 ? -x : x;
    return (x > 0 ? x : v16f{}) + log1p16(exp16(-size));
}

// exp(g), 0 where it would be subnormal.
static inline v16f decay16(v16f gate, v16f rate, const Weights &w) {
    const v16f g = w.bounded ? w.lower_bound * sigmoid16(rate * gate) : -rate * softplus16(gate);
    return g < -87.0f ? v16f{} : exp16(g);
}

// 16 channels of the convolution with SiLU, rounded to T; the history [W - 1, C] takes the raw input in.
template <typename T>
static inline v16f convolve16(const T *x, T *history, const float *taps, long channels, long width) {
    v16f raw = load16(history), sum = raw * load16(taps);
    for (long j = 1; j < width; j++) {
        raw = load16(j + 1 < width ? history + j * channels : x);
        sum += raw * load16(taps + j * channels);
        store16(history + (j - 1) * channels, raw);
    }
    T rounded[16];
    store16(rounded, sum * sigmoid16(sum));
    return load16(rounded);
}

// x / sqrt(sum x^2 + 1e-6) * scale, in place.
static inline void normalise(float *x, long count, float scale) {
    v16f squares = {};
    for (long i = 0; i < count; i += 16) squares += load16(x + i) * load16(x + i);
    const float factor = scale / std::sqrt(sum16(squares) + 1e-6f);
    for (long i = 0; i < count; i += 16) store16(x + i, load16(x + i) * factor);
}

// What every row of a head's state is multiplied with.
struct Vectors {
    const float *decay, *k, *decayed_k, *decayed_q;  // [K]; the last two are k and q times decay
    float kq, beta;
};

// Rows of the state [V, K] take one token in: new = decay S + u k, o = new q. The rows come from memory once; the
// second loop finds them in the first-level cache.
template <int ROWS>
static inline void delta_rows(float *state, long dim, const Vectors &a, const float *v, float *o) {
    v16f with_k[ROWS] = {}, with_q[ROWS] = {};
    for (long i = 0; i < dim; i += 16) {
        const v16f k = load16(a.decayed_k + i), q = load16(a.decayed_q + i);
        for (int r = 0; r < ROWS; r++) {
            const v16f s = load16(state + r * dim + i);
            with_k[r] += s * k, with_q[r] += s * q;
        }
    }
    float u[ROWS];
    for (int r = 0; r < ROWS; r++) {
        u[r] = a.beta * (v[r] - sum16(with_k[r]));
        o[r] = sum16(with_q[r]) + u[r] * a.kq;
    }
    for (long i = 0; i < dim; i += 16) {
        const v16f d = load16(a.decay + i), k = load16(a.k + i);
        for (int r = 0; r < ROWS; r++) {
            float *s = state + r * dim + i;
            store16(s, load16(s) * d + u[r] * k);
        }
    }
}

template <typename T>
static void gated_norm(const float *o, const T *gate, const Weights &w, long dim, T *out) {
    v16f squares = {};
    for (long i = 0; i < dim; i += 16) squares += load16(o + i) * load16(o + i);
    const float factor = 1.0f / std::sqrt(sum16(squares) / dim + w.eps);
    for (long i = 0; i < dim; i += 16)
        store16(out + i, load16(o + i) * factor * load16(w.norm + i) * sigmoid16(load16(gate + i)));
}

// One head of one sequence; pointers are at the head's first value, C = 3 H K channels.
template <typename T>
static void head(const T *x, const T *raw_gate, float beta_logit, const T *out_gate, const Weights &w, long h,
                 long heads, long dim, T *history, float *state, T *out) {
    float mixed[3][dim], decay[dim], decayed_k[dim], decayed_q[dim], o[dim];
    float *q = mixed[0], *k = mixed[1], *v = mixed[2];
    for (long part = 0; part < 3; part++)
        for (long i = 0; i < dim; i += 16) {
            const long c = (part * heads + h) * dim + i;
            store16(mixed[part] + i, convolve16(x + c, history + c, w.taps + c, 3 * heads * dim, w.width));
        }
    normalise(q, dim, 1.0f / std::sqrt((float)dim));
    normalise(k, dim, 1.0f);
    v16f kq = {};
    for (long i = 0; i < dim; i += 16) {
        const v16f d = decay16(load16(raw_gate + i) + load16(w.dt_bias + h * dim + i), splat(w.rate[h]), w);
        store16(decay + i, d);
        store16(decayed_k + i, d * load16(k + i));
        store16(decayed_q + i, d * load16(q + i));
        kq += load16(k + i) * load16(q + i);
    }
    const Vectors vectors = {decay, k, decayed_k, decayed_q, sum16(kq), sigmoid16(splat(beta_logit))[0]};
    for (long r = 0; r < dim; r += 4) delta_rows<4>(state + r * dim, dim, vectors, v + r, o + r);
    gated_norm(o, out_gate, w, dim, out);
}

static inline float as_float(float x) { return x; }
static inline float as_float(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Strides {
    long x, raw_gate, beta, out_gate, history, state;  // values from row to row, or from slot to slot
};

template <typename T>
static void decode(const void *x, const void *raw_gate, const void *beta, const void *out_gate, const Weights &w,
                   void *history, float *state, const int32_t *slots, void *out, const Strides &by, long rows,
                   long heads, long dim, int threads) {
    const int team = useful_threads(rows * heads * dim * dim, threads);
#pragma omp parallel for num_threads(team) schedule(static)
    for (long pair = 0; pair < rows * heads; pair++) {
        const long n = pair / heads, h = pair % heads, slot = slots[n];
        T *to = (T *)out + pair * dim;
        if (slot == 0) {
            std::memset(to, 0, dim * sizeof(T));
            continue;
        }
        head((const T *)x + n * by.x, (const T *)raw_gate + n * by.raw_gate + h * dim,
             as_float(((const T *)beta)[n * by.beta + h]), (const T *)out_gate + n * by.out_gate + h * dim, w, h, heads,
             dim, (T *)history + slot * by.history, state + slot * by.state + h * dim * dim, to);
    }
}

extern "C" void k3hal_kda_decode(const void *x, long ldx, const void *raw_gate, long ldg, const void *beta, long ldb,
                                 const void *out_gate, long ldo, const float *taps, const float *rate,
                                 const float *dt_bias, const float *norm, void *history, long history_stride,
                                 float *state, long state_stride, const int32_t *slots, void *out, long rows,
                                 long heads, long dim, long width, int bounded, float lower_bound, float eps, int wide,
                                 int threads) {
    const Weights w = {taps, rate, dt_bias, norm, width, bounded, lower_bound, eps};
    const Strides by = {ldx, ldg, ldb, ldo, history_stride, state_stride};
    const auto run = wide ? decode<float> : decode<bf16>;
    run(x, raw_gate, beta, out_gate, w, history, state, slots, out, by, rows, heads, dim, threads);
}
