// out = x w^T for packed weights, of one matrix or of one for each head; fp32 in and out.
#include "tile.h"

using namespace k3hal;

template <int KIND>
static void run(const float *x, long ldx, const void *w, const void *s, float *out, long ldo, long rows, long depth,
                long outputs, long heads, int threads) {
    const long blocks = (outputs + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long item = 0; item < heads * blocks; item++) {
        const long head = item / blocks, block = item % blocks;
        const Panel<KIND> panel(w, s, item, depth);
        const long first = block * LANES, width = outputs - first < LANES ? outputs - first : LANES;
        float *to = out + head * outputs + first;
        for (long t = 0, count; t < rows; t += count) {
            count = rows_at_once(rows - t);
            v16f y[MOST][2];
            multiply<KIND>(panel, x + t * ldx + head * depth, ldx, count, depth, y);
            for (int m = 0; m < count; m++) std::memcpy(to + (t + m) * ldo, y[m], width * sizeof(float));
        }
    }
}

// x [rows][heads * depth] with row stride ldx, w packed [heads], out [rows][heads * outputs] with row stride ldo.
extern "C" void k3hal_linear(const float *x, long ldx, const void *w, const void *s, float *out, long ldo, long rows,
                             long depth, long outputs, long heads, int kind, int threads) {
    switch (kind) {
        case F32: return run<F32>(x, ldx, w, s, out, ldo, rows, depth, outputs, heads, threads);
        case BF16: return run<BF16>(x, ldx, w, s, out, ldo, rows, depth, outputs, heads, threads);
        default: return run<MXFP4>(x, ldx, w, s, out, ldo, rows, depth, outputs, heads, threads);
    }
}
