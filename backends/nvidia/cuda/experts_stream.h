// Few tokens an expert: its codes stream once through a ring of each warp's own, and tensor cores take 8 choices a time.
#pragma once
#include "experts.h"

// Columns 32 J to 32 J + 31 of a unit: b are those columns of x.
template <int J, int NT>
__device__ __forceinline__ void multiply(
    float (&acc)[NT][4], const Words& w, const Factors (&f)[2], const uint4 (&b)[NT]) {
  uint32_t a[4];
  decode<J, 0>(w, f, a);
#pragma unroll
  for (int n = 0; n < NT; n++) mma(acc[n], a, b[n].x, b[n].y);
  decode<J, 1>(w, f, a);
#pragma unroll
  for (int n = 0; n < NT; n++) mma(acc[n], a, b[n].z, b[n].w);
}
// Columns 32 ODD to 32 ODD + 31, and those 64 further on.
template <int ODD, int NT>
__device__ __forceinline__ void multiply(float (&acc)[NT][4], const Words& w, const uint4 (&b)[2][NT]) {
  const Factors f[2] = {Factors(w.s.x), Factors(w.s.y)};
  multiply<ODD, NT>(acc, w, f, b[0]), multiply<ODD + 2, NT>(acc, w, f, b[1]);
}
// A unit from device memory.
__device__ __forceinline__ Words words_of(const Gemm& a, uint32_t unit) {
  const int lane = threadIdx.x & 31;
  const uint32_t* codes = (const uint32_t*)((const char*)(a.w + lane * 4) + (uint64_t)unit * 1024);
  const uint32_t* scales = (const uint32_t*)((const char*)(a.scales + (lane >> 2) * 2) + (uint64_t)unit * 64);
  return {read_once(codes), read_once(codes + 128), read_once2(scales)};
}

// Where x of a K block lies: 8 rows of 128 columns for each 8 choices, swizzled; or one row, where a tile is one choice.
template <int NT> constexpr int X_STAGE = NT ? NT * 2048 : 384;
template <int NT> constexpr int WIDTH = NT ? NT : 1;  // in 8 choices

// Column 32 j + 8 t of row g, or of part t of a matrix's row g, is `place` with bit 6 turned where j is odd, and 128 bytes
// further on where j is 2 or 3.
__device__ __forceinline__ uint32_t place(uint32_t stage, int g, int t) { return stage + g * 256 + ((t ^ g) << 4); }

