// Choices sorted by expert, and the sum of their rows.
#pragma once
#include "experts.h"

constexpr int SORT_THREADS = 1024, SORT_EACH = 2, SORTED = SORT_THREADS * SORT_EACH;
enum Sort { WHOLE, COUNT, PLACE };

// What is sorted, and where to: tile i is `length` choices of one expert, at most `height` and as even as they come, from
// rows[start] on. A tile's choices are in no order: each has a column of its own in all that follows.
struct Choices {
  const int* ids;
  long ids_stride;
  int count, top_k, experts, height;
  int *tile_expert, *tile_start, *tile_length, *rows, *tiles;
  int* counts;  // [blocks, experts] and
  int* ranks;   // [count]: what COUNT tells PLACE
};

// Sums of `a` and of `b` over the threads below, and (`all`) over all of them.
__device__ __forceinline__ void sums_below(int& a, int& b, int (&all)[2], int* warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum[2] = {a, b};
  for (int d = 1; d < 32; d *= 2) {
    int x = __shfl_up_sync(~0u, sum[0], d), y = __shfl_up_sync(~0u, sum[1], d);
    if (lane >= d) sum[0] += x, sum[1] += y;
  }
  if (lane == 31) warps[warp] = sum[0], warps[32 + warp] = sum[1];
  __syncthreads();
  if (warp == 0) {
    int total[2] = {warps[lane], warps[32 + lane]};
    for (int d = 1; d < 32; d *= 2) {
      int x = __shfl_up_sync(~0u, total[0], d), y = __shfl_up_sync(~0u, total[1], d);
      if (lane >= d) total[0] += x, total[1] += y;
    }
    warps[lane] = total[0], warps[32 + lane] = total[1];
  }
  __syncthreads();
  a = sum[0] - a + (warp ? warps[warp - 1] : 0), b = sum[1] - b + (warp ? warps[31 + warp] : 0);
  all[0] = warps[31], all[1] = warps[63];
  __syncthreads();
}

// Writes the table of tiles and leaves in `counts` where each expert's choices of this block begin in `rows`.
template <Sort PHASE> __device__ __forceinline__ void make_tiles(const Choices& a, int* counts, int* warps) {
  int tiles_before = 0, rows_before = 0;
  for (int base = 0; base < a.experts; base += SORT_THREADS) {
    int e = base + threadIdx.x, count = 0, below = 0;
    if (e < a.experts) {
      if (PHASE == WHOLE) count = counts[e];
      else
#pragma unroll 8
        for (int i = 0; i < (int)gridDim.x; i++) {
          int one = a.counts[i * a.experts + e];
          below += i < (int)blockIdx.x ? one : 0, count += one;
        }
    }
    int mine = (count + a.height - 1) / a.height, tile = mine, row = count, all[2];
    sums_below(tile, row, all, warps);
    tile += tiles_before, row += rows_before, tiles_before += all[0], rows_before += all[1];
    for (int i = 0; i < mine && blockIdx.x == 0; i++) {
      int from = (int)((long)i * count / mine), to = (int)((long)(i + 1) * count / mine);
      a.tile_expert[tile + i] = e, a.tile_start[tile + i] = row + from, a.tile_length[tile + i] = to - from;
    }
    if (e < a.experts) counts[e] = row + below;
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) *a.tiles = tiles_before;
  __syncthreads();
}

// A block sorts SORTED choices. More than one take two launches, COUNT and PLACE.
template <Sort PHASE> __global__ void __launch_bounds__(SORT_THREADS) sort_kernel(const __grid_constant__ Choices a) {
  SHARED_MEMORY(memory);
  int* counts = (int*)memory;  // [experts], then the sums of 32 warps, twice
  const int first = blockIdx.x * SORTED + threadIdx.x;
  wait_for_launch();
  launch_next();
  if (PHASE != PLACE) {
    for (int e = threadIdx.x; e < a.experts; e += SORT_THREADS) counts[e] = 0;
    __syncthreads();
  }
  int experts[SORT_EACH], ranks[SORT_EACH];
#pragma unroll
  for (int i = 0; i < SORT_EACH; i++) {
    int c = first + i * SORT_THREADS;
    long at = a.ids_stride == a.top_k ? c : (c / a.top_k) * a.ids_stride + c % a.top_k;
    experts[i] = c < a.count ? a.ids[at] : -1;
  }
#pragma unroll
  for (int i = 0; i < SORT_EACH; i++) {
    if (PHASE == PLACE) ranks[i] = experts[i] >= 0 ? a.ranks[first + i * SORT_THREADS] : 0;
    else if (experts[i] >= 0) ranks[i] = atomicAdd(&counts[experts[i]], 1);
    if (PHASE == COUNT && experts[i] >= 0) a.ranks[first + i * SORT_THREADS] = ranks[i];
  }
  __syncthreads();
  if (PHASE == COUNT) {
    for (int e = threadIdx.x; e < a.experts; e += SORT_THREADS) a.counts[blockIdx.x * a.experts + e] = counts[e];
    return;
  }
  make_tiles<PHASE>(a, counts, counts + a.experts);
#pragma unroll
  for (int i = 0; i < SORT_EACH; i++)
    if (experts[i] >= 0) a.rows[counts[experts[i]] + ranks[i]] = first + i * SORT_THREADS;
}

__device__ __forceinline__ void add4(float (&sum)[4], const float* from) {
  float4 v = *(const float4*)from;
  sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}
__device__ __forceinline__ void add4(float (&sum)[4], const __nv_bfloat16* from) {
  uint2 v = *(const uint2*)from;
  sum[0] += __uint_as_float(v.x << 16), sum[1] += __uint_as_float(v.x & 0xffff0000u);
  sum[2] += __uint_as_float(v.y << 16), sum[3] += __uint_as_float(v.y & 0xffff0000u);
}

// out[t] = sum of parts[t k + j] over the choices that are not negative, in ascending order of their experts: 512 columns
// of a token a block of 128 threads. `n` is a multiple of 4.
template <typename PART> __global__ void __launch_bounds__(128) combine_kernel(
    const PART* parts, const int* ids, long ids_stride, int top_k, int n, __nv_bfloat16* out) {
  SHARED_MEMORY(memory);
  int* order = (int*)memory;  // [top_k], then how many
  const int blocks = (n + 511) / 512, column = blockIdx.x % blocks * 512 + threadIdx.x * 4;
  const long token = blockIdx.x / blocks;
  const int* own = ids + token * ids_stride;
  if (threadIdx.x == 0) order[top_k] = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < top_k; j += 128) {
    int mine = own[j], rank = 0;
    if (mine < 0) continue;
    for (int i = 0; i < top_k; i++) rank += own[i] >= 0 && own[i] < mine;
    order[rank] = j;
    atomicAdd(&order[top_k], 1);
  }
  __syncthreads();
  wait_for_launch();
  if (column >= n) return;
  const PART* from = parts + token * top_k * n + column;
  const int used = order[top_k];
  float sum[4] = {};
#pragma unroll 8
  for (int i = 0; i < used; i++) add4(sum, from + (long)order[i] * n);
  __nv_bfloat16* to = out + token * n + column;
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = __float2bfloat16(sum[i]);
}
