// Routed experts of one layer in one call: out[t] = sum_j weights[t][j] w2_e act(w13_e x[t]), e = ids[t][j]; fp32.
//
// Tokens are grouped by expert, so that every chosen expert's weights stream once, both matrices by one thread where
// there are experts enough. A row's products and the order of its sum (experts ascending) do not depend on the rows
// beside it nor on the number of threads.
#include <algorithm>
#include <vector>

#include "gated.h"
#include "rows.h"

using namespace k3hal;

using Multiply = void (*)(const void *, const void *, long, long, const float *, long, int, v16f (*)[2]);

template <int KIND>
static void block_product(const void *w, const void *s, long block, long depth, const float *x, long stride, int rows,
                          v16f (*y)[2]) {
    multiply<KIND>(Panel<KIND>(w, s, block, depth), x, stride, rows, depth, y);
}

static const Multiply MULTIPLY[] = {block_product<F32>, block_product<BF16>, block_product<MXFP4>};

// Packed matrices [experts][rows][depth].
struct Stack {
    const void *data, *scales;
    int kind;
    long rows, depth;

    long blocks() const { return (rows + LANES - 1) / LANES; }
    long padded() const { return blocks() * LANES; }

    // Blocks [from, to) of an expert times `count` rows of x, into rows of y of the same length as `padded`.
    void product(long expert, long from, long to, const float *x, long stride, long count, float *y) const {
        for (long block = from; block < to; block++)
            for (long t = 0, rows; t < count; t += rows) {
                rows = rows_at_once(count - t);
                v16f sums[MOST][2];
                MULTIPLY[kind](data, scales, expert * blocks() + block, depth, x + t * stride, stride, rows, sums);
                for (long m = 0; m < rows; m++)
                    std::memcpy(y + (t + m) * padded() + block * LANES, sums[m], sizeof sums[m]);
            }
    }
};

// The choices [tokens][top_k] that name an expert, by ascending expert, then token: their place in this order.
struct Groups {
    std::vector<long> expert, start;  // a group's expert and its first place; start has one more entry
    std::vector<long> token;          // of a place
    std::vector<long> places, ends;   // a token's places, ascending: places[t * top_k .. ends[t])
    std::vector<float> weight;        // of a place

    Groups(const int32_t *ids, const float *weights, long tokens, long top_k, long experts) : ends(tokens) {
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
        places.resize(tokens * top_k);
        for (long t = 0; t < tokens; t++) ends[t] = t * top_k;
        for (long place = 0; place < total; place++) places[ends[token[place]]++] = place;
    }

    long size() const { return expert.size(); }
    long rows(long g) const { return start[g + 1] - start[g]; }

    // The first group of part i of n equal shares of work: an expert costs its weights, which as many rows as EVEN
    // take as long to multiply, and its rows.
    long share(long i, long n) const {
        const long whole = start[size()] + EVEN * size();
        long g = 0;
        while (g < size() && (start[g] + EVEN * g) * n < whole * i) g++;
        return g;
    }
    static constexpr long EVEN = 4;
};

struct Layer {
    const Groups &groups;
    const Stack &first, &second;
    const Gate &act;
    const float *x;
    long ldx;
    float *hidden, *down;  // [places][first.padded()], [places][second.padded()]

    void up(long g, long from, long to) const {
        const long begin = groups.start[g], count = groups.rows(g), width = first.depth;
        float *rows = scratch(count * width);
        for (long m = 0; m < count; m++)
            std::memcpy(rows + m * width, x + groups.token[begin + m] * ldx, width * sizeof(float));
        first.product(groups.expert[g], from, to, rows, width, count, hidden + begin * first.padded());
    }

    // In place: the last vector may overwrite values of up that are used already, and read into the padding.
    void activate(long g) const {
        for (long place = groups.start[g]; place < groups.start[g + 1]; place++) {
            float *gate = hidden + place * first.padded(), *up = gate + second.depth;
            for (long i = 0; i < second.depth; i += 16)
                *(v16f *)(gate + i) = act(*(const v16f *)(gate + i), *(const v16f *)(up + i));
        }
    }

    void back(long g, long from, long to) const {
        const long begin = groups.start[g], stride = first.padded();
        second.product(groups.expert[g], from, to, hidden + begin * stride, stride, groups.rows(g),
                       down + begin * second.padded());
    }

    void sum(long t, long top_k, float *out) const {
        for (long i = 0; i < second.rows; i += 16) {
            v16f total = {};
            for (long p = t * top_k; p < groups.ends[t]; p++) {
                const long place = groups.places[p];
                total += groups.weight[place] * *(const v16f *)(down + place * second.padded() + i);
            }
            std::memcpy(out + i, &total, std::min(16L, second.rows - i) * sizeof(float));
        }
    }
};

// Blocks of one expert that a thread takes at a time where there are fewer experts than keep all threads busy.
constexpr long RUN = 2;

// `scratch` is 2 inner + width floats, each rounded up to whole blocks, for each choice.
extern "C" void k3hal_experts(const float *x, long ldx, const int32_t *ids, const float *weights, long tokens,
                              long top_k, long experts, const void *w13, const void *s13, int kind13, const void *w2,
                              const void *s2, int kind2, long width, long inner, int situ, float beta,
                              float linear_beta, float *scratch, float *out, int threads) {
    const Groups groups(ids, weights, tokens, top_k, experts);
    const Stack first{w13, s13, kind13, 2 * inner, width}, second{w2, s2, kind2, width, inner};
    const Gate act{situ, beta, linear_beta};
    const Layer layer{groups, first, second, act, x, ldx, scratch, scratch + tokens * top_k * first.padded()};
    const long count = groups.size(), ups = first.blocks(), downs = second.blocks();
    const long up_runs = (ups + RUN - 1) / RUN, down_runs = (downs + RUN - 1) / RUN;
#pragma omp parallel num_threads(threads)
    {
        if (count >= 2 * threads) {
            // Neighbours to one thread: its stream of weights goes on from one to the next.
#pragma omp for schedule(static)
            for (int i = 0; i < threads; i++)
                for (long g = groups.share(i, threads); g < groups.share(i + 1, threads); g++) {
                    layer.up(g, 0, ups);
                    layer.activate(g);
                    layer.back(g, 0, downs);
                }
        } else {
#pragma omp for schedule(dynamic)
            for (long i = 0; i < count * up_runs; i++)
                layer.up(i / up_runs, i % up_runs * RUN, std::min(ups, (i % up_runs + 1) * RUN));
#pragma omp for schedule(static)
            for (long g = 0; g < count; g++) layer.activate(g);
#pragma omp for schedule(dynamic)
            for (long i = 0; i < count * down_runs; i++)
                layer.back(i / down_runs, i % down_runs * RUN, std::min(downs, (i % down_runs + 1) * RUN));
        }
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++) layer.sum(t, top_k, out + t * width);
    }
}
