// Few tokens: nothing is sorted, and the second GEMM adds up a token's choices itself.
#pragma once
#include "experts_stream.h"

__device__ __forceinline__ void fetch_unit(const Gemm& a, uint32_t to, long unit) {
  const int lane = threadIdx.x & 31;
  const uint32_t* from = a.w + unit * 256 + lane * 4;
  copy16(to + lane * 16, from), copy16(to + 512 + lane * 16, from + 128);
  if (lane < 4) copy16(to + 1024 + lane * 16, a.scales + unit * 16 + lane * 4);
}

// The second GEMM of few tokens with the sum of a token's choices, in ascending order of their experts: `each` times 16
// columns of one token a block, W warps, D units on their way a warp. Codes are fetched before the launch in front of it
// is done.
template <int W, int D> __global__ void __launch_bounds__(W * 32) sum_kernel(const __grid_constant__ Gemm a, int each) {
  SHARED_MEMORY(memory);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, top_k = a.top_k;
  const int groups = a.n / 16, parts = (groups + each - 1) / each, token = blockIdx.x / parts;
  const int first = blockIdx.x % parts * each, end = min(first + each, groups), blocks = (a.k + 127) / 128;
  const uint32_t ring = smem(memory) + warp * (D * UNIT), zeros = smem(memory) + W * D * UNIT, hidden = zeros + 16;
  float* results = (float*)(memory + W * D * UNIT + 16 + top_k * blocks * 256);  // [2][top_k][16]
  const int mine = lane < top_k ? a.ids[(long)token * a.ids_stride + lane] : -1;
  auto after = [&](int j) {
    while (j < top_k && __shfl_sync(~0u, mine, j) < 0) j += W;
    return j;
  };
  const int start = after(warp);
  int group = first, choice = start, next = 0, to = 0;
  auto fetch = [&] {
    if (group < end && choice < top_k) {
      fetch_unit(a, ring + to * UNIT, ((long)__shfl_sync(~0u, mine, choice) * groups + group) * blocks + next);
      if (++next == blocks) {
        next = 0, choice = after(choice + W);
        if (choice >= top_k) choice = start, group++;
      }
    }
    to = to + 1 == D ? 0 : to + 1;
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < D; i++) fetch();
  // Lane i knows which choice is the i-th in the order of experts.
  int rank = 0, order = 0;
  for (int j = 0; j < top_k; j++) {
    int other = __shfl_sync(~0u, mine, j);
    rank += other >= 0 && other < mine;
  }
  for (int j = 0; j < top_k; j++)
    if (__shfl_sync(~0u, mine >= 0 ? rank : -1, j) == lane) order = j;
  const int used = __popc(__ballot_sync(~0u, mine >= 0));
  wait_for_launch();
  for (int i = threadIdx.x; i < top_k * blocks * 16; i += W * 32) {
    int j = i / (blocks * 16), column = i % (blocks * 16) * 8;
    uint4 v{};
    if (column < a.k && a.ids[(long)token * a.ids_stride + j] >= 0)
      v = *(const uint4*)(a.x + ((long)token * top_k + j) * a.x_stride + column);
    write4(hidden + i * 16, v);
  }
  if (threadIdx.x == 0) write4(zeros, uint4{});
  __syncthreads();
  int at = 0;
  for (int r = first; r < end; r++) {
    float* result = results + (r & 1) * top_k * 16;
    for (int j = start; j < top_k; j = after(j + W)) {
      float acc[1][4] = {};
      for (int b = 0; b < blocks; b++) {
        uint4 x[2][2][1];  // odd, and 64 columns further on
#pragma unroll
        for (int i = 0; i < 4; i++)  // a matrix's first row is the choice's, the other seven are zero
          x[i & 1][i / 2][0] = matrices(lane & 7 ? zeros : hidden + (j * blocks + b) * 256 + (4 * i + (lane >> 3)) * 16);
        wait_copies<D - 1>();
        __syncwarp();
        Words w = words_at(ring + at * UNIT);
        multiply<0, 1>(acc, w, x[0]), multiply<1, 1>(acc, w, x[1]);
        __syncwarp();
        fetch();
        at = at + 1 == D ? 0 : at + 1;
      }
      float weight = a.weights[(long)token * a.weights_stride + j] * RESCALE;
      if (t == 0) result[j * 16 + g] = acc[0][0] * weight, result[j * 16 + g + 8] = acc[0][2] * weight;
    }
    __syncthreads();
    if (warp != r % W) continue;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < used; i++) sum += result[__shfl_sync(~0u, order, i) * 16 + (lane & 15)];
    if (lane < 16) put((__nv_bfloat16*)a.out + (long)token * a.n + r * 16 + lane, sum);
  }
}
