// One token of KDA a sequence, from its raw inputs to its result. A state [V, K] is read once and written once.
//
// `decode_each` has a block for every head of every row, `decode_wide` one of twice the threads, for few of them. Of
// `decode` two blocks a multiprocessor take one head of one row after the other, 64 rows of a state at a time, with the
// next ones on their way into a ring in shared memory, and the next head's inputs beside it.
//
// A block starts while the kernel before still runs. Until that has ended it may read nothing for good, for it may write
// anything; but what it will most likely read it sends for, as far as the second-level cache, where writes are seen.
//
// In all, eight lanes share a row of the state, 16 channels each: four times four, 32 apart.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using Address = uint32_t;
#define ALL 0xffffffffu
__device__ Address address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ uint32_t bf16_pair(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ float over(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ void make_barrier(Address barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
__device__ void wait(Address barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void arrive(Address barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
__device__ void bring(Address to, const void* from, int bytes, Address barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// What this thread has read of shared memory is read before a bulk copy may overwrite it: see attn_res_mix.cu.
__device__ void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void let_the_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ void copy8(Address to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ void copy4(Address to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Not from the first-level cache, and not moved past a wait.
__device__ int peek(const int* from) {
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
  return r;
}
// Towards the second-level cache, where others' writes still reach it.
__device__ void expect_soon(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }
__device__ void expect_soon(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// ----
__device__ float2 pair_of(uint32_t bf16s) { return make_float2(__uint_as_float(bf16s << 16), __uint_as_float(bf16s & 0xffff0000u)); }
__device__ float sigmoid(float x) { return over(1.0f + exp2_of(-1.4426950408889634f * x)); }
__device__ float strength_of(uint16_t logit) { return sigmoid(__uint_as_float((uint32_t)logit << 16)); }
__device__ float dot(const float4& a, const float4& b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

constexpr int D = 128, THREADS = 256, STAGES = 3, PART = 64, PARTS = D / PART, STAGE = PART * D * 4;

struct Arguments {
  const uint16_t *qkv, *raw_gate, *beta, *out_gate;
  const float *taps, *rate, *bias, *norm;
  uint16_t* conv;
  float* state;
  const int* slots;
  uint16_t* out;
  long long qkv_stride, gate_stride, beta_stride, out_gate_stride, conv_stride, state_stride;
  int heads, rows, bounded, places;
  float bound, eps;
};

// Inputs of a head on their way: every thread waits for what it brings itself, and nobody else reads it.
struct Coming {
  float2 taps[4][THREADS];
  uint32_t words[5][THREADS];
};

// What a thread needs of a head's inputs: two channels of q, k, v or the gate; of the result in the first 64.
struct Inputs {
  uint32_t x, past[3], gate;
  float2 taps[4];  // Of the gate the first is its bias.
  float rate;

  template <typename Eight, typename Four>
  __device__ static void weights(const Arguments& a, int h, Eight eight, Four four) {
    const int kind = threadIdx.x / 64, c = threadIdx.x % 64 * 2, channels = 3 * a.heads * D;
    if (kind < 3) {
#pragma unroll
      for (int i = 0; i < 4; i++) eight(i, a.taps + (long long)i * channels + (kind * a.heads + h) * D + c);
    } else {
      four(1, a.rate + h);
      eight(0, a.bias + h * D + c);
    }
  }
  template <typename Four>
  __device__ static void activations(const Arguments& a, int n, int h, long long slot, Four four) {
    const int t = threadIdx.x, kind = t / 64, c = t % 64 * 2, channels = 3 * a.heads * D, channel = (kind * a.heads + h) * D + c;
    if (kind < 3) {
      const uint16_t* history = a.conv + slot * a.conv_stride + channel;
#pragma unroll
      for (int i = 0; i < 3; i++) four(1 + i, history + i * channels);
      four(0, a.qkv + n * a.qkv_stride + channel);
    } else {
      four(0, a.raw_gate + n * a.gate_stride + h * D + c);
    }
    if (t < 64) four(4, a.out_gate + n * a.out_gate_stride + h * D + c);
  }

  __device__ static void bring(Coming& to, const Arguments& a, int n, int h, long long slot) {
    auto four = [&](int i, const void* from) { copy4(address(&to.words[i][threadIdx.x]), from); };
    weights(a, h, [&](int i, const void* from) { copy8(address(&to.taps[i][threadIdx.x]), from); }, four);
    activations(a, n, h, slot, four);
    commit();
  }
  __device__ void take(const Coming& from) {
    arrived<0>();
    uint32_t words[5];
#pragma unroll
    for (int i = 0; i < 5; i++) words[i] = from.words[i][threadIdx.x];
#pragma unroll
    for (int i = 0; i < 4; i++) taps[i] = from.taps[i][threadIdx.x];
    set(words);
  }
  __device__ void set(const uint32_t (&words)[5]) {
    x = words[0], past[0] = words[1], past[1] = words[2], past[2] = words[3], gate = words[4];
    rate = __uint_as_float(words[1]);
  }

  // The convolution with SiLU, rounded, and the decay: to `to`, which has q, k, v and the decay.
  __device__ void mix(const Arguments& a, float* to) const {
    float2 y = pair_of(x);
    if (threadIdx.x < 192) {
      const float2 x0 = pair_of(past[0]), x1 = pair_of(past[1]), x2 = pair_of(past[2]);
      y.x = x0.x * taps[0].x + x1.x * taps[1].x + x2.x * taps[2].x + y.x * taps[3].x;
      y.y = x0.y * taps[0].y + x1.y * taps[1].y + x2.y * taps[2].y + y.y * taps[3].y;
      y = pair_of(bf16_pair(y.x * sigmoid(y.x), y.y * sigmoid(y.y)));
    } else {
      y.x += taps[0].x, y.y += taps[0].y;
      if (a.bounded) {
        y.x = a.bound * sigmoid(rate * y.x), y.y = a.bound * sigmoid(rate * y.y);
      } else {
        y.x = -rate * (fmaxf(y.x, 0.0f) + log1pf(expf(-fabsf(y.x))));
        y.y = -rate * (fmaxf(y.y, 0.0f) + log1pf(expf(-fabsf(y.y))));
      }
      y.x = expf(y.x), y.y = expf(y.y);
    }
    *(float2*)(to + threadIdx.x * 2) = y;
  }

  __device__ void remember(const Arguments& a, int h, long long slot) const {
    const int t = threadIdx.x, channels = 3 * a.heads * D;
    if (t >= 192) return;
    uint16_t* history = a.conv + slot * a.conv_stride + (t / 64 * a.heads + h) * D + t % 64 * 2;
    *(uint32_t*)history = past[1];
    *(uint32_t*)(history + channels) = past[2];
    *(uint32_t*)(history + 2 * channels) = x;
  }
};

// A lane's 16 channels of the key, the query (both normalised), the decay, and how the query meets the key.
struct Token {
  float4 k[4], q[4], d[4];
  float kq;

  __device__ void take(const float* from, int j) {
    float kk = 0, qq = 0;
    kq = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      q[i] = ((const float4*)from)[i * 8 + j];
      k[i] = ((const float4*)(from + D))[i * 8 + j];
      d[i] = ((const float4*)(from + 3 * D))[i * 8 + j];
      kk += dot(k[i], k[i]), qq += dot(q[i], q[i]), kq += dot(k[i], q[i]);
    }
#pragma unroll
    for (int o = 1; o < 8; o *= 2) {
      kk += __shfl_xor_sync(ALL, kk, o);
      qq += __shfl_xor_sync(ALL, qq, o);
      kq += __shfl_xor_sync(ALL, kq, o);
    }
    const float ks = rsqrtf(kk + 1e-6f), qs = rsqrtf(qq + 1e-6f) * 0.08838834764831845f;
    kq *= ks * qs;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      k[i].x *= ks, k[i].y *= ks, k[i].z *= ks, k[i].w *= ks;
      q[i].x *= qs, q[i].y *= qs, q[i].z *= qs, q[i].w *= qs;
    }
  }

  // `ROWS` rows of a state, in place: decayed, corrected, read.
  template <int ROWS>
  __device__ void step(float4 (&s)[ROWS][4], const float (&v)[ROWS], float beta, float (&o)[ROWS]) const {
    float sums[ROWS] = {}, reads[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[r][i].x *= d[i].x, s[r][i].y *= d[i].y, s[r][i].z *= d[i].z, s[r][i].w *= d[i].w;
        sums[r] += dot(s[r][i], k[i]), reads[r] += dot(s[r][i], q[i]);
      }
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        sums[r] += __shfl_xor_sync(ALL, sums[r], d);
        reads[r] += __shfl_xor_sync(ALL, reads[r], d);
      }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float u = beta * (v[r] - sums[r]);
      o[r] = reads[r] + u * kq;
#pragma unroll
      for (int i = 0; i < 4; i++) s[r][i].x += u * k[i].x, s[r][i].y += u * k[i].y, s[r][i].z += u * k[i].z, s[r][i].w += u * k[i].w;
    }
  }
};

__device__ uint32_t normed(const float* o, float square, float eps, float2 norm, uint32_t gate) {
  const float scale = 1.0f / sqrtf(square * (1.0f / D) + eps);
  const float2 g = pair_of(gate);
  return bf16_pair(o[0] * scale * norm.x * sigmoid(g.x), o[1] * scale * norm.y * sigmoid(g.y));
}

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
      float o[2];
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
      now.step(s, v, beta, o);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int at = part * PART + row + 4 * r;
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
  float v[ROWS], o[ROWS], square = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) v[r] = token[2 * D + row + 4 * r];
  now.step(s, v, strength_of(strength), o);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
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
