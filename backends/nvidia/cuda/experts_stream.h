// Few tokens an expert: its codes stream once through a ring of each warp's own, and tensor cores take 8 choices a time.
#pragma once
#include "experts.h"

template <int J, int NT>
__device__ __forceinline__ void multiply(float (&acc)[NT][4], const Words& w, const uint4 (&b)[NT][4]) {
  uint32_t a[4];
  decode<J, 0>(w, a);
#pragma unroll
  for (int n = 0; n < NT; n++) mma(acc[n], a, b[n][J].x, b[n][J].y);
  decode<J, 1>(w, a);
#pragma unroll
  for (int n = 0; n < NT; n++) mma(acc[n], a, b[n][J].z, b[n][J].w);
}
__device__ __forceinline__ void fetch_unit(const Gemm& a, uint32_t to, long unit) {
  const int lane = threadIdx.x & 31;
  const uint32_t* from = a.w + unit * 256 + lane * 4;
  copy16(to + lane * 16, from), copy16(to + 512 + lane * 16, from + 128);
  if (lane < 4) copy16(to + 1024 + lane * 16, a.scales + unit * 16 + lane * 4);
}

// Where x of a stage lies: 8 rows of 128 columns for each 8 choices, swizzled; or one row, where a tile is one choice.
template <int NT> constexpr int X_STAGE = NT ? NT * 2048 : 256;
template <int NT> constexpr int WIDTH = NT ? NT : 1;  // in 8 choices
// A warp's ring of M stages of R units and x, and 16 zero bytes.
template <int NT, int R, int M> constexpr int RING = M * (R * UNIT + X_STAGE<NT>) + 16;

template <int NT>
__device__ __forceinline__ void fetch_x(
    const Gemm& a, uint32_t to, const __nv_bfloat16* const (&x)[WIDTH<NT>], const int (&live)[WIDTH<NT>], int block) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (NT == 0) {
    int column = block * 128 + lane * 8;
    if (lane < 16) copy16(to + lane * 16, x[0] + column, column < a.k ? 16 : 0);
    return;
  }
  const bool whole = block * 128 + 128 <= a.k;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const __nv_bfloat16* from = x[n] + block * 128 + 8 * t;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int bytes = whole || block * 128 + 32 * j + 8 * t < a.k ? live[n] : 0;
      copy16(to + n * 2048 + g * 256 + (((4 * j + t) ^ g) << 4), from + 32 * j, bytes);
    }
  }
}
// Columns 32 j to 32 j + 31 of 8 rows, as the right operands of two products.
template <int NT> __device__ __forceinline__ uint4 x_at(uint32_t stage, int n, int j, uint32_t zeros) {
  const int lane = threadIdx.x & 31, row = lane & 7, part = 4 * j + (lane >> 3);
  if (NT == 0) return matrices(row ? zeros : stage + part * 16);
  return matrices(stage + n * 2048 + row * 256 + ((part ^ row) << 4));
}

// acc += w x of R row blocks, whose first units are `units`, over the K blocks `first`, `first` + KW, ...
template <int NT, int R, int KW, int M>
__device__ __forceinline__ void stream(
    const Gemm& a, float (&acc)[R][WIDTH<NT>][4], const int (&units)[R], const __nv_bfloat16* const (&x)[WIDTH<NT>],
    const int (&live)[WIDTH<NT>], int blocks, int first, uint32_t ring) {
  constexpr int N = WIDTH<NT>;
  const uint32_t xring = ring + M * R * UNIT, zeros = xring + M * X_STAGE<NT>;
  if (NT == 0) {
    write4(zeros, uint4{});
    __syncwarp();
  }
  int next = first;
  auto fetch = [&](int r, int stage) {
    if (next < blocks) {
      fetch_unit(a, ring + (stage * R + r) * UNIT, units[r] + next);
      if (r == 0) fetch_x<NT>(a, xring + stage * X_STAGE<NT>, x, live, next);
    }
    commit_copies();
  };
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int r = 0; r < R; r++) fetch(r, m);
    next += KW;
  }
  int stage = 0;
  for (int block = first; block < blocks; block += KW) {
    uint4 b[N][4];
#pragma unroll
    for (int r = 0; r < R; r++) {
      wait_copies<M * R - 1>();
      __syncwarp();
      if (r == 0) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) b[n][j] = x_at<NT>(xring + stage * X_STAGE<NT>, n, j, zeros);
      }
      Words w = words_at(ring + (stage * R + r) * UNIT);
      multiply<0, N>(acc[r], w, b), multiply<1, N>(acc[r], w, b);
      multiply<2, N>(acc[r], w, b), multiply<3, N>(acc[r], w, b);
      __syncwarp();
      fetch(r, stage);
    }
    next += KW;
    stage = stage + 1 == M ? 0 : stage + 1;
  }
}

