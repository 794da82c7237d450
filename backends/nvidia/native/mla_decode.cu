// Absorbed MLA decoding for up to 16 heads, of a cache in bf16 or (FP8) float8_e4m3: split KV, then a merge.
//
// One program a multiprocessor works through chunks of sequences, one after the other. Four warps fetch: the queries of
// the next chunk, and tiles of cached rows into a ring in shared memory, whose slots are never empty for long. Eight
// warps work. Values: each has 64 channels, and the weights of all rows. Scores: of fp8, whose tiles have twice the
// rows, each has 8 rows, and only their weights to find; of bf16 four warps take 8 rows each over half of the channels,
// four more the other half, and the halves meet in shared memory. A tile's scores are formed while those of the tile
// before are used, so that one barrier a tile is enough.
#include "mla_ring.h"

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
    const long long unit = ((long long)item.n * a.max_splits + item.split) * a.heads;
    float* out = a.partial + unit * RANK;
    each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { *(float2*)(out + at) = make_float2(x, y); });
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
  // The page table comes to the L2 cache while the lengths are read.
  const int line = blockIdx.x * 32;
  if (threadIdx.x == 0 && line < a.count * a.table_row) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.table + line));
  __syncthreads();
  // What this kernel reads and overwrites is ready; what comes after it may get ready too.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x >= WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCHER_REGS));
    fetch_all(a, m);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGS));
    attend_all(a, m);
  }
}

// 64 channels of one head of one sequence: its chunks' results weighted by their sums of exponentials. Sixteen threads
// have 4 channels each of every sixteenth chunk, and read all of them at once.
constexpr int MERGED = 64, GROUPS = WORKERS * 4 / MERGED, AT_ONCE = 9;
extern "C" __global__ void __launch_bounds__(WORKERS) merge(Arguments a) {
  __shared__ float4 sums[WARPS][MERGED / 4];
  __shared__ float tops[GROUPS], totals[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockIdx.x / a.heads, h = blockIdx.x % a.heads;
  const int group = threadIdx.x / (MERGED / 4), place = threadIdx.x % (MERGED / 4);
  // Lengths were there before the kernel that this one waits for.
  const int length = a.lengths[n], chunk = chunk_of(length, a.least, a.most), count = (length + chunk - 1) / chunk;
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (count < 2) return;
  const long long first = (long long)n * a.max_splits * a.heads + h;
  const float* lse = a.lse + first;
  const float4* from = (const float4*)(a.partial + first * RANK) + blockIdx.y * (MERGED / 4) + place;
  float top = -INFINITE, total = 0;
  float4 acc = make_float4(0, 0, 0, 0);
  for (int start = group; start < count; start += GROUPS * AT_ONCE) {
    float weight[AT_ONCE], most = top;
    float4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int s = start + i * GROUPS;
      weight[i] = s < count ? lse[s * a.heads] : -INFINITE;
      x[i] = s < count ? from[s * (long long)a.heads * (RANK / 4)] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) most = fmaxf(most, weight[i]);
    const float fade = exp2_of(top - most);
    top = most;
    total *= fade;
    acc = make_float4(acc.x * fade, acc.y * fade, acc.z * fade, acc.w * fade);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float w = exp2_of(weight[i] - top);
      total += w;
      acc = make_float4(acc.x + w * x[i].x, acc.y + w * x[i].y, acc.z + w * x[i].z, acc.w + w * x[i].w);
    }
  }
  if (place == 0) tops[group] = top;
  __syncthreads();
  float most = tops[0];
#pragma unroll
  for (int i = 1; i < GROUPS; i++) most = fmaxf(most, tops[i]);
  const float fade = exp2_of(top - most);
  total *= fade;
  acc = make_float4(acc.x * fade, acc.y * fade, acc.z * fade, acc.w * fade);
  // A warp has two groups.
  total += __shfl_xor_sync(ALL, total, 16);
  acc.x += __shfl_xor_sync(ALL, acc.x, 16);
  acc.y += __shfl_xor_sync(ALL, acc.y, 16);
  acc.z += __shfl_xor_sync(ALL, acc.z, 16);
  acc.w += __shfl_xor_sync(ALL, acc.w, 16);
  if (lane < MERGED / 4) sums[warp][lane] = acc;
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (threadIdx.x >= MERGED / 4) return;
  for (int w = 1; w < WARPS; w++) {
    const float4 x = sums[w][lane];
    acc = make_float4(acc.x + x.x, acc.y + x.y, acc.z + x.z, acc.w + x.w);
    total += totals[w];
  }
  const float r = 1 / total;
  const uint2 packed = make_uint2(bf16_pair(acc.x * r, acc.y * r), bf16_pair(acc.z * r, acc.w * r));
  *(uint2*)(a.out + ((long long)n * a.heads + h) * RANK + blockIdx.y * MERGED + lane * 4) = packed;
}
