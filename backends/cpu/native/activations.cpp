// Gated activations: out = f(first, second) for each channel of each row, fp32 inside.
#include "rows.h"

using namespace k3hal;

template <typename T, typename F>
static void map(const void *first, long ldf, const void *second, long lds, void *out, long rows, long dim, int threads,
                F f) {
    const int team = useful_threads(2 * rows * dim, threads);
#pragma omp parallel for num_threads(team) schedule(static) if (team > 1)
    for (long t = 0; t < rows; t++) {
        const T *a = (const T *)first + t * ldf, *b = (const T *)second + t * lds;
        T *to = (T *)out + t * dim;
        for (long i = 0; i < dim; i += 16)
            store_up_to(to + i, f(load_up_to(a + i, dim - i), load_up_to(b + i, dim - i)), dim - i);
    }
}

template <typename F>
static void map_rows(const void *first, long ldf, const void *second, long lds, void *out, long rows, long dim,
                     int wide, int threads, F f) {
    const auto run = wide ? map<float, F> : map<bf16, F>;
    run(first, ldf, second, lds, out, rows, dim, threads, f);
}

// The halves of rows [gate | up].
static inline const void *up_half(const void *x, long dim, int wide) {
    return (const char *)x + dim * (wide ? sizeof(float) : sizeof(bf16));
}

extern "C" void k3hal_sigmoid_gate(const void *x, long ldx, const void *gate, long ldg, void *out, long rows, long dim,
                                   int wide, int threads) {
    map_rows(x, ldx, gate, ldg, out, rows, dim, wide, threads, [](v16f x, v16f gate) { return x * sigmoid16(gate); });
}

extern "C" void k3hal_silu_and_mul(const void *x, long ldx, void *out, long rows, long dim, int wide, int threads) {
    map_rows(x, ldx, up_half(x, dim, wide), ldx, out, rows, dim, wide, threads,
             [](v16f gate, v16f up) { return gate * sigmoid16(gate) * up; });
}

extern "C" void k3hal_situ_and_mul(const void *x, long ldx, void *out, long rows, long dim, float beta,
                                   float linear_beta, int wide, int threads) {
    map_rows(x, ldx, up_half(x, dim, wide), ldx, out, rows, dim, wide, threads, [=](v16f gate, v16f up) {
        return beta * tanh16(gate / beta) * sigmoid16(gate) * (linear_beta * tanh16(up / linear_beta));
    });
}