// One tile's part: in the first GEMM (GATE) P blocks of gate and of up for each of RW groups of KW warps, else 2 P
// blocks of w2. Warps of a group share K.
template <bool GATE, int NT, int P, int KW, int RW, int M>
__device__ __forceinline__ void stream_tile(const Gemm& a, int tile, int part, int expert, char* memory) {
  constexpr int R = 2 * P, OUT = GATE ? P : R, N = WIDTH<NT>, SIZE = RING<NT, R, M>;
  static_assert(R * N * 512 <= SIZE, "sums lie where the ring was");
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  const int kw = warp % KW, rw = warp / KW, blocks = (a.k + 127) / 128, groups = a.n / 16;
  const int base = (part * RW + rw) * OUT;
  const int start = NT == 0 ? tile : a.tile_start[tile], length = NT == 0 ? 1 : a.tile_length[tile];
  int units[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    int row = GATE ? min(base + r / 2, groups - 1) + (r & 1) * groups : min(base + r, groups - 1);
    units[r] = (expert * groups * (GATE ? 2 : 1) + row) * blocks;
  }
  auto choice_of = [&](int slot) { return slot >= length ? -1 : NT == 0 ? tile : a.rows[start + slot]; };
  const __nv_bfloat16* x[N];
  int live[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    int choice = NT ? choice_of(n * 8 + g) : tile;
    live[n] = choice >= 0 ? 16 : 0;
    long row = max(choice, 0);
    x[n] = a.x + (GATE ? row / a.top_k : row) * a.x_stride;
  }
  float acc[R][N][4] = {};
  stream<NT, R, KW, M>(a, acc, units, x, live, blocks, kw, smem(memory) + warp * SIZE);
  auto store = [&](int r, int n, int c, float v, float up) {
    int choice = choice_of(n * 8 + 2 * t + (c & 1)), row = base + r;
    if (choice < 0 || row >= groups) return;
    long at = (long)choice * a.n + row * 16 + g + (c >> 1) * 8;
    if (GATE) {
      ((__nv_bfloat16*)a.out)[at] = __float2bfloat16(activation(v * RESCALE, up * RESCALE, a.beta, a.linear_beta));
    } else {
      ((float*)a.out)[at] = v * (RESCALE * a.weights[(long)(choice / a.top_k) * a.weights_stride + choice % a.top_k]);
    }
  };
  if (KW == 1) {
#pragma unroll
    for (int r = 0; r < OUT; r++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) store(r, n, c, acc[GATE ? 2 * r : r][n][c], acc[GATE ? 2 * r + 1 : r][n][c]);
    return;
  }
  wait_copies<0>();
  __syncwarp();
  float* sums = (float*)(memory + warp * SIZE) + lane;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[((r * N + n) * 4 + c) * 32] = acc[r][n][c];
  __syncthreads();
  const float* all = (float*)(memory + rw * KW * SIZE) + lane;
  for (int v = kw; v < OUT * N * 4; v += KW) {
    int r = v / (N * 4), rest = v % (N * 4);
    float one = 0, two = 0;
#pragma unroll
    for (int i = 0; i < KW; i++) {
      const float* of = all + i * (SIZE / 4);
      one += of[((GATE ? 2 * r : r) * N * 4 + rest) * 32];
      if (GATE) two += of[((2 * r + 1) * N * 4 + rest) * 32];
    }
    store(r, rest / 4, rest & 3, one, two);
  }
}

// A block is a part of a tile; tiles hold at most NT * 8 choices. NT = 0: every choice is a tile, nothing is sorted.
template <bool GATE, int NT, int P, int KW, int RW, int M>
__global__ void __launch_bounds__(KW * RW * 32) stream_kernel(const __grid_constant__ Gemm a, int parts) {
  SHARED_MEMORY(memory);
  wait_for_launch();
  launch_next();
  const int tile = blockIdx.x / parts, part = blockIdx.x % parts;
  if (NT && tile >= *a.tiles) return;
  const int expert = NT ? a.tile_expert[tile] : a.ids[(tile / a.top_k) * a.ids_stride + tile % a.top_k];
  if (expert < 0) return;
  if (NT > 1 && a.tile_length[tile] <= 8)
    stream_tile<GATE, 1, P, KW, RW, M>(a, tile, part, expert, memory);
  else
    stream_tile<GATE, NT, P, KW, RW, M>(a, tile, part, expert, memory);
}

