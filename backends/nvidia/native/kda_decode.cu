// One token of KDA a sequence, from its raw inputs to its result. A state [V, K] is read once and written once.
//
// `decode_each` has a block for every head of every row, `decode_wide` one of twice the threads, for few of them, and
// `decode_few` a pair of blocks, half a state each, for the fewest: that much less comes to and from one multiprocessor.
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


// A head of one row by a pair of blocks. Each mixes all of the inputs and has half of the rows of the state. Every warp tells both
// blocks the sum of its results' squares; by then its block has read the history, which the first writes once it has heard them all.
//
// What lies between the wait and the result is the time of the whole: every address is computed before it.
extern "C" __global__ void CLUSTER(2) __launch_bounds__(THREADS) decode_few(const Arguments a) {
  constexpr int HALF = D / 2, ROWS = HALF * 8 / THREADS, WARPS = THREADS / 32;
  __shared__ __align__(16) float token[4 * D];
  __shared__ __align__(16) float squares[2 * WARPS];
  __shared__ uint64_t told;
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, row = warp * 4 * ROWS + lane / 8, j = lane % 8, me = rank();
  const int h = blockIdx.x / 2, n = blockIdx.y;
  if (t == 0) {
    make_barrier(address(&told));
    expect_bytes(address(&told), sizeof squares);
  }
  arrive_in_cluster();
  const int* slot_at = a.slots + n;
  const int guess = peek(slot_at);
  const long long first = guess > 0 && guess < a.places ? guess : 0;
  // Of what `Inputs` has. Threads of the gate read the norm's weights in place of what it has not.
  void *words_at[5], *taps_at[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words_at[i] = taps_at[i] = (void*)a.norm;
  auto word = [&](int i, const void* from) { words_at[i] = (void*)from; };
  Inputs::weights(a, h, [&](int i, const void* from) { taps_at[i] = (void*)from; }, word);
  Inputs::activations(a, n, h, first, word);
  // Of eight lanes each of the first `ROWS` ends with one row's result.
  const int mine = j % ROWS, c = h * D + me * HALF + row + 4 * mine;
  const uint16_t *strength_at = a.beta + n * a.beta_stride + h, *gate_at = a.out_gate + n * a.out_gate_stride + c;
  const float* norm_at = a.norm + c % D;
  uint16_t* to = a.out + (long long)n * a.heads * D + c;
  float4* tile = (float4*)(a.state + first * a.state_stride + ((long long)h * D + me * HALF + row) * D) + j;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (lane % 16 == 0) expect_soon(taps_at[i]);
    if (lane == 0) expect_soon(words_at[i]);
    computed(words_at[i]), computed(taps_at[i]);
  }
  if (t == 0) {
    expect_soon(tile, HALF * D * 4);
    expect_soon(strength_at);
    expect_soon(gate_at);
    expect_soon(norm_at);
  }
  computed(slot_at), computed(strength_at), computed(gate_at), computed(norm_at), computed(to), computed(tile);
  wait_for_cluster();  // The other block runs, and its barrier expects numbers.
  wait_for_the_kernel_before();
  // Not earlier, or the blocks of many kernels wait at once: 3.36 us in place of 2.75 for 12 heads of two rows.
  let_the_next_kernel_start();
  const int slot = peek(slot_at);
  uint32_t words[5] = {};
  float4 s[ROWS][4];
  Inputs inputs;
  auto take_words = [&] {
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = load(words_at[i]);
  };
  auto take_state = [&] {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[r][i] = load4(tile + 4 * r * (D / 4) + i * 8);
  };
  take_words();
#pragma unroll
  for (int i = 0; i < 4; i++) inputs.taps[i] = load2(taps_at[i]);
  const float norm = __uint_as_float(load(norm_at));
  const uint16_t strength = load_half(strength_at), gate = load_half(gate_at);
  take_state();
  if (slot != first) {
    tile += (slot - first) * a.state_stride / 4;
    if (t < 192)
#pragma unroll
      for (int i = 1; i < 4; i++) words_at[i] = (uint16_t*)words_at[i] + (slot - first) * a.conv_stride;
    take_words();
    take_state();
  }
  if (slot == 0) {
    if (j < ROWS) store(to, (uint16_t)0);
    return;
  }
  inputs.set(words);
  inputs.mix(a, token);
  __syncthreads();
  Token now;
  now.take(token, j);
  float v[ROWS], u[ROWS], o[ROWS], square = 0, result;
#pragma unroll
  for (int r = 0; r < ROWS; r++) v[r] = token[2 * D + me * HALF + row + 4 * r];
  now.read(s, v, strength_of(strength), u, o);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    square += o[r] * o[r];
    if (r == 0 || mine == r) result = o[r];
  }
  square += __shfl_xor_sync(ALL, square, 8);
  square += __shfl_xor_sync(ALL, square, 16);
  if (lane < 2) tell(address(squares + me * WARPS + warp), lane, square, address(&told));
  __syncthreads();  // Else the state is stored first.
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    now.add(s[r], u[r]);
#pragma unroll
    for (int i = 0; i < 4; i++) store(tile + 4 * r * (D / 4) + i * 8, s[r][i]);
  }
  result *= norm * sigmoid(__uint_as_float((uint32_t)gate << 16));
  wait(address(&told), 0);
  float4 sum = {};
#pragma unroll
  for (int i = 0; i < 2 * WARPS; i += 4) {
    const float4 some = load4(address(squares + i));
    sum.x += some.x, sum.y += some.y, sum.z += some.z, sum.w += some.w;
  }
  square = (sum.x + sum.y) + (sum.z + sum.w);
  if (j < ROWS) store(to, (uint16_t)bf16_pair(result * rsqrtf(square * (1.0f / D) + a.eps), 0.0f));
  if (me == 0 && t < 192) {
    store(words_at[1], words[2]);
    store(words_at[2], words[3]);
    store(words_at[3], words[0]);
  }
}
