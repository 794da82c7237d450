// out = act([gate | up]), fp32 in and out.
#include "gated.h"

using namespace k3hal;

extern "C" void k3hal_gated(const float *x, long ldx, float *out, long rows, long inner, int situ, float beta,
                            float linear_beta, int threads) {
    const Gate act{situ, beta, linear_beta};
    const long whole = inner / 16 * 16, rest = (inner - whole) * sizeof(float);
    const bool small = rows * inner < 4096;
#pragma omp parallel for num_threads(small ? 1 : threads) schedule(static)
    for (long t = 0; t < rows; t++) {
        const float *gate = x + t * ldx, *up = gate + inner;
        float *y = out + t * inner;
        for (long i = 0; i < whole; i += 16) *(v16f *)(y + i) = act(*(const v16f *)(gate + i), *(const v16f *)(up + i));
        if (rest) {
            v16f g{}, u{};
            std::memcpy(&g, gate + whole, rest);
            std::memcpy(&u, up + whole, rest);
            const v16f last = act(g, u);
            std::memcpy(y + whole, &last, rest);
        }
    }
}
