// Absorbed MLA decoding for up to 16 heads, of a cache in bf16 or (FP8) float8_e4m3: split KV, then a merge.
//
// One program a multiprocessor works through chunks of sequences, one after the other. Four warps fetch: the queries of
// the next chunk, and tiles of cached rows into a ring in shared memory, whose slots are never empty for long. Eight
// warps work. Values: each has 64 channels, and the weights of all rows. Scores: of fp8, whose tiles have twice the
// rows, each has 8 rows, and only their weights to find; of bf16 four warps take 8 rows each over half of the channels,
// four more the other half, and the halves meet in shared memory. A tile's scores are formed while those of the tile
// before are used, so that one barrier a tile is enough.
#include "mla_common.h"
#include "mla_ring.h"

// A chunk's result as the merge reads it. Averages of float8_e4m3 are at most 448, and fp16 has eight times the precision
// of the output: half the bytes, where those of fp32 were a twelfth of the cache's.
#if FP8
using Part = uint32_t;  // Two of fp16.
using Parts4 = uint2;
constexpr int PART = 2;
__device__ void put_part(Part* to, float x, float y) { *to = factors(x, y); }
__device__ float4 four_of(Parts4 x) {
  float4 r;
  asm("{\n.reg .b16 a, b, c, d;\nmov.b32 {a, b}, %4;\nmov.b32 {c, d}, %5;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n"
      "cvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(x.x), "r"(x.y));
  return r;
}
#else
using Part = float;
using Parts4 = float4;
constexpr int PART = 1;
__device__ void put_part(Part* to, float x, float y) { *(float2*)to = make_float2(x, y); }
__device__ float4 four_of(Parts4 x) { return x; }
#endif

// A thread's pairs of channels of two heads, g and g + 8. Of fp8, pairs alternate between two accumulators.
template <typename Store>
__device__ void each_pair(const float (&acc)[8][4], const Arguments& a, int warp, int g, int t, float r0, float r1, Store store) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float r = h ? r1 : r0;
#if FP8
      const float x = acc[j & ~1][2 * h + (j & 1)], y = acc[j | 1][2 * h + (j & 1)];
      const int channel = warp * 64 + (j >> 1) * 16 + 4 * t + 2 * (j & 1);
#else
      const float x = acc[j][2 * h], y = acc[j][2 * h + 1];
      const int channel = warp * 64 + j * 8 + 2 * t;
#endif
      if (g + 8 * h < a.heads) store((g + 8 * h) * RANK + channel, x * r, y * r);
    }
}

// Writes a chunk's result, as the output where it is a whole sequence.
__device__ void put(const Arguments& a, const Item& item, const float (&acc)[8][4], float top0, float top1, float sum0, float sum1) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const float r0 = sum0 > 0 ? 1 / sum0 : 0, r1 = sum1 > 0 ? 1 / sum1 : 0;
  if (item.whole) {
    uint16_t* out = a.out + (long long)item.n * a.heads * RANK;
    each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { *(uint32_t*)(out + at) = bf16_pair(x, y); });
  } else {
    const long long unit = ((long long)item.n * a.max_splits + item.chunk) * a.heads;
    Part* out = (Part*)a.partial + unit * (RANK / PART);
    each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { put_part(out + at / PART, x, y); });
    if (warp == 0 && t == 0) {
      if (g < a.heads) a.lse[unit + g] = top0 + log2f(sum0);
      if (g + 8 < a.heads) a.lse[unit + g + 8] = top1 + log2f(sum1);
    }
  }
}

#if FP8
#include "mla_fp8.h"
#else
#include "mla_bf16.h"
#endif

__device__ void prefetch(const int* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Registers go from the fetching warps to the workers.
extern "C" __global__ void __launch_bounds__(WORKERS + FETCHERS * 32, 1) attend(Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  Memory& m = *(Memory*)memory;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      prepare(m.full[i], FETCHERS);
      prepare(m.empty[i], WARPS);
    }
    prepare(m.given, 1);
    prepare(m.taken, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  // Lengths and page table come to the L2 cache while what this kernel waits for ends.
  const int line = blockIdx.x * 32;
  if (threadIdx.x == 0 && line < a.count) prefetch(a.lengths + line);
  if (threadIdx.x == 0 && line < a.count * a.table_row) prefetch(a.table + line);
  __syncthreads();
  // Where nothing is sent for ahead, all wait: what this kernel reads and overwrites is ready then.
  if (!AHEAD) wait_for_launch();
  if (threadIdx.x >= WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCHER_REGS));
    fetch_all(a, m);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGS));
    if (AHEAD) asm volatile("griddepcontrol.wait;" ::: "memory");
    attend_all(a, m);
  }
}

