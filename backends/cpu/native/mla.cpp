// Absorbed MLA attention of one token a sequence over the paged latent cache.
//
// A sequence is cut into parts of whole tiles by its own length alone, so its result depends on no other sequence; a
// part reads each of its cached rows once for all heads, and the parts' softmaxes are merged at the end.
#include <cmath>
#include <type_traits>
#include <vector>

#include "rows.h"

using namespace k3hal;

constexpr long TILE = 32;  // cached rows widened at a time: 72 KB of 576 channels, read by every head from the cache
constexpr long PART = 128, MOST_PARTS = 64;
constexpr int HEADS = 4, BESIDE = 4;  // heads, times rows or vectors of channels: 16 sums in registers
constexpr float NEVER = -INFINITY;

struct Fp8 {
    uint8_t bits;
};

// E4M3FN: sign, 4 bits of exponent with bias 7, 3 of mantissa; exponent 0 is subnormal, 0x7f is NaN, none is infinite.
static inline v16f load16(const Fp8 *p) {
    const v16u code = widen((const uint8_t *)p), size = code & 0x7f;
    const v16u small = (v16u)(__builtin_convertvector(size, v16f) * 0x1p-9f), normal = (size << 20) + (120u << 23);
    const v16u bits = size < 8 ? small : size == 0x7f ? v16u{} + 0x7fc00000u : normal;
    return (v16f)(bits | (code & 0x80) << 24);
}

static inline v16f load_up_to(const Fp8 *p, long count) {
    if (count >= 16) return load16(p);
    Fp8 lanes[16] = {};
    std::memcpy(lanes, p, count);
    return load16(lanes);
}

static inline long padded(long count) { return (count + 15) / 16 * 16; }

struct Shape {
    long heads, entry, rank, page_tokens, page_stride, max_pages;
    float scale;
    // Lengths of fp32 rows, padded to whole vectors.
    long wide_entry() const { return padded(entry); }
    long wide_rank() const { return padded(rank); }
    // Whether whole rows of fp32 can be read where they are; up to BESIDE - 1 after the last count for nothing.
    bool tiles_lie_in_pages() const { return entry % 16 == 0 && page_tokens % TILE == 0; }
    // A head of a part's result: sum p V, then the maximum of the scores and the sum p.
    long partial() const { return wide_rank() + 2; }
};

enum Use { PART_ROWS, PARTIALS };

static inline long part_rows(long length) {
    const long even = (length + MOST_PARTS - 1) / MOST_PARTS;
    return even <= PART ? PART : (even + TILE - 1) / TILE * TILE;
}

static inline long parts(long length) { return (length + part_rows(length) - 1) / part_rows(length); }

template <typename T> static inline void widen_row(const T *row, long count, float *out) {
    for (long i = 0; i < count; i += 16) store16(out + i, load_up_to(row + i, count - i));
}

// scores[h][r] = q[h] . rows[r] for N heads; `count` is a multiple of BESIDE.
template <int N>
static inline void score(const float *q, const float *rows, long count, long width, float (*scores)[TILE]) {
    for (long r = 0; r < count; r += BESIDE) {
        v16f sums[N][BESIDE] = {};
        for (long i = 0; i < width; i += 16) {
            v16f row[BESIDE];
            for (int j = 0; j < BESIDE; j++) {
                prefetch(rows + (r + j) * width + i);
                row[j] = load16(rows + (r + j) * width + i);
            }
            for (int h = 0; h < N; h++)
                for (int j = 0; j < BESIDE; j++) sums[h][j] += row[j] * load16(q + h * width + i);
        }
        for (int h = 0; h < N; h++)
            for (int j = 0; j < BESIDE; j++) scores[h][r + j] = sum16(sums[h][j]);
    }
}

// out[h] = out[h] keep[h] + sum_r p[h][r] rows[r] for N heads. A step past the last vector repeats that one.
template <int N>
static inline void accumulate(const float *rows, long count, const Shape &s, const float (*p)[TILE], const float *keep,
                              float *out) {
    const long width = s.wide_entry(), last = s.wide_rank() - 16;
    for (long i = 0; i <= last; i += 16 * BESIDE) {
        long at[BESIDE];
        v16f sums[N][BESIDE];
        for (int j = 0; j < BESIDE; j++) at[j] = i + 16 * j < last ? i + 16 * j : last;
        for (int h = 0; h < N; h++)
            for (int j = 0; j < BESIDE; j++) sums[h][j] = load16(out + h * s.partial() + at[j]) * keep[h];
        for (long r = 0; r < count; r++) {
            v16f row[BESIDE];
            for (int j = 0; j < BESIDE; j++) row[j] = load16(rows + r * width + at[j]);
            for (int h = 0; h < N; h++)
                for (int j = 0; j < BESIDE; j++) sums[h][j] += p[h][r] * row[j];
        }
        for (int h = 0; h < N; h++)
            for (int j = 0; j < BESIDE; j++) store16(out + h * s.partial() + at[j], sums[h][j]);
    }
}

// Takes a tile of rows into the running softmax of N heads.
template <int N> static inline void attend(const float *q, const float *rows, long count, const Shape &s, float *out) {
    float scores[N][TILE], keep[N];
    score<N>(q, rows, (count + BESIDE - 1) / BESIDE * BESIDE, s.wide_entry(), scores);
    for (int h = 0; h < N; h++) {
        float *top = out + h * s.partial() + s.wide_rank(), *sum = top + 1, most = *top;
        for (long r = 0; r < count; r++) most = scores[h][r] > most ? scores[h][r] : most;
        for (long r = count; r < TILE; r++) scores[h][r] = NEVER;
        keep[h] = std::exp(*top - most);
        v16f total = {};
        for (long r = 0; r < TILE; r += 16) {
            const v16f x = load16(scores[h] + r), e = x == NEVER ? v16f{} : exp16(x - most);
            store16(scores[h] + r, e);
            total += e;
        }
        *sum = *sum * keep[h] + sum16(total);
        *top = most;
    }
    accumulate<N>(rows, count, s, scores, keep, out);
}

