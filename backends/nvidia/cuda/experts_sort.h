// Choices sorted by expert, and the sum of their rows.
#pragma once
#include "experts.h"

// One block: tile i is `length` choices of one expert, at most `height` and as even as they come, from rows[start] on. A
// tile's choices are in no order: each has a column of its own in all that follows.
__global__ void __launch_bounds__(1024) sort_kernel(
    const int* ids, long ids_stride, int choices, int top_k, int experts, int height, int* tile_expert, int* tile_start,
    int* tile_length, int* rows, int* tiles) {
  SHARED_MEMORY(memory);
  int* counts = (int*)memory;  // [experts], then the sums of 32 warps, twice
  int* warps = counts + experts;
  const int me = threadIdx.x, lane = me & 31, warp = me >> 5;
  launch_next();
  for (int e = me; e < experts; e += 1024) counts[e] = 0;
  __syncthreads();
  for (int c = me; c < choices; c += 1024) {
    int e = ids[(c / top_k) * ids_stride + c % top_k];
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
  int tiles_before = 0, rows_before = 0;
  for (int base = 0; base < experts; base += 1024) {
    int e = base + me, count = e < experts ? counts[e] : 0, mine = (count + height - 1) / height;
    int tile_sum = mine, row_sum = count;
    for (int d = 1; d < 32; d *= 2) {
      int t = __shfl_up_sync(~0u, tile_sum, d), r = __shfl_up_sync(~0u, row_sum, d);
      if (lane >= d) tile_sum += t, row_sum += r;
    }
    if (lane == 31) warps[warp] = tile_sum, warps[32 + warp] = row_sum;
    __syncthreads();
    if (warp == 0) {
      int t = warps[lane], r = warps[32 + lane];
      for (int d = 1; d < 32; d *= 2) {
        int t2 = __shfl_up_sync(~0u, t, d), r2 = __shfl_up_sync(~0u, r, d);
        if (lane >= d) t += t2, r += r2;
      }
      warps[lane] = t, warps[32 + lane] = r;
    }
    __syncthreads();
    int tile = tiles_before + tile_sum - mine + (warp ? warps[warp - 1] : 0);
    int row = rows_before + row_sum - count + (warp ? warps[31 + warp] : 0);
    tiles_before += warps[31], rows_before += warps[63];
    for (int i = 0; i < mine; i++) {
      int a = (int)((long)i * count / mine), b = (int)((long)(i + 1) * count / mine);
      tile_expert[tile + i] = e, tile_start[tile + i] = row + a, tile_length[tile + i] = b - a;
    }
    if (e < experts) counts[e] = row;
    __syncthreads();
  }
  if (me == 0) *tiles = tiles_before;
  for (int c = me; c < choices; c += 1024) {
    int e = ids[(c / top_k) * ids_stride + c % top_k];
    if (e >= 0) rows[atomicAdd(&counts[e], 1)] = c;
  }
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
  launch_next();
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