// What one of RW warps copies of a tile's rows of x: of 8 choices each, or of one (NT = 0), parts of 32 columns of a row.
template <int NT, int RW> struct Rows {
  static constexpr int PARTS = NT ? (NT * 4 + RW - 1) / RW : 1, COUNT = PARTS > 4 ? PARTS / 4 : 1;
  static constexpr int EACH = PARTS > 4 ? 4 : PARTS;
  static_assert((PARTS & (PARTS - 1)) == 0, "a warp's parts are of one row, or of whole ones");
  const __nv_bfloat16* from[COUNT];  // null: no choice
  uint32_t to;
  int j;
  bool idle;  // all is copied by other warps
  template <typename CHOICE>
  __device__ __forceinline__ Rows(const Gemm& a, int rw, bool gate, CHOICE choice_of) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = rw * PARTS;
    j = first % 4, idle = NT && first >= NT * 4;
    to = NT ? place(first / 4 * 2048 + j / 2 * 128, g, t) ^ (j & 1) << 6 : lane * 16;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int choice = idle ? -1 : choice_of(NT ? (first / 4 + i) * 8 + g : 0);
      long row = gate ? choice / a.top_k : choice;
      from[i] = choice < 0 ? nullptr : a.x + row * a.x_stride + (NT ? 32 * j + 8 * t : lane * 8);
    }
  }
  // What is not copied is zero; of one row the other seven are 16 zero bytes behind it.
  __device__ __forceinline__ void clear(uint32_t stage) const {
    if constexpr (NT == 0) {
      if ((threadIdx.x & 31) == 0) write4(stage + 256, uint4{});
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int e = 0; e < EACH; e++)
          if (!from[i] && !idle) write4(at(stage, i, e), uint4{});
    }
  }
  __device__ __forceinline__ uint32_t at(uint32_t stage, int i, int e) const {
    return (e & 1 ? stage + to ^ 64 : stage + to) + i * 2048 + e / 2 * 128;
  }
  __device__ __forceinline__ void fetch(const Gemm& a, uint32_t stage, int block) const {
    if constexpr (NT == 0) {
      int column = block * 128 + (threadIdx.x & 31) * 8;
      if ((threadIdx.x & 31) < 16) copy16(stage + to, from[0] + block * 128, column < a.k ? 16 : 0);
    } else {
      const int left = a.k - block * 128 - 32 * j - 8 * (threadIdx.x & 3);  // columns, from this thread's on
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        if (!from[i]) continue;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          if (block * 128 + 128 <= a.k) copy16(at(stage, i, e), from[i] + block * 128 + 32 * e);
          else copy16(at(stage, i, e), from[i] + block * 128 + 32 * e, left > 32 * e ? 16 : 0);
        }
      }
    }
  }
};
// Columns 32 j to 32 j + 31 of 8 rows, as the right operands of two products.
template <int NT> __device__ __forceinline__ uint4 x_at(uint32_t stage, int n, int j) {
  const int lane = threadIdx.x & 31, row = lane & 7, part = lane >> 3;
  if (NT == 0) return matrices(row ? stage + 256 : stage + (4 * j + part) * 16);
  uint32_t at = place(stage, row, part);
  return matrices((j & 1 ? at ^ 64 : at) + n * 2048 + j / 2 * 128);
}
// Those of j = ODD and j = ODD + 2, of all rows.
template <int NT, int ODD> __device__ __forceinline__ void half_of_x(uint4 (&b)[2][WIDTH<NT>], uint32_t stage) {
#pragma unroll
  for (int n = 0; n < WIDTH<NT>; n++) b[0][n] = x_at<NT>(stage, n, ODD), b[1][n] = x_at<NT>(stage, n, ODD + 2);
}

// acc += w x of R row blocks, whose first units are `units`, over the K blocks `first`, `first` + KW, ...; codes come to
// registers D blocks ahead, x one block ahead to one of two stages, which the RW warps of a group share.
template <int NT, int R, int KW, int RW, int D>
__device__ __forceinline__ void stream(
    const Gemm& a, float (&acc)[R][WIDTH<NT>][4], const int (&units)[R], const Rows<NT, RW>& x, int blocks, int first,
    uint32_t stages) {
  constexpr int N = WIDTH<NT>;
  Words w[D][R];
  auto fetch = [&](Words& to, int r, int block) {
    if (block < blocks) to = words_of(a, units[r] + block);
  };
#pragma unroll
  for (int d = 0; d < D; d++)
#pragma unroll
    for (int r = 0; r < R; r++) fetch(w[d][r], r, first + d * KW);
  x.clear(stages), x.clear(stages + X_STAGE<NT>);
  if (first < blocks) x.fetch(a, stages, first);
  commit_copies();
  uint32_t other = X_STAGE<NT>;
  for (int base = first; base < blocks; base += D * KW) {
#pragma unroll
    for (int d = 0; d < D; d++) {
      const int block = base + d * KW;
      if (d && block >= blocks) break;
      wait_copies<0>();
      if (RW == 1) __syncwarp();
      else meet<RW * 32>(first);
      uint4 b[2][N];
      half_of_x<NT, 0>(b, stages);
      if (block + KW < blocks) x.fetch(a, stages + other, block + KW);
      commit_copies();
#pragma unroll
      for (int r = 0; r < R; r++) multiply<0, N>(acc[r], w[d][r], b);
      half_of_x<NT, 1>(b, stages);
      stages += other, other = -other;
#pragma unroll
      for (int r = 0; r < R; r++) {
        multiply<1, N>(acc[r], w[d][r], b);
        fetch(w[d][r], r, block + D * KW);
      }
    }
  }
}

