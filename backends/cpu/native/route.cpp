// The router's choice: top k of sigmoid(logits) + bias, ties to the lower id; weights without the bias.
#include <vector>

#include "tile.h"

using namespace k3hal;

constexpr int32_t TAKEN = INT32_MIN;

// Integers ordered as the floats are, NaN above all, as PyTorch sorts. A sum with a sigmoid is never -0.
static inline v16i ordered(v16f score) {
    const v16i bits = (v16i)score;
    return score == score ? bits ^ ((bits >> 31) & 0x7fffffff) : v16i{} + INT32_MAX;
}

// One token; `scores` and `keys` are scratch of whole vectors.
static void choose(const float *logits, const float *bias, long experts, long top_k, int renormalize, float scale,
                   float *scores, int32_t *keys, float *weights, int32_t *ids) {
    const long padded = (experts + 15) / 16 * 16;
    for (long e = 0; e < padded; e += 16) {
        const long bytes = (experts - e < 16 ? experts - e : 16) * sizeof(float);
        v16f x{}, b{};
        std::memcpy(&x, logits + e, bytes);
        std::memcpy(&b, bias + e, bytes);
        const v16f s = sigmoid16(x);
        *(v16f *)(scores + e) = s;
        *(v16i *)(keys + e) = ordered(s + b);
    }
    float sum = 1e-20f;
    for (long j = 0; j < top_k; j++) {
        int32_t best = TAKEN;
        for (long e = 0; e < experts; e++) best = keys[e] > best ? keys[e] : best;
        long e = 0;
        while (keys[e] != best) e++;
        keys[e] = TAKEN;
        ids[j] = e;
        weights[j] = scores[e];
        sum += scores[e];
    }
    for (long j = 0; j < top_k; j++) weights[j] = (renormalize ? weights[j] / sum : weights[j]) * scale;
}

extern "C" void k3hal_route(const float *logits, long ldx, const float *bias, long tokens, long experts, long top_k,
                            int renormalize, float scale, float *weights, int32_t *ids, int threads) {
    const bool small = tokens * experts < 16384;
#pragma omp parallel num_threads(small ? 1 : threads)
    {
        std::vector<float> scores(experts + 16);
        std::vector<int32_t> keys(experts + 16);
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++)
            choose(logits + t * ldx, bias, experts, top_k, renormalize, scale, scores.data(), keys.data(),
                   weights + t * top_k, ids + t * top_k);
    }
}
