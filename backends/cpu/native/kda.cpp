// The inside of a KDA layer: convolution, gates, delta rule and gated norm, a head of a sequence at a time, token by
// token. Prefill runs the very steps of decode, so it matters to no bit how a sequence is cut.
#include <algorithm>
#include <cmath>
#include <type_traits>

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

// One token of one head, ready for its state: every row of the state is multiplied with the first four.
struct Token {
    const float *decay, *k, *decayed_k, *decayed_q;  // [K]; the last two are k and q times decay
    float kq, beta;
    const float *v;  // [V]
    float *o;        // [V]
};

// Bytes of state asked for in advance: fewer leave memory idle between two heads.
constexpr long AHEAD = 1 << 14;

// Rows of the state [V, K] from `first` on take one token in: new = decay S + u k, o = new q. The first loop brings
// the rows from memory, the second finds them in the first-level cache.
template <int ROWS>
static inline void delta_rows(float *state, long first, long dim, const Token &a) {
    state += first * dim;
    v16f with_k[ROWS] = {}, with_q[ROWS] = {};
    for (long i = 0; i < dim; i += 16) {
        const v16f k = load16(a.decayed_k + i), q = load16(a.decayed_q + i);
        for (int r = 0; r < ROWS; r++) {
            prefetch<AHEAD>(state + r * dim + i);
            const v16f s = load16(state + r * dim + i);
            with_k[r] += s * k, with_q[r] += s * q;
        }
    }
    float u[ROWS];
    for (int r = 0; r < ROWS; r++) {
        u[r] = a.beta * (a.v[first + r] - sum16(with_k[r]));
        a.o[first + r] = sum16(with_q[r]) + u[r] * a.kq;
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

static inline float as_float(float x) { return x; }
static inline float as_float(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The projections and the result; strides are values from row to row.
template <typename T> struct Rows {
    const T *x, *raw_gate, *beta, *out_gate;
    T *out;
    long x_stride, raw_gate_stride, beta_stride, out_gate_stride;
};

struct Sizes {
    long heads, dim;
    long channels() const { return 3 * heads * dim; }
};

constexpr long TOKENS = 8;  // taken in together: with 4 rows of 128 values of the state they fit the first-level cache
constexpr long VECTORS = 7;

// Row t's token for head h; `memory` holds its vectors, [VECTORS, dim].
template <typename T>
static Token take_in(const Rows<T> &rows, long t, long h, const Weights &w, const Sizes &size, T *history,
                     float *memory) {
    const long dim = size.dim;
    float *q = memory, *k = q + dim, *v = k + dim, *decay = v + dim, *decayed_k = decay + dim;
    float *decayed_q = decayed_k + dim, *o = decayed_q + dim;
    for (long part = 0; part < 3; part++)
        for (long i = 0; i < dim; i += 16) {
            const long c = (part * size.heads + h) * dim + i;
            const T *x = rows.x + t * rows.x_stride + c;
            store16(q + part * dim + i, convolve16(x, history + c, w.taps + c, size.channels(), w.width));
        }
    normalise(q, dim, 1.0f / std::sqrt((float)dim));
    normalise(k, dim, 1.0f);
    const T *gate = rows.raw_gate + t * rows.raw_gate_stride + h * dim;
    v16f kq = {};
    for (long i = 0; i < dim; i += 16) {
        const v16f d = decay16(load16(gate + i) + load16(w.dt_bias + h * dim + i), splat(w.rate[h]), w);
        store16(decay + i, d);
        store16(decayed_k + i, d * load16(k + i));
        store16(decayed_q + i, d * load16(q + i));
        kq += load16(k + i) * load16(q + i);
    }
    const float beta = sigmoid16(splat(as_float(rows.beta[t * rows.beta_stride + h])))[0];
    return {decay, k, decayed_k, decayed_q, sum16(kq), beta, v, o};
}

// Rows [first, last) are one sequence; its history [W - 1, C] and this head's state [V, K] move on.
template <typename T>
static void run_head(const Rows<T> &rows, long first, long last, long h, const Weights &w, const Sizes &size,
                     T *history, float *state) {
    const long dim = size.dim;
    float memory[TOKENS][VECTORS * dim];
    for (long i = 0; i < AHEAD; i += 64) prefetch<0>((const char *)state + i);
    for (long start = first; start < last; start += TOKENS) {
        const long count = last - start < TOKENS ? last - start : TOKENS;
        Token tokens[TOKENS];
        for (long t = 0; t < count; t++) tokens[t] = take_in(rows, start + t, h, w, size, history, memory[t]);
        for (long r = 0; r < dim; r += 4)
            for (long t = 0; t < count; t++) delta_rows<4>(state, r, dim, tokens[t]);
        for (long t = 0; t < count; t++)
            gated_norm(tokens[t].o, rows.out_gate + (start + t) * rows.out_gate_stride + h * dim, w, dim,
                       rows.out + ((start + t) * size.heads + h) * dim);
    }
}

// Slots, and where they lie. Without `starts` each row is a sequence, without `known` each has a state.
struct Sequences {
    const int32_t *slots, *starts;
    const bool *known;
    void *history;
    float *state;
    long count, history_stride, state_stride, rows;
};

template <typename T> static void forget(T *history, float *state, long h, const Weights &w, const Sizes &size) {
    for (long j = 0; j < w.width - 1; j++)
        for (long part = 0; part < 3; part++)
            std::memset(history + j * size.channels() + (part * size.heads + h) * size.dim, 0, size.dim * sizeof(T));
    std::memset(state, 0, size.dim * size.dim * sizeof(float));
}

template <typename T>
static void run(const Rows<T> &rows, const Sequences &of, const Weights &w, const Sizes &size, int threads) {
    const long heads = size.heads, dim = size.dim;
    const int team = useful_threads(of.rows * heads * dim * dim, threads);
    // Decoding takes equal times, and a thread does best with states that lie side by side.
    const long pairs = of.count * heads, together = of.starts ? 1 : std::max(1L, (pairs + team - 1) / team);
#pragma omp parallel for num_threads(team) schedule(dynamic, together) if (team > 1)
    for (long pair = 0; pair < pairs; pair++) {
        const long n = pair / heads, h = pair % heads, slot = of.slots[n];
        const long first = of.starts ? of.starts[n] : n, last = of.starts ? of.starts[n + 1] : n + 1;
        if (slot == 0)
            for (long t = first; t < last; t++) std::memset(rows.out + (t * heads + h) * dim, 0, dim * sizeof(T));
        if (slot == 0 || first == last) continue;
        T *history = (T *)of.history + slot * of.history_stride;
        float *state = of.state + slot * of.state_stride + h * dim * dim;
        if (of.known && !of.known[n]) forget(history, state, h, w, size);
        run_head(rows, first, last, h, w, size, history, state);
    }
    const long used = of.starts ? of.starts[of.count] : of.count;
    std::memset(rows.out + used * heads * dim, 0, (of.rows - used) * heads * dim * sizeof(T));
}

extern "C" void k3hal_kda(const void *x, long ldx, const void *raw_gate, long ldg, const void *beta, long ldb,
                          const void *out_gate, long ldo, const float *taps, const float *rate, const float *dt_bias,
                          const float *norm, void *history, long history_stride, float *state, long state_stride,
                          const int32_t *slots, const int32_t *starts, const bool *known, void *out, long sequences,
                          long rows, long heads, long dim, long width, int bounded, float lower_bound, float eps,
                          int wide, int threads) {
    const Weights w = {taps, rate, dt_bias, norm, width, bounded, lower_bound, eps};
    const Sequences of = {slots, starts, known, history, state, sequences, history_stride, state_stride, rows};
    const auto with = [&](auto *out) {
        using T = std::remove_pointer_t<decltype(out)>;
        const Rows<T> all = {(const T *)x, (const T *)raw_gate, (const T *)beta, (const T *)out_gate, out,
                             ldx, ldg, ldb, ldo};
        run(all, of, w, {heads, dim}, threads);
    };
    wide ? with((float *)out) : with((bf16 *)out);
}