// The second GEMM where all of K lies in shared memory: each of W warps takes row block after row block of a tile's part,
// with D units on their way. Codes are fetched before the launch in front of it is done.
template <int NT, int W, int D, typename PART>
__device__ __forceinline__ void flat_tile(const Gemm& a, int tile, int part, int parts, char* memory) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, blocks = (a.k + 127) / 128;
  const int groups = a.n / 16, size = (groups + parts - 1) / parts, end = min((part + 1) * size, groups);
  const uint32_t ring = smem(memory) + warp * (D * UNIT), hidden = smem(memory) + W * D * UNIT;
  const int start = a.tile_start[tile], length = a.tile_length[tile];
  const long first = (long)a.tile_expert[tile] * groups * blocks;
  int fetched = part * size + warp, next = 0, to = 0;
  auto fetch = [&] {
    if (fetched < end) {
      fetch_unit(a, ring + to * UNIT, first + fetched * blocks + next);
      if (++next == blocks) next = 0, fetched += W;
    }
    to = to + 1 == D ? 0 : to + 1;
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < D; i++) fetch();
  int row[NT][2];
  float weight[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      int slot = n * 8 + 2 * t + c, choice = slot < length ? a.rows[start + slot] : -1;
      row[n][c] = choice < 0 ? -1 : choice * a.n;
      weight[n][c] =
          choice < 0 ? 0 : RESCALE * a.weights[(choice / a.top_k) * a.weights_stride + choice % a.top_k];
    }
  wait_for_launch();
  for (int i = threadIdx.x; i < NT * 128 * blocks; i += W * 32) {
    int chunk = i & 15, slot = i >> 4 & (NT * 8 - 1), block = i / (NT * 128), column = block * 128 + chunk * 8;
    uint4 v{};
    if (slot < length && column < a.k) v = *(const uint4*)(a.x + (long)a.rows[start + slot] * a.x_stride + column);
    write4(hidden + block * (NT * 2048) + (slot >> 3) * 2048 + (slot & 7) * 256 + ((chunk ^ (slot & 7)) << 4), v);
  }
  __syncthreads();
  int at = 0;
  for (int r = part * size + warp; r < end; r += W) {
    float acc[NT][4] = {};
    for (int block = 0; block < blocks; block++) {
      uint4 x[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[n][j] = x_at<NT>(hidden + block * (NT * 2048), n, j, 0);
      wait_copies<D - 1>();
      __syncwarp();
      Words w = words_at(ring + at * UNIT);
      multiply<0, NT>(acc, w, x), multiply<1, NT>(acc, w, x), multiply<2, NT>(acc, w, x), multiply<3, NT>(acc, w, x);
      __syncwarp();
      fetch();
      at = at + 1 == D ? 0 : at + 1;
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (row[n][c & 1] >= 0)
          put((PART*)a.out + row[n][c & 1] + r * 16 + g + (c >> 1) * 8, acc[n][c] * weight[n][c & 1]);
  }
}
template <int NT, int W, int D, typename PART>
__global__ void __launch_bounds__(W * 32) flat_kernel(const __grid_constant__ Gemm a, int parts) {
  SHARED_MEMORY(memory);
  const int tile = blockIdx.x / parts, part = blockIdx.x % parts;
  // The launch in front waited for the sort before it let this one begin.
  if (tile >= *a.tiles) return;
  if (NT > 1 && a.tile_length[tile] <= 8)
    flat_tile<1, W, D, PART>(a, tile, part, parts, memory);
  else
    flat_tile<NT, W, D, PART>(a, tile, part, parts, memory);
  launch_next();
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
  int rank = 0;
  for (int j = 0; j < top_k; j++) {
    int other = __shfl_sync(~0u, mine, j);
    rank += other >= 0 && other < mine;
  }
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
        uint4 x[1][4];
#pragma unroll
        for (int i = 0; i < 4; i++)  // a matrix's first row is the choice's, the other seven are zero
          x[0][i] = matrices(lane & 7 ? zeros : hidden + (j * blocks + b) * 256 + (4 * i + (lane >> 3)) * 16);
        wait_copies<D - 1>();
        __syncwarp();
        Words w = words_at(ring + at * UNIT);
        multiply<0, 1>(acc, w, x), multiply<1, 1>(acc, w, x), multiply<2, 1>(acc, w, x), multiply<3, 1>(acc, w, x);
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
    for (int i = 0; i < top_k; i++) {
      unsigned who = __ballot_sync(~0u, mine >= 0 && rank == i);
      if (who && lane < 16) sum += result[(__ffs(who) - 1) * 16 + lane];
    }
    if (lane < 16) put((__nv_bfloat16*)a.out + (long)token * a.n + r * 16 + lane, sum);
  }
}
