// Many tokens an expert: codes are decoded into the registers that wgmma takes its left operand from; the right one is
// rows of choices. A warpgroup does nothing but fetch both into two rings. Blocks stay and take item after item.
#pragma once
#include "experts.h"
#include <wgmma.h>

// Of kernels for tiles of up to 96 choices, and (WIDE) of up to 128.
template <bool WIDE> constexpr int TALLEST = WIDE ? 128 : 96;
template <bool WIDE> constexpr int STAGES = WIDE ? 3 : 4;
template <bool WIDE> constexpr int X_BYTES = TALLEST<WIDE> * 256;  // 128 columns in two tiles of 64, swizzled
constexpr int W_BYTES = 16 * UNIT;                                 // two units for each of eight warps
// What a warpgroup has to store: rows of 64 or 128 columns, 16 bytes apart.
template <bool GATE> constexpr int OUT_ROW = GATE ? 144 : 272;
template <bool GATE, bool WIDE> constexpr int TALL_BYTES =
    STAGES<WIDE> * (X_BYTES<WIDE> + W_BYTES) + 2 * TALLEST<WIDE> * OUT_ROW<GATE> + 1024;

// Where a slot's choice goes, the first element of its row in the output, and its weight; 0 of a slot that is empty.
struct Slot {
  int row;
  float weight;
};
template <bool WIDE> struct Ring {
  uint32_t base, full, empty;
  int stage, phase;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES<WIDE>) stage = 0, phase ^= 1;
  }
};

// Each of eight warps has two row blocks of a chunk, whose first units are these: of gate and of up, or 64 rows apart.
template <bool GATE>
__device__ __forceinline__ int unit_of(const Gemm& a, int m, int warp, int expert, int chunk, int blocks) {
  const int groups = a.n / 16;
  int group = GATE ? chunk * 8 + warp : chunk * 16 + warp / 4 * 8 + m * 4 + warp % 4;
  group = min(group, groups - 1) + (GATE ? m * groups : 0);
  return (expert * groups * (GATE ? 2 : 1) + group) * blocks;
}
// The activation of accumulators, in as few instructions as it takes: they are repeated for every eight choices of every
// height.
struct Activation {
  float gate_scale, up_scale, out;
  bool capped;  // SiTU
  __device__ __forceinline__ explicit Activation(const Gemm& a) : capped(a.beta != 0) {
    gate_scale = capped ? RESCALE / a.beta : RESCALE, up_scale = capped ? RESCALE / a.linear_beta : RESCALE;
    out = capped ? a.beta * a.linear_beta : 1;
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    float x = gate * gate_scale, y = up * up_scale;
    float p = capped ? fast_tanh(x) : x, q = capped ? fast_tanh(y) : y;
    return __fdividef(p * q * out, 1 + fast_exp2(gate * (-1.44269504f * RESCALE)));
  }
};

// A warpgroup's results, by way of shared memory, to the rows of its slots, 16 bytes a lane. A bulk copy a row in their
// place takes some fifty cycles to issue, and a warp issues those of 32 rows one after the other.
template <bool GATE, int N>
__device__ __forceinline__ void finish(
    const Gemm& a, const float (&acc)[2][N / 2], uint32_t slots, uint32_t out, int length, int chunk) {
  const int lane = threadIdx.x & 31, t = lane & 3, warp = threadIdx.x >> 5 & 3, group = threadIdx.x >> 7;
  late(chunk), late(slots), late(length);
  const uint32_t to = out + (lane & 7) * OUT_ROW<GATE> + warp * 32 + (lane >> 3 & 1) * 16 + (lane >> 4) * 128;
  const Activation activation(a);
  meet(group);  // What was here has been read.
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    if (GATE) {
      float h[4];
#pragma unroll
      for (int c = 0; c < 4; c++)
        h[c] = activation(acc[0][i * 4 + c], acc[1][i * 4 + c]);
      write_matrices(to + i * 8 * OUT_ROW<GATE>, pair(h[0], h[1]), pair(h[2], h[3]));
    } else {
      uint4 two = read4(slots + (i * 8 + 2 * t) * 8);
      float x = __uint_as_float(two.y), y = __uint_as_float(two.w);
      uint32_t p[4];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) p[2 * m + h] = pair(acc[m][i * 4 + 2 * h] * x, acc[m][i * 4 + 2 * h + 1] * y);
      write_matrices(to + i * 8 * OUT_ROW<GATE>, p[0], p[1], p[2], p[3]);
    }
  }
  meet(group);
  constexpr int WIDTH = GATE ? 64 : 128, LANES = WIDTH / 8, ROWS = 32 / LANES;
  const int column = (chunk * 2 + group) * WIDTH + lane % LANES * 8;
  if (column >= a.n) length = 0;