template <int N = HEADS>
static inline void attend_heads(int count, const float *q, const float *rows, long tile, const Shape &s, float *out) {
    if (count == N) return attend<N>(q, rows, tile, s, out);
    if constexpr (N > 1) return attend_heads<N - 1>(count, q, rows, tile, s, out);
}

// Cached rows [first, last) of one sequence, for all heads; q is its row, [heads, entry].
template <typename T, typename C>
static void part(const T *q, const C *cache, const int32_t *pages, long first, long last, const Shape &s, float *out) {
    const long width = s.wide_entry();
    float *queries = scratch<PART_ROWS>((s.heads + TILE) * width), *rows = queries + s.heads * width;
    for (long h = 0; h < s.heads; h++) {
        float *wide = queries + h * width, *running = out + h * s.partial();
        widen_row(q + h * s.entry, s.entry, wide);
        for (long i = 0; i < width; i += 16) store16(wide + i, load16(wide + i) * s.scale);
        std::memset(running, 0, s.partial() * sizeof(float));
        running[s.wide_rank()] = NEVER;
    }
    for (long t = first; t < last; t += TILE) {
        const long count = last - t < TILE ? last - t : TILE;
        const float *tile = rows;
        if constexpr (std::is_same_v<C, float>) {
            if (s.tiles_lie_in_pages()) tile = cache + pages[t / s.page_tokens] * s.page_stride + t % s.page_tokens * width;
        }
        if (tile == rows) {
            for (long r = 0; r < count; r++) {
                const C *page = cache + pages[(t + r) / s.page_tokens] * s.page_stride;
                widen_row(page + (t + r) % s.page_tokens * s.entry, s.entry, rows + r * width);
            }
            for (long r = count; r % BESIDE; r++) std::memset(rows + r * width, 0, width * sizeof(float));
        }
        for (long h = 0; h < s.heads; h += HEADS) {
            const int group = s.heads - h < HEADS ? s.heads - h : HEADS;
            attend_heads(group, queries + h * width, tile, count, s, out + h * s.partial());
        }
    }
}

// One head's partial results of `count` parts, `stride` values apart, into its output row; no parts give zeros.
template <typename T> static void merge(float *first, long count, long stride, const Shape &s, T *out) {
    const long rank = s.wide_rank();
    float top = NEVER, sum = 0;
    for (long c = 0; c < count; c++) top = first[c * stride + rank] > top ? first[c * stride + rank] : top;
    for (long c = 0; c < count; c++) {
        float *of = first + c * stride;
        of[rank] = std::exp(of[rank] - top);
        sum += of[rank] * of[rank + 1];
    }
    const float share = count ? 1.0f / sum : 0.0f;
    for (long i = 0; i < s.rank; i += 16) {
        v16f total = {};
        for (long c = 0; c < count; c++) total += first[c * stride + rank] * load16(first + c * stride + i);
        store_up_to(out + i, total * share, s.rank - i);
    }
}

template <typename T, typename C>
static void decode(const void *q, const void *cache, const int32_t *page_table, const int32_t *lengths, void *out,
                   long sequences, const Shape &s, int threads) {
    long total = 0, rows = 0;
    std::vector<long> first(sequences + 1);
    for (long n = 0; n < sequences; n++) first[n] = total, total += parts(lengths[n]), rows += lengths[n];
    first[sequences] = total;
    float *partials = scratch<PARTIALS>(total * s.heads * s.partial());
    const int team = useful_threads(rows * s.heads * s.entry, threads);
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(dynamic)
        for (long p = 0; p < total; p++) {
            long n = 0;
            while (first[n + 1] <= p) n++;
            const long size = part_rows(lengths[n]), from = (p - first[n]) * size;
            const long to = from + size < lengths[n] ? from + size : lengths[n];
            part((const T *)q + n * s.heads * s.entry, (const C *)cache, page_table + n * s.max_pages, from, to, s,
                 partials + p * s.heads * s.partial());
        }
#pragma omp for schedule(static)
        for (long i = 0; i < sequences * s.heads; i++) {
            const long n = i / s.heads, h = i % s.heads;
            merge(partials + (first[n] * s.heads + h) * s.partial(), first[n + 1] - first[n], s.heads * s.partial(), s,
                  (T *)out + i * s.rank);
        }
    }
}

template <typename T>
static auto for_cache(int kind) {
    return kind == 0 ? decode<T, float> : kind == 1 ? decode<T, bf16> : decode<T, Fp8>;
}

// cache_kind: 0 fp32, 1 bf16, 2 fp8 E4M3FN.
extern "C" void k3hal_mla_decode(const void *q, const void *cache, long page_stride, long page_tokens,
                                 const int32_t *page_table, long max_pages, const int32_t *lengths, void *out,
                                 long sequences, long heads, long entry, long rank, float scale, int wide,
                                 int cache_kind, int threads) {
    const Shape s = {heads, entry, rank, page_tokens, page_stride, max_pages, scale};
    const auto run = wide ? for_cache<float>(cache_kind) : for_cache<bf16>(cache_kind);
    run(q, cache, page_table, lengths, out, sequences, s, threads);
}