// A block's memory: stages of x, and sums when K is done.
template <int NT, int R, int KW, int RW>
constexpr int SPACE = KW * (2 * X_STAGE<NT> > RW * R * WIDTH<NT> * 512 ? 2 * X_STAGE<NT> : RW * R * WIDTH<NT> * 512);

// One tile's part: in the first GEMM (GATE) P blocks of gate and of up for each of RW groups of KW warps, else 2 P
// blocks of w2. Warps of a group share K; codes are read D blocks ahead.
template <bool GATE, int NT, int P, int KW, int RW, int D>
__device__ __forceinline__ void stream_tile(const Gemm& a, int tile, int part, int expert, char* memory) {
  constexpr int R = 2 * P, OUT = GATE ? P : R, N = WIDTH<NT>;
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
  float acc[R][N][4] = {};
  const Rows<NT, RW> x(a, rw, GATE, choice_of);
  stream<NT, R, KW, RW, D>(a, acc, units, x, blocks, kw, smem(memory) + kw * 2 * X_STAGE<NT>);
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
  constexpr int SIZE = R * N * 128;
  __syncthreads();
  float* sums = (float*)memory + (rw * KW + kw) * SIZE + lane;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[((r * N + n) * 4 + c) * 32] = acc[r][n][c];
  __syncthreads();
  const float* all = (float*)memory + rw * KW * SIZE + lane;
  for (int v = kw; v < OUT * N * 4; v += KW) {
    int r = v / (N * 4), rest = v % (N * 4);
    float one = 0, two = 0;
#pragma unroll
    for (int i = 0; i < KW; i++) {
      const float* of = all + i * SIZE;
      one += of[((GATE ? 2 * r : r) * N * 4 + rest) * 32];
      if (GATE) two += of[((2 * r + 1) * N * 4 + rest) * 32];
    }
    store(r, rest / 4, rest & 3, one, two);
  }
}

// A block is a part of a tile; tiles hold at most NT * 8 choices. NT = 0: every choice is a tile, nothing is sorted. WARPS
// are to fit a multiprocessor.
template <bool GATE, int NT, int P, int KW, int RW, int D, int WARPS>
__global__ void __launch_bounds__(KW * RW * 32, WARPS / (KW * RW)) stream_kernel(const __grid_constant__ Gemm a, int parts) {
  SHARED_MEMORY(memory);
  wait_for_launch();
  launch_next();
  const int tile = blockIdx.x / parts, part = blockIdx.x % parts;
  if (NT && tile >= *a.tiles) return;
  const int expert = NT ? a.tile_expert[tile] : a.ids[(tile / a.top_k) * a.ids_stride + tile % a.top_k];
  if (expert < 0) return;
  if (NT > 1 && a.tile_length[tile] <= 8)
    stream_tile<GATE, 1, P, KW, RW, D>(a, tile, part, expert, memory);
  else
    stream_tile<GATE, NT, P, KW, RW, D>(a, tile, part, expert, memory);
}

// A warp's 32 columns of 8 choices in bf16, a row each.
constexpr int TURNED = 8 * 80;