#pragma unroll 4
  for (int slot = warp * ROWS + lane / LANES; slot < length; slot += 4 * ROWS) {
    int row = (int)read1(slots + slot * 8);
    *(uint4*)((__nv_bfloat16*)a.out + row + column) = read4(out + slot * OUT_ROW<GATE> + lane % LANES * 16);
  }
  __syncwarp();
}

template <bool WIDE, int N, int J, int H>
__device__ __forceinline__ void step(float (&acc)[2][N / 2], const Words (&w)[2], const Factors (&f)[2][2], uint32_t (&a)[2][4],
    uint64_t b) {
  decode<J, H>(w[0], f[0], a[0]), decode<J, H>(w[1], f[1], a[1]);
  hold(acc[0]), hold(acc[1]);
  wgmma_begin();
  b += J / 2 * (TALLEST<WIDE> * 128 / 16) + J % 2 * 4 + H * 2;
  Wgmma<N>::go(acc[0], a[0], b), Wgmma<N>::go(acc[1], a[1], b);
  wgmma_commit();
  hold(acc[0]), hold(acc[1]);
  wgmma_wait<1>();  // the step before this one is done: its operand may be decoded anew
}

// `repeat` chunks of an item, which share its rows, by a warpgroup that multiplies. With more than one chunk all of K must
// be in the ring at once.
template <bool GATE, bool WIDE, int N>
__device__ __forceinline__ void consume(
    const Gemm& a, Ring<WIDE>& x, Ring<WIDE>& w, uint32_t slots, uint32_t out, int length, int chunk, int repeat,
    int blocks) {
  const int stage = x.stage, phase = x.phase, warp = threadIdx.x >> 5;
  const bool leader = (threadIdx.x & 31) == 0;
  for (int r = 0; r < repeat; r++) {
    const bool last = r + 1 == repeat;
    float acc[2][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[0][i] = 0, acc[1][i] = 0;
    if (r) x.stage = stage, x.phase = phase;
    int held = -1;
    uint32_t even[2][4], odd[2][4];
    for (int block = 0; block < blocks; block++) {
      barrier_wait(w.full + w.stage * 8, w.phase);
      const uint32_t units = w.base + w.stage * W_BYTES + warp * UNIT;
      const Words words[2] = {words_at(units), words_at(units + 8 * UNIT)};
      const Factors factors[2][2] = {{Factors(words[0].s.x), Factors(words[0].s.y)}, {Factors(words[1].s.x), Factors(words[1].s.y)}};
      barrier_wait(x.full + x.stage * 8, x.phase);
      see_copies();
      const uint64_t b = descriptor(x.base + x.stage * X_BYTES<WIDE>);
      step<WIDE, N, 0, 0>(acc, words, factors, even, b);
      // All words have been read, and all of the block before is done.
      if (leader) barrier_arrive(w.empty + w.stage * 8);
      if (leader && last && held >= 0) barrier_arrive(x.empty + held * 8);
      step<WIDE, N, 0, 1>(acc, words, factors, odd, b), step<WIDE, N, 1, 0>(acc, words, factors, even, b);
      step<WIDE, N, 1, 1>(acc, words, factors, odd, b), step<WIDE, N, 2, 0>(acc, words, factors, even, b);
      step<WIDE, N, 2, 1>(acc, words, factors, odd, b), step<WIDE, N, 3, 0>(acc, words, factors, even, b);
      step<WIDE, N, 3, 1>(acc, words, factors, odd, b);
      held = x.stage;
      x.next(), w.next();
    }
    wgmma_wait<0>();
    hold(acc[0]), hold(acc[1]);
    if (leader && last) barrier_arrive(x.empty + held * 8);
    finish<GATE, N>(a, acc, slots, out, length, chunk + r);
  }
}

// Block `block` of a chunk's units; thread p copies 16 bytes of the row blocks p / 64, p / 64 + 2, ...
template <bool GATE, bool WIDE>
__device__ __forceinline__ void produce_w(
    const Gemm& a, Ring<WIDE>& ring, int expert, int chunk, int block, int blocks) {
  const int p = threadIdx.x & 127;
  barrier_wait(ring.empty + ring.stage * 8, ring.phase ^ 1);
  const uint32_t to = ring.base + ring.stage * W_BYTES;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int mine = p / 64 + 2 * i, unit = unit_of<GATE>(a, mine / 8, mine % 8, expert, chunk, blocks) + block;
    copy16(to + mine * UNIT + p % 64 * 16, (const char*)a.w + ((long)unit << 10) + p % 64 * 16);
  }
  if (p < 64) {
    int mine = p / 4, unit = unit_of<GATE>(a, mine / 8, mine % 8, expert, chunk, blocks) + block;
    copy16(to + mine * UNIT + 1024 + p % 4 * 16, (const char*)a.scales + ((long)unit << 6) + p % 4 * 16);
  }
  copies_arrive(ring.full + ring.stage * 8);
  ring.next();
}