// CHANNELS of one head of one sequence: its chunks' results weighted by their sums of exponentials. Every sixteenth chunk
// is one group's, and groups are added in the same order however many threads share them. Four channels a thread.
constexpr int GROUPS = 16;
__device__ float4 times(float4 x, float w) { return make_float4(x.x * w, x.y * w, x.z * w, x.w * w); }
__device__ float4 plus(float4 sum, float4 x, float w) {
  return make_float4(fmaf(w, x.x, sum.x), fmaf(w, x.y, sum.y), fmaf(w, x.z, sum.z), fmaf(w, x.w, sum.w));
}
template <int THREADS, int CHANNELS, int AT_ONCE>
__device__ void merge_chunks(const Arguments& a) {
  constexpr int LANES = CHANNELS / 4, SHARERS = THREADS / LANES, MINE = GROUPS / SHARERS;
  __shared__ float4 sums[GROUPS][LANES];
  __shared__ float tops[GROUPS], totals[GROUPS];
  const int n = blockIdx.x / a.heads, h = blockIdx.x % a.heads, lane = threadIdx.x % LANES, sharer = threadIdx.x / LANES;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Lengths were there before the kernel that this one waits for.
  const int chunks = chunks_of(a.lengths[n], a);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (chunks < 2) return;
  const long long first = (long long)n * a.max_splits * a.heads + h;
  const float* lse = a.lse + first;
  const Parts4* from = (const Parts4*)a.partial + first * (RANK / 4) + blockIdx.y * LANES + lane;
  const long long stride = (long long)a.heads * (RANK / 4);
  float4 acc[MINE] = {};
  float top[MINE], total[MINE] = {};
#pragma unroll
  for (int m = 0; m < MINE; m++) top[m] = -INFINITE;
  for (int start = sharer; start < chunks; start += GROUPS * AT_ONCE) {
    float weight[MINE][AT_ONCE];
    Parts4 x[MINE][AT_ONCE];
#pragma unroll
    for (int m = 0; m < MINE; m++)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int s = start + m * SHARERS + i * GROUPS;
        weight[m][i] = s < chunks ? lse[s * a.heads] : -INFINITE;
        x[m][i] = s < chunks ? from[s * stride] : Parts4();
      }
#pragma unroll
    for (int m = 0; m < MINE; m++)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (weight[m][i] == -INFINITE) continue;
        const float higher = fmaxf(top[m], weight[m][i]), fade = exp2_of(top[m] - higher), w = exp2_of(weight[m][i] - higher);
        top[m] = higher;
        total[m] = fmaf(total[m], fade, w);
        acc[m] = plus(times(acc[m], fade), four_of(x[m][i]), w);
      }
  }
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    const int group = sharer + m * SHARERS;
    sums[group][lane] = acc[m];
    if (lane == 0) {
      tops[group] = top[m];
      totals[group] = total[m];
    }
  }
  __syncthreads();
  if (sharer) return;
  float most = tops[0], all = 0;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int g = 1; g < GROUPS; g++) most = fmaxf(most, tops[g]);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const float w = exp2_of(tops[g] - most);
    all = fmaf(w, totals[g], all);
    sum = plus(sum, sums[g][lane], w);
  }
  const float r = 1 / all;
  const uint2 packed = make_uint2(bf16_pair(sum.x * r, sum.y * r), bf16_pair(sum.z * r, sum.w * r));
  *(uint2*)(a.out + ((long long)n * a.heads + h) * RANK + blockIdx.y * CHANNELS + lane * 4) = packed;
}
// For few sequences, and for many. Few take few multiprocessors: on one where a merge runs no program of the next `attend`
// can begin.
extern "C" __global__ void __launch_bounds__(512) merge(Arguments a) { merge_chunks<512, 128, 9>(a); }
extern "C" __global__ void __launch_bounds__(WORKERS, 4) merge_many(Arguments a) { merge_chunks<WORKERS, 256, 1>(a); }