// The second GEMM where all of K lies in shared memory: each of W warps takes two row blocks after two row blocks of a
// tile's part, codes D K blocks ahead in registers. They are read before the launch in front of this one is done.
template <int NT, int W, int D, typename PART>
__device__ __forceinline__ void flat_tile(const Gemm& a, int tile, int part, int parts, char* memory) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, blocks = (a.k + 127) / 128;
  const int groups = a.n / 16, size = (groups + 2 * parts - 1) / (2 * parts) * 2, end = min((part + 1) * size, groups);
  const uint32_t hidden = smem(memory);
  const int start = a.tile_start[tile], length = a.tile_length[tile];
  const uint32_t first = a.tile_expert[tile] * groups * blocks;
  Words w[D][2];
  int group = part * size + warp * 2, ahead = group, next = 0;
  auto fetch = [&](Words (&to)[2]) {
    if (ahead < end) {
      uint32_t unit = first + ahead * blocks + next;
      to[0] = words_of(a, unit), to[1] = words_of(a, ahead + 1 < groups ? unit + blocks : unit);
      if (++next == blocks) next = 0, ahead += 2 * W;
    }
  };
#pragma unroll
  for (int d = 0; d < D; d++) fetch(w[d]);
  constexpr bool HALF = sizeof(PART) == 2;
  int row[NT][2];  // Where the choices of this thread's accumulators go; of bf16 the one that it stores 16 bytes of.
  float weight[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      int slot = n * 8 + 2 * t + c, choice = slot < length ? a.rows[start + slot] : -1;
      row[n][c] = choice < 0 ? -1 : choice * a.n + g;
      weight[n][c] =
          choice < 0 ? 0 : RESCALE * a.weights[(choice / a.top_k) * a.weights_stride + choice % a.top_k];
    }
  if (HALF)
#pragma unroll
    for (int n = 0; n < NT; n++) row[n][0] = n * 8 + g < length ? a.rows[start + n * 8 + g] * a.n + t * 8 : -1;
  wait_for_launch();
  for (int i = threadIdx.x; i < NT * 128 * blocks; i += W * 32) {
    int chunk = i & 15, slot = i >> 4 & (NT * 8 - 1), block = i / (NT * 128), column = block * 128 + chunk * 8;
    uint4 v{};
    if (slot < length && column < a.k) v = *(const uint4*)(a.x + (long)a.rows[start + slot] * a.x_stride + column);
    write4(hidden + block * (NT * 2048) + (slot >> 3) * 2048 + (slot & 7) * 256 + ((chunk ^ (slot & 7)) << 4), v);
  }
  __syncthreads();
  float acc[2][NT][4] = {};
  const uint32_t turned = hidden + blocks * (NT * 2048) + warp * TURNED;
  auto store = [&] {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float v[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) v[r][c] = acc[r][n][c] * weight[n][c & 1], acc[r][n][c] = 0;
      if constexpr (HALF) {
        __syncwarp();  // What was here has been read.
        write_matrices(turned + (lane & 7) * 80 + (lane >> 3) * 16, pair(v[0][0], v[0][1]), pair(v[0][2], v[0][3]),
                       pair(v[1][0], v[1][1]), pair(v[1][2], v[1][3]));
        __syncwarp();
        if (row[n][0] >= 0 && group + t / 2 < end)
          *(uint4*)((PART*)a.out + row[n][0] + group * 16) = read4(turned + g * 80 + t * 16);
      } else {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            if (row[n][c & 1] >= 0 && group + r < end)
              put((PART*)a.out + row[n][c & 1] + (group + r) * 16 + (c >> 1) * 8, v[r][c]);
      }
    }
  };
  for (int block = 0; group < end;) {
#pragma unroll
    for (int d = 0; d < D; d++) {
      if (d && group >= end) break;
      uint4 x[2][NT];
      half_of_x<NT, 0>(x, hidden + block * (NT * 2048));
      multiply<0, NT>(acc[0], w[d][0], x), multiply<0, NT>(acc[1], w[d][1], x);
      half_of_x<NT, 1>(x, hidden + block * (NT * 2048));
      multiply<1, NT>(acc[0], w[d][0], x), multiply<1, NT>(acc[1], w[d][1], x);
      fetch(w[d]);
      if (++block < blocks) continue;
      store();
      block = 0, group += 2 * W;
    }
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