// An item's rows and units; thread p copies 16 bytes of rows p / 16, p / 16 + 8, ...
template <bool GATE, bool WIDE>
__device__ __forceinline__ void produce(
    const Gemm& a, Ring<WIDE>& ring, Ring<WIDE>& w, int expert, int start, int length, int chunk, int repeat, int blocks) {
  const int p = threadIdx.x & 127, part = p & 15, row = p >> 4, height = (length + 7) / 8;
  const uint32_t to = (part >> 3) * (TALLEST<WIDE> * 128) + row * 128 + (((part & 7) ^ row) << 4);
  uint32_t from[TALLEST<WIDE> / 8];  // in 16 bytes
#pragma unroll
  for (int i = 0; i < TALLEST<WIDE> / 8; i++) {
    int choice = __ldg(a.rows + start + min(row + 8 * i, length - 1));
    from[i] = (uint32_t)((GATE ? choice / a.top_k : choice) * (a.x_stride >> 3)) + part;
  }
  for (int block = 0; block < blocks; block++) {
    produce_w<GATE, WIDE>(a, w, expert, chunk, block, blocks);
    barrier_wait(ring.empty + ring.stage * 8, ring.phase ^ 1);
    const uint32_t base = ring.base + ring.stage * X_BYTES<WIDE> + to;
    const int bytes = block * 128 + part * 8 < a.k ? 16 : 0;
#pragma unroll
    for (int i = 0; i < TALLEST<WIDE> / 8; i++)
      if (i < height) copy16(base + i * 1024, (const char*)a.x + (uint64_t)(from[i] + block * 16) * 16, bytes);
    copies_arrive(ring.full + ring.stage * 8);
    ring.next();
  }
  for (int r = 1; r < repeat; r++)
    for (int block = 0; block < blocks; block++) produce_w<GATE, WIDE>(a, w, expert, chunk + r, block, blocks);
}

