// Routed experts of one layer in one call: out[t] = sum_j weights[t][j] w2_e act(w13_e x[t]), e = ids[t][j]; fp32.
//
// Tokens are grouped by expert, so that every chosen expert's weights stream once. A row's products and the order of
// its sum (experts ascending) do not depend on the rows beside it nor on the number of threads.
#include <vector>

#include "gated.h"

using namespace k3hal;

using Multiply = void (*)(const void *, const void *, long, long, const float *const *, int, v16f (*)[2]);

template <int KIND>
static void multiply(const void *w, const void *s, long block, long depth, const float *const *x, int rows,
                     v16f (*y)[2]) {
    tiles<KIND>(Panel<KIND>(w, s, block, depth), x, rows, depth, y);
}

static const Multiply MULTIPLY[] = {multiply<F32>, multiply<BF16>, multiply<MXFP4>};

// Packed matrices [experts][rows][depth].
struct Stack {
    const void *data, *scales;
    int kind;
    long rows, depth;

    long blocks() const { return (rows + LANES - 1) / LANES; }

    // Calls sink(m, y) for each of `count` rows of x: y is 32 outputs of `expert`'s block.
    template <class Source, class Sink>
    inline void product(long expert, long block, long count, Source source, Sink sink) const {
        const long cuts = (count + MAX_ROWS - 1) / MAX_ROWS, step = (count + cuts - 1) / cuts;
        for (long t = 0; t < count; t += step) {
            const int rows = count - t < step ? count - t : step;
            const float *in[MAX_ROWS];
            for (int m = 0; m < rows; m++) in[m] = source(t + m);
            v16f y[MAX_ROWS][2];
            MULTIPLY[kind](data, scales, expert * blocks() + block, depth, in, rows, y);
            for (int m = 0; m < rows; m++) sink(t + m, y[m]);
        }
    }
};

// The choices [tokens][top_k] that name an expert, by ascending expert, then token.
struct Groups {
    std::vector<long> expert, start;  // a group's expert and its first choice; start has one more entry
    std::vector<long> token;
    std::vector<float> weight;

    Groups(const int32_t *ids, const float *weights, long tokens, long top_k, long experts) {
        std::vector<long> next(experts);
        for (long c = 0; c < tokens * top_k; c++)
            if (ids[c] >= 0) next[ids[c]]++;
        long total = 0;
        for (long e = 0; e < experts; e++) {
            const long count = next[e];
            next[e] = total;
            if (!count) continue;
            expert.push_back(e);
            start.push_back(total);
            total += count;
        }
        start.push_back(total);
        token.resize(total);
        weight.resize(total);
        for (long c = 0; c < tokens * top_k; c++) {
            if (ids[c] < 0) continue;
            const long place = next[ids[c]]++;
            token[place] = c / top_k;
            weight[place] = weights[c];
        }
    }
};

// Output blocks a thread takes at a time: long runs of weights, yet enough of them to share evenly.
constexpr long RUN = 4;

// `hidden` is scratch: 2 inner floats, rounded up to whole blocks, for each choice.
extern "C" void k3hal_experts(const float *x, long ldx, const int32_t *ids, const float *weights, long tokens,
                              long top_k, long experts, const void *w13, const void *s13, int kind13, const void *w2,
                              const void *s2, int kind2, long width, long inner, int situ, float beta,
                              float linear_beta, float *hidden, float *out, int threads) {
    const Groups groups(ids, weights, tokens, top_k, experts);
    const Stack first{w13, s13, kind13, 2 * inner, width}, second{w2, s2, kind2, width, inner};
    const Gate act{situ, beta, linear_beta};
    const long count = groups.expert.size(), choices = groups.token.size();
    const long blocks = first.blocks(), stride = blocks * LANES, runs = (second.blocks() + RUN - 1) / RUN;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, RUN)
        for (long item = 0; item < count * blocks; item++) {
            const long g = item / blocks, block = item % blocks, begin = groups.start[g];
            first.product(
                groups.expert[g], block, groups.start[g + 1] - begin,
                [&](long m) { return x + groups.token[begin + m] * ldx; },
                [&](long m, const v16f *y) {
                    std::memcpy(hidden + (begin + m) * stride + block * LANES, y, LANES * sizeof(float));
                });
        }
        // In place: the last vector may overwrite values of up that are used already, and read into the padding.
#pragma omp for schedule(static)
        for (long c = 0; c < choices; c++) {
            float *gate = hidden + c * stride, *up = gate + inner;
            for (long i = 0; i < inner; i += 16)
                *(v16f *)(gate + i) = act(*(const v16f *)(gate + i), *(const v16f *)(up + i));
        }
#pragma omp for schedule(dynamic)
        for (long run = 0; run < runs; run++) {
            const long from = run * RUN, to = from + RUN < second.blocks() ? from + RUN : second.blocks();
            const long begin = from * LANES, end = to * LANES < width ? to * LANES : width;
            for (long t = 0; t < tokens; t++) std::memset(out + t * width + begin, 0, (end - begin) * sizeof(float));
            for (long g = 0; g < count; g++)
                for (long block = from; block < to; block++) {
                    const long at = groups.start[g], column = block * LANES;
                    const long lanes = width - column < LANES ? width - column : LANES;
                    second.product(
                        groups.expert[g], block, groups.start[g + 1] - at,
                        [&](long m) { return hidden + (at + m) * stride; },
                        [&](long m, const v16f *y) {
                            float *sum = out + groups.token[at + m] * width + column;
                            v16f total[2] = {};
                            std::memcpy(total, sum, lanes * sizeof(float));
                            for (int h = 0; h < 2; h++) total[h] += groups.weight[at + m] * y[h];
                            std::memcpy(sum, total, lanes * sizeof(float));
                        });
                }
        }
    }
}
