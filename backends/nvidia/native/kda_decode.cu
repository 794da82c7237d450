// One token of KDA a sequence, from its raw inputs to its result. A state [V, K] is read once and written once.
//
// `decode_each` has a block for every head of every row, `decode_wide` one of twice the threads, for few of them, and
// `decode_halves` and `decode_quarters` two and four blocks for fewer still (kda_shared.h): that much less comes to and from
// one multiprocessor.
// Of `decode` two blocks a multiprocessor take one head of one row after the other, 64 rows of a state at a time, with the
// next ones on their way into a ring in shared memory, and the next head's inputs beside it.
//
// A block starts while the kernel before still runs. Until that has ended it may read nothing for good, for it may write
// anything; but what it will most likely read it sends for, as far as the second-level cache, where writes are seen.
//
// In all, eight lanes share a row of the state, 16 channels each: four times four, 32 apart.
#include "kda_token.h"

extern "C" __global__ void __launch_bounds__(THREADS, 2) decode(const Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) float token[4 * D];
  __shared__ float read[D], squares[8];
  __shared__ uint64_t barriers[STAGES];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, row = warp * 8 + lane / 8, j = lane % 8;
  const int total = a.heads * a.rows;
  const bool leads = t == 0;
  if (leads)
    for (int i = 0; i < STAGES; i++) make_barrier(address(barriers + i));
  __syncthreads();
  let_the_next_kernel_start();
  if (leads) {
    const int guess = peek(a.slots + blockIdx.x / a.heads);
    if (guess > 0 && guess < a.places)
      expect_soon(a.state + (long long)guess * a.state_stride + (long long)(blockIdx.x % a.heads) * D * D, D * D * 4);
  }
  wait_for_the_kernel_before();
  const float2 norm = *(const float2*)(a.norm + t % 64 * 2);
  auto slot_of = [&](int unit) { return unit < total ? a.slots[unit / a.heads] : 0; };
  int item = 0;
  auto ask = [&](int unit, int slot, int part, int item) {
    const Address barrier = address(barriers + item % STAGES);
    if (slot == 0) return arrive(barrier);
    const float* from = a.state + (long long)slot * a.state_stride + (long long)(unit % a.heads) * D * D + part * PART * D;
    bring(address(memory) + item % STAGES * STAGE, from, STAGE, barrier);
  };
  int unit = blockIdx.x;
  const int step = gridDim.x;
  int slot = slot_of(unit), next = slot_of(unit + step);
  if (leads) {
    ask(unit, slot, 0, 0);
    ask(unit, slot, 1, 1);
    ask(unit + step, next, 0, 2);
  }
  Coming& coming = *(Coming*)(memory + STAGES * STAGE);
  uint16_t strength = 0;
  auto bring_inputs = [&](int unit, int slot) {
    Inputs::bring(coming, a, unit / a.heads, unit % a.heads, slot);
    strength = a.beta[unit / a.heads * a.beta_stride + unit % a.heads];
  };
  if (slot) bring_inputs(unit, slot);
  for (; unit < total; unit += step) {
    const int h = unit % a.heads;
    const int after = slot_of(unit + 2 * step);
    if (slot == 0) {
      if (leads) {
        for (int part = 0; part < PARTS; part++) wait(address(barriers + (item + part) % STAGES), (item + part) / STAGES % 2);
        ask(unit + step, next, 1, item + 3);
        ask(unit + 2 * step, after, 0, item + 4);
      }
      item += PARTS;
      if (t < 64) ((uint32_t*)a.out)[(long long)unit * (D / 2) + t] = 0;
      if (next) bring_inputs(unit + step, next);
      slot = next, next = after;
      continue;
    }
    uint32_t gate;
    {
      Inputs inputs;
      inputs.take(coming);
      inputs.mix(a, token);
      inputs.remember(a, h, slot);
      gate = inputs.gate;
    }
    const float beta = strength_of(strength);
    __syncthreads();
    if (next) bring_inputs(unit + step, next);
    Token now;
    now.take(token, j);
    float square = 0;
    float4* tile = (float4*)(a.state + (long long)slot * a.state_stride + (long long)h * D * D);
#pragma unroll 1
    for (int part = 0; part < PARTS; part++, item++) {
      float4 s[2][4];
      float u[2], o[2];
      wait(address(barriers + item % STAGES), item / STAGES % 2);
      const float4* from = (const float4*)(memory + item % STAGES * STAGE);
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[r][i] = from[(row + 4 * r) * (D / 4) + i * 8 + j];
      have_read();
      __syncthreads();
      if (leads) {
        if (part == 0) ask(unit + step, next, 1, item + 3); else ask(unit + 2 * step, after, 0, item + 3);
      }
      const float v[2] = {token[2 * D + part * PART + row], token[2 * D + part * PART + row + 4]};
      now.read(s, v, beta, u, o);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int at = part * PART + row + 4 * r;
        now.add(s[r], u[r]);
#pragma unroll
        for (int i = 0; i < 4; i++) tile[at * (D / 4) + i * 8 + j] = s[r][i];
        square += o[r] * o[r];
        if (j == 0) read[at] = o[r];
      }
    }
    square += __shfl_xor_sync(ALL, square, 8);
    square += __shfl_xor_sync(ALL, square, 16);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    if (t < 64) {
      square = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) square += squares[i];
      ((uint32_t*)a.out)[(long long)unit * (D / 2) + t] = normed(read + t * 2, square, a.eps, norm, gate);
    }
    slot = next, next = after;
  }
}