// Few heights: each has 20 to 30 KiB of instructions, which blocks go through in no order. With all of them in one kernel
// ptxas gives up and puts a wait behind every product (its note C7512). Two more pay where items repeat their chunks.
template <bool GATE, bool WIDE>
__global__ void __launch_bounds__(384, 1) tall_kernel(const __grid_constant__ Gemm a, int repeat) {
  SHARED_MEMORY(memory);
  constexpr int S = STAGES<WIDE>, T = TALLEST<WIDE>;
  __shared__ __align__(8) uint64_t barriers[4 * S + 4];
  __shared__ __align__(16) Slot slots[2][T];
  Ring<WIDE> x{(smem(memory) + 1023) & ~1023u, smem(barriers), smem(barriers + S), 0, 0};
  Ring<WIDE> w{x.base + S * X_BYTES<WIDE>, smem(barriers + 2 * S), smem(barriers + 3 * S), 0, 0};
  const uint32_t told = smem(barriers + 4 * S), heard = told + 16;  // of `slots`
  if (threadIdx.x == 0) {
    for (int i = 0; i < S; i++) {
      barrier_init(x.full + i * 8, 128), barrier_init(x.empty + i * 8, 8);
      barrier_init(w.full + i * 8, 128), barrier_init(w.empty + i * 8, 8);
    }
    for (int i = 0; i < 2; i++) barrier_init(told + i * 8, 128), barrier_init(heard + i * 8, 8);
    barriers_ready();
  }
  // Slots that no choice fills are multiplied too.
  for (int i = threadIdx.x * 16; i < S * X_BYTES<WIDE>; i += 384 * 16) write4(x.base + i, uint4{});
  __syncthreads();
  wait_for_launch();
  launch_next();
  const int blocks = (a.k + 127) / 128, chunks = (a.n + (GATE ? 127 : 255)) / (GATE ? 128 : 256);
  const int groups = (chunks + repeat - 1) / repeat, items = *a.tiles * groups;
  int turn = 0;
  if (threadIdx.x >= 256) {
    fewer_registers<56>();
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
      const int tile = item / groups, chunk = item % groups * repeat;
      const int start = __ldg(a.tile_start + tile), length = __ldg(a.tile_length + tile);
      const int slot = threadIdx.x & 127, choice = slot < length ? __ldg(a.rows + start + slot) : -1;
      Slot mine{choice * a.n, 0};
      if (!GATE && choice >= 0)
        mine.weight = RESCALE * a.weights[(choice / a.top_k) * a.weights_stride + choice % a.top_k];
      barrier_wait(heard + (turn & 1) * 8, turn >> 1 & 1 ^ 1);
      if (slot < T) slots[turn & 1][slot] = mine;
      barrier_arrive(told + (turn & 1) * 8);
      produce<GATE, WIDE>(
          a, x, w, __ldg(a.tile_expert + tile), start, length, chunk, min(repeat, chunks - chunk), blocks);
    }
  } else {
    more_registers<224>();
    const uint32_t out = w.base + S * W_BYTES + (threadIdx.x >> 7) * (T * OUT_ROW<GATE>);
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
      const int tile = item / groups, chunk = item % groups * repeat, count = min(repeat, chunks - chunk);
      const int length = __ldg(a.tile_length + tile);
      barrier_wait(told + (turn & 1) * 8, turn >> 1 & 1);
#define CONSUME(N) consume<GATE, WIDE, N>(a, x, w, smem(slots[turn & 1]), out, length, chunk, count, blocks)
      if (WIDE) {
        if (length <= 48) CONSUME(48);
        else if (length <= 96) CONSUME(96);
        else if (length <= 104) CONSUME(104);
        else if (length <= 112) CONSUME(112);
        else if (length <= 120) CONSUME(120);
        else CONSUME(128);
      } else {
        if (length <= 32) CONSUME(32);
        else if (length <= 48) CONSUME(48);
        else if (!GATE && length <= 64) CONSUME(64);
        else if (length <= 72) CONSUME(72);
        else if (length <= 80) CONSUME(80);
        else if (!GATE && length <= 88) CONSUME(88);
        else CONSUME(96);
      }
#undef CONSUME
      __syncwarp();
      if ((threadIdx.x & 31) == 0) barrier_arrive(heard + (turn & 1) * 8);
    }
  }
}
