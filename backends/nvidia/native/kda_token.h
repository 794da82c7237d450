// One token of KDA for decoding: instructions, a head's inputs on their way, and the step of rows of a state.
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
__device__ void expect_bytes(Address barrier, int bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void bring(Address to, const void* from, int bytes, Address barrier) {
  expect_bytes(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// What this thread has read of shared memory is read before a bulk copy may overwrite it: see attn_res_mix.cu.
__device__ void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The blocks of a pair, and what each is told: numbers, which its barrier expects.
__device__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ int rank() {
  int r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ void tell(Address to, int block, float x, Address barrier) {
  asm volatile("{\n.reg .b32 there, told;\nmapa.shared::cluster.u32 there, %0, %1;\nmapa.shared::cluster.u32 told, %2, %1;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [told];\n}"
      ::"r"(to), "r"(block), "r"(barrier), "f"(x) : "memory");
}
#define CLUSTER(N) __cluster_dims__(N, 1, 1)
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
// Loads and stores that stay where they are written, and an address that is computed before what comes next.
__device__ float4 load4(const void* from) {
  float4 x;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
  return x;
}
__device__ float2 load2(const void* from) {
  float2 x;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
  return x;
}
__device__ uint32_t load(const void* from) {
  uint32_t x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ uint16_t load_half(const void* from) {
  uint16_t x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
  return x;
}
__device__ float4 load4(Address from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
  return x;
}
__device__ void store(void* to, const float4& x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ void store(void* to, uint32_t x) { asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }
__device__ void store(void* to, uint16_t x) { asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory"); }
template <typename T> __device__ void computed(T*& p) { asm volatile("" : "+l"(p)); }
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
  int heads, rows, bounded, places, resident;
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

  // The convolution with SiLU, rounded, and the decay: to `to`, which has q, k, v and the decay. `place` is the pair of channels.
  __device__ void mix(const Arguments& a, float* to) const { mix(a, to, threadIdx.x); }
  __device__ void mix(const Arguments& a, float* to, int place) const {
    float2 y = pair_of(x);
    if (place < 192) {
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
    *(float2*)(to + place * 2) = y;
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

// A lane's 16 channels of the key, the query and the decay. Key and query are as they came: what normalises them are factors of
// what is read with them.
struct Token {
  float4 k[4], q[4], d[4];
  float kq, ks, qs;

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
    ks = rsqrtf(kk + 1e-6f), qs = rsqrtf(qq + 1e-6f) * 0.08838834764831845f;
  }

  // `ROWS` rows of a state decayed, how many keys are to be added to each, and what is read of them then.
  template <int ROWS>
  __device__ void read(float4 (&s)[ROWS][4], const float (&v)[ROWS], float beta, float (&u)[ROWS], float (&o)[ROWS]) const {
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
      u[r] = beta * ks * (v[r] - sums[r] * ks);
      o[r] = (reads[r] + u[r] * kq) * qs;
    }
  }

  __device__ void add(float4 (&s)[4], float u) const {
#pragma unroll
    for (int i = 0; i < 4; i++) s[i].x += u * k[i].x, s[i].y += u * k[i].y, s[i].z += u * k[i].z, s[i].w += u * k[i].w;
  }
};

__device__ uint32_t normed(const float* o, float square, float eps, float2 norm, uint32_t gate) {
  const float scale = 1.0f / sqrtf(square * (1.0f / D) + eps);
  const float2 g = pair_of(gate);
  return bf16_pair(o[0] * scale * norm.x * sigmoid(g.x), o[1] * scale * norm.y * sigmoid(g.y));
}