constexpr int LATER = 3000;  // In ns, about half of what a block takes.

// A head of one row by a block of 1024 / ROWS threads: eight lanes have ROWS rows of the state.
template <int ROWS>
__device__ void whole(const Arguments& a) {
  constexpr int WARPS = 32 / ROWS;
  __shared__ __align__(16) float token[4 * D];
  __shared__ float read[D], squares[WARPS];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, row = warp * 4 * ROWS + lane / 8, j = lane % 8;
  const int h = blockIdx.x, n = blockIdx.y, c = t % 64 * 2;
  const bool mixes = ROWS == 4 || t < 256;
  let_the_next_kernel_start();
  const int guess = peek(a.slots + n);
  const bool likely = guess > 0 && guess < a.places;
  const long long first = likely ? guess : 0;
  Inputs inputs;
  uint32_t words[5] = {};
  auto four = [&](int i, const void* from) { words[i] = *(const uint32_t*)from; };
  if (likely) {
    auto soon = [](int, const void* from) { expect_soon(from); };
    if (t % 64 == 0 && t < 256)
      expect_soon(a.state + first * a.state_stride + ((long long)h * D + t / 64 * 32) * D, 32 * D * 4);
    if (t % 32 == 0 && mixes) Inputs::activations(a, n, h, first, soon);
    if (t % 16 == 0 && mixes) Inputs::weights(a, h, soon, soon);
    if (t == 32) expect_soon(a.beta + n * a.beta_stride + h);
  }
  wait_for_the_kernel_before();
  // Of the blocks that begin together the second of each multiprocessor begins later, or all would read, and then all write.
  const int unit = n * a.heads + h;
  if (ROWS == 4 && a.resident < a.heads * a.rows && unit >= a.resident / 2 && unit < a.resident) __nanosleep(LATER);
  const int slot = peek(a.slots + n);
  uint32_t* to = (uint32_t*)(a.out + ((long long)n * a.heads + h) * D);
  float4 s[ROWS][4];
  auto take = [&](long long slot) {
    const float4* tile = (const float4*)(a.state + slot * a.state_stride + (long long)h * D * D);
    if (mixes) Inputs::activations(a, n, h, slot, four);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[r][i] = tile[(row + 4 * r) * (D / 4) + i * 8 + j];
  };
  if (mixes) Inputs::weights(a, h, [&](int i, const void* from) { inputs.taps[i] = *(const float2*)from; }, four);
  const float2 norm = *(const float2*)(a.norm + c);
  const uint16_t strength = a.beta[n * a.beta_stride + h];
  take(first);
  if (slot != first) take(slot);
  if (slot == 0) {
    if (t < 64) to[t] = 0;
    return;
  }
  float4* tile = (float4*)(a.state + (long long)slot * a.state_stride + (long long)h * D * D);
  inputs.set(words);
  if (mixes) {
    inputs.mix(a, token);
    inputs.remember(a, h, slot);
  }
  __syncthreads();
  Token now;
  now.take(token, j);
  float v[ROWS], u[ROWS], o[ROWS], square = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) v[r] = token[2 * D + row + 4 * r];
  now.read(s, v, strength_of(strength), u, o);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    now.add(s[r], u[r]);
#pragma unroll
    for (int i = 0; i < 4; i++) tile[(row + 4 * r) * (D / 4) + i * 8 + j] = s[r][i];
    square += o[r] * o[r];
    if (j == 0) read[row + 4 * r] = o[r];
  }
  square += __shfl_xor_sync(ALL, square, 8);
  square += __shfl_xor_sync(ALL, square, 16);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  if (t < 64) {
    square = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) square += squares[i];
    to[t] = normed(read + c, square, a.eps, norm, inputs.gate);
  }
}
extern "C" __global__ void __launch_bounds__(256, 2) decode_each(const Arguments a) { whole<4>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) decode_wide(const Arguments a) { whole<2>(a); }

#include "kda_shared.h"
extern "C" __global__ void CLUSTER(4) __launch_bounds__(128) decode_quarters(const Arguments a) { by_cluster<4, 128>(a); }
extern "C" __global__ void CLUSTER(2) __launch_bounds__(256) decode_halves(const Arguments a) { by_cluster<2, 256>(a); }
