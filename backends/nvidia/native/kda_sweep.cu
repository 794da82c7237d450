// The states of KDA from chunk to chunk over operands in half precision (kda_operands.cu), and what chunks read of them.
//
// A block takes a whole head's state [V, K] through one segment; a warp holds 16 of its rows in registers, where the sums
// of one product are the left operand of the next. Two warpgroups multiply; four more warps bring the operands of chunks
// to come into a ring in shared memory, and normalise, gate and store what the chunk before has read. One barrier a chunk.
// Long sequences are cut into segments: `carry` finds what a segment adds to a state and, in as many warps again, what it makes
// of one; kda_join.cu the states that segments begin with.
//
// Half precision holds a state times a power of two, chosen for all of a segment: a token moves a state by at most the
// size of its correction, and decay and correction together never make it larger.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using Address = uint32_t;
#define ALL 0xffffffffu
__device__ Address address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void load(uint32_t (&r)[4], Address a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
// Products of a warpgroup: a warp's 16 rows of the left operand in registers; `right` in shared memory, N rows of 16 channels, or
// TURNED 16 rows of N.
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void gather() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ void multiplied() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
using Matrix = uint64_t;
// Blocks of 16 columns lie `side` bytes apart, 8 rows of a block 256; rows are swapped every four (see kda_operands.cu).
__device__ Matrix matrix(Address at, int side) {
  return (uint64_t)(at >> 4) | (uint64_t)(side >> 4) << 16 | (uint64_t)(256 >> 4) << 32 | (uint64_t)3 << 62;
}
#define EIGHT(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
__device__ void multiply32(float (*c)[4], const uint32_t (&a)[4], Matrix right, int more) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"(more));
}
__device__ void multiply64(float (*c)[4], const uint32_t (&a)[4], Matrix right, int more) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3), EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"(more));
}
__device__ void multiply128_turned(float (*c)[4], const uint32_t (&a)[4], Matrix right, int more) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3), EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7), EIGHT(8), EIGHT(9), EIGHT(10), EIGHT(11), EIGHT(12), EIGHT(13), EIGHT(14), EIGHT(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"(more));
}
#define PAIR_OF(NAME, KIND)                                                                             \
  __device__ uint32_t NAME(float a, float b) {                                                          \
    uint32_t r;                                                                                         \
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));                                \
    return r;                                                                                           \
  }
PAIR_OF(halves, "f16")
PAIR_OF(bf16_pair, "bf16")
__device__ float half_to_float(uint16_t x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
#define FUNCTION(NAME, KIND)                                    \
  __device__ float NAME(float x) {                              \
    float y;                                                    \
    asm(KIND ".approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));     \
    return y;                                                   \
  }
FUNCTION(exp2_of, "ex2")
FUNCTION(over, "rcp")
__device__ void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void make_barrier(Address barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
__device__ void wait(Address barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void expect(int bytes, Address barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void bring(Address to, const void* from, int bytes, Address barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void let_the_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// ----
__device__ float low(uint32_t pair) { return half_to_float((uint16_t)(pair & 0xffffu)); }
__device__ float high(uint32_t pair) { return half_to_float((uint16_t)(pair >> 16)); }
__device__ float sigmoid(float x) { return over(1.0f + exp2_of(-1.4426950408889634f * x)); }
__device__ float binade(float x) { return __uint_as_float(__float_as_uint(fmaxf(x, 7.888609052210118e-31f)) & 0x7F800000u); }

constexpr int D = 128, C = 32, STAGES = 4;
constexpr int DEPTH = 4, MATH = 256, HELP = 128, THREADS = MATH + HELP, BOTH = 2 * MATH;
constexpr float READ_SCALE = 256.0f, ROOT = 11.313708498984761f;
// A chunk's operands in bytes, as they lie in memory and in a stage: see kda_operands.cu.
constexpr int BLOCK = C * 32, AT_N = 2 * C * D * 2, AT_U = AT_N + C * D * 2, AT_M = AT_U + C * D * 2;
constexpr int AT_KEEP = AT_M + C * C * 2, AT_SIZE = AT_KEEP + D * 4, BYTES = AT_SIZE + 16;
constexpr int RECORD = (BYTES + 127) / 128 * 128, STAGE = (BYTES + 255) / 256 * 256;
constexpr int ROW = 132, RESULT = C * ROW * 4;  // What a chunk has read, [C, V] fp32.
constexpr int SHARED = STAGES * STAGE + 2 * RESULT;

struct Arguments {
  const uint8_t* operands;
  const float* sizes;
  float* state;
  const int *slots, *starts;
  const uint8_t* known;
  float *begins, *carry;
  const uint16_t* qkv;
  uint16_t* conv;
  const uint16_t* gate;
  const float* norm;
  uint16_t* out;
  long long state_stride, qkv_stride, conv_stride, gate_stride;
  int count, tokens, heads, segments, length, places;
  float eps;
};

struct Segment {
  int n, start, end, begin, until, place, chunks, slot;
};

__device__ Segment segment_of(const Arguments& a, int segment) {
  Segment s;
  s.n = segment;
  if (a.length) {
    int low = 0, high = a.count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (a.starts[middle] / a.length + middle <= segment) low = middle; else high = middle;
    }
    s.n = low;
  }
  s.start = a.starts[s.n];
  s.end = a.starts[s.n + 1];
  s.slot = a.slots[s.n];
  s.begin = s.start;
  s.until = s.end;
  if (a.length) {
    s.begin += (segment - s.start / a.length - s.n) * a.length;
    s.until = s.begin + a.length < s.end ? s.begin + a.length : s.end;
  }
  s.place = s.start / C + s.n + (s.begin - s.start) / C;
  s.chunks = (s.until - s.begin + C - 1) / C;
  return s;
}

__device__ void clear(const Arguments& a, int h, int first, int end) {
  for (int i = first + threadIdx.x / 16; i < end; i += THREADS / 16)
    *(uint4*)(a.out + ((long long)i * a.heads + h) * D + threadIdx.x % 16 * 8) = make_uint4(0, 0, 0, 0);
}

// A chunk's operands to its stage, by one thread. Without READ not Q.
template <bool READ>
__device__ void bring(const Arguments& a, Address stage, Address barrier, int place, int h) {
  const uint8_t* from = a.operands + ((long long)place * a.heads + h) * RECORD;
  expect(READ ? BYTES : BYTES - 8 * BLOCK, barrier);
  if (READ) return bring(stage, from, BYTES, barrier);
#pragma unroll
  for (int i = 0; i < 8; i++) bring(stage + 2 * i * BLOCK, from + 2 * i * BLOCK, BLOCK, barrier);
  bring(stage + AT_N, from + AT_N, BYTES - AT_N, barrier);
}

// A warp's rows of a state, `held` [16 tiles of 8 channels], through a chunk; what is read to `result`.
template <bool READ>
__device__ void advance(float (&held)[16][4], const uint8_t* memory, Address stage, float added_scale, float* result) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x % MATH / 32 * 16, row = lane % 16, unit = lane / 16;
  float sums[READ ? 8 : 4][4], more[4][4];  // [V, C]: by W, then by Q; by M.
  uint32_t u[2][4];
  // Half of the channels at a time: with all of them in flight ptxas waits for the products before it lets `held` decay.
#pragma unroll
  for (int k0 = 0; k0 < 8; k0 += DEPTH) {
    uint32_t left[DEPTH][4];
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float* x = held[2 * (k0 + k) + e / 2] + e % 2 * 2;
        left[k][e] = halves(x[0], x[1]);
      }
    fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      const Matrix right = matrix(stage + (k0 + k) * 2 * BLOCK, 2 * BLOCK);
      if (READ) multiply64(sums, left[k], right, k0 + k); else multiply32(sums, left[k], right, k0 + k);
    }
    gather();
    if (k0 + DEPTH < 8) multiplied<0>();
  }
  // Meanwhile what is to be added, and the decay.
#pragma unroll
  for (int j = 0; j < 2; j++) load(u[j], stage + AT_U + j * (D * 32) + (row0 + row) * 32 + (unit ^ row / 4 % 2) * 16);
  const float factor = *(const float*)(memory + AT_SIZE) * added_scale;
#pragma unroll
  for (int c = 0; c < 16; c++) {
    const float2 keep = *(const float2*)(memory + AT_KEEP + (c * 8 + lane % 4 * 2) * 4);
    held[c][0] *= keep.x, held[c][1] *= keep.y, held[c][2] *= keep.x, held[c][3] *= keep.y;
  }
  multiplied<0>();
  uint32_t added[2][4];  // [rows][16 tokens]
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float* x = sums[2 * j + e / 2] + e % 2 * 2;
      added[j][e] = halves(low(u[j][e]) * factor - x[0], high(u[j][e]) * factor - x[1]);
    }
  fence();
  if (READ) {
#pragma unroll
    for (int j = 0; j < 2; j++) multiply32(more, added[j], matrix(stage + AT_M + j * BLOCK, BLOCK), j);
    gather();
  }
#pragma unroll
  for (int j = 0; j < 2; j++) multiply128_turned(held, added[j], matrix(stage + AT_N + j * 512, BLOCK), 1);
  gather();
  if (READ) {
    multiplied<1>();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        result[(i * 8 + lane % 4 * 2 + e % 2) * ROW + row0 + e / 2 * 8 + lane / 4] = sums[(READ ? 4 : 0) + i][e] + more[i][e];
  }
  multiplied<0>();
  have_read();
}

// Where a thread's values lie in a state: two channels at a time.
#define EACH_PAIR(...)                                                                             \
  _Pragma("unroll") for (int c = 0; c < 16; c++) _Pragma("unroll") for (int e = 0; e < 2; e++) {   \
    const int at = (row0 + e * 8 + lane / 4) * D + c * 8 + lane % 4 * 2;                           \
    float &x = held[c][2 * e], &y = held[c][2 * e + 1];                                            \
    __VA_ARGS__                                                                                    \
  }

template <int COUNT> __device__ float sum_of_sizes(const Arguments& a, const Segment& s, int h, float* shared) {
  float total = 0;
  for (int i = threadIdx.x; i < s.chunks; i += COUNT) total += a.sizes[(long long)h * a.places + s.place + i];
#pragma unroll
  for (int d = 16; d; d /= 2) total += __shfl_xor_sync(ALL, total, d);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
  __syncthreads();
  total = 0;
  for (int i = 0; i < COUNT / 32; i++) total += shared[i];
  return total;
}

// The last three raw inputs of a head's channels to the history, what it held included.
__device__ void move_history(const Arguments& a, const Segment& s, int h, bool has, int t) {
  for (int i = t; i < 3 * D; i += HELP) {
    const int channels = 3 * a.heads * D, channel = (i / D * a.heads + h) * D + i % D;
    uint16_t* past = a.conv + (long long)s.slot * a.conv_stride + channel;
    uint16_t x[3];
    for (int j = 0; j < 3; j++) {
      const int token = s.end - 3 + j;
      x[j] = token >= s.start ? a.qkv[token * a.qkv_stride + channel] : has ? past[(token - s.start + 3) * channels] : 0;
    }
    for (int j = 0; j < 3; j++) past[j * channels] = x[j];
  }
}

__device__ float most(const float* peaks) {
  float peak = peaks[0];
#pragma unroll
  for (int i = 1; i < MATH / 32; i++) peak = fmaxf(peak, peaks[i]);
  return peak;
}

// Eight tokens a warp, four channels a lane. A condition a token would keep the next one waiting.
struct Ending {
  uint2 gates[8];
  float4 norm;
  __device__ void take(const Arguments& a, const Segment& s, int h, int chunk) {
    const int lane = threadIdx.x % 32, first = s.begin + chunk * C + threadIdx.x / 32 % 4 * 8;
    const uint16_t* from = a.gate + first * a.gate_stride + h * D + lane * 4;
    if (first + 8 <= s.until) {
#pragma unroll
      for (int i = 0; i < 8; i++) gates[i] = *(const uint2*)(from + i * a.gate_stride);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (first + i < s.until) gates[i] = *(const uint2*)(from + i * a.gate_stride);
    }
  }
  __device__ void end(const Arguments& a, const Segment& s, int h, int chunk, const float* result, float scale) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 8, first = s.begin + chunk * C + row;
    float4 x[8];
    float sums[8];
    uint2 y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x[i] = *(const float4*)(result + (row + i) * ROW + lane * 4);
      x[i].x *= scale, x[i].y *= scale, x[i].z *= scale, x[i].w *= scale;
      sums[i] = x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    }
#pragma unroll
    for (int d = 16; d; d /= 2)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] += __shfl_xor_sync(ALL, sums[i], d);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float r = rsqrtf(sums[i] * (1.0f / D) + a.eps);
      x[i].x *= r * norm.x * sigmoid(__uint_as_float(gates[i].x << 16));
      x[i].y *= r * norm.y * sigmoid(__uint_as_float(gates[i].x & 0xffff0000u));
      x[i].z *= r * norm.z * sigmoid(__uint_as_float(gates[i].y << 16));
      x[i].w *= r * norm.w * sigmoid(__uint_as_float(gates[i].y & 0xffff0000u));
      y[i] = make_uint2(bf16_pair(x[i].x, x[i].y), bf16_pair(x[i].z, x[i].w));
    }
    uint16_t* to = a.out + ((long long)first * a.heads + h) * D + lane * 4;
    if (first + 8 <= s.until) {
#pragma unroll
      for (int i = 0; i < 8; i++) *(uint2*)(to + (long long)i * a.heads * D) = y[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (first + i < s.until) *(uint2*)(to + (long long)i * a.heads * D) = y[i];
    }
  }
};

#define MAKE_BARRIERS                                                              \
  __shared__ uint64_t barriers[STAGES];                                            \
  if (threadIdx.x == 0)                                                            \
    for (int i = 0; i < STAGES; i++) make_barrier(address(barriers + i));          \
  __syncthreads();
#define BARRIER(i) address(barriers + (i) % STAGES)

// One segment of one head from its first state to the results, and to the slot at the sequence's end. What comes after
// the last sequence is padding.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sweep(const Arguments a) {
  extern __shared__ __align__(256) uint8_t memory[];
  __shared__ float sums[THREADS / 32], peaks[MATH / 32];
  const int h = blockIdx.x, segment = blockIdx.y, t = threadIdx.x % HELP, lane = threadIdx.x % 32;
  const int row0 = threadIdx.x % MATH / 32 * 16;
  wait_for_the_kernel_before();
  if (segment == a.segments) return clear(a, h, a.starts[a.count], a.tokens);
  const Segment s = segment_of(a, segment);
  if (s.begin >= s.until) return;
  if (s.slot == 0) return clear(a, h, s.begin, s.until);
  const Address ring = address(memory);
  MAKE_BARRIERS
  float* results = (float*)(memory + STAGES * STAGE);
  const bool has = a.known[s.n], multiplies = threadIdx.x < MATH;
  float* own = a.state + (long long)s.slot * a.state_stride + (long long)h * D * D;
  const bool cut = a.length && s.end - s.start > a.length;
  const float* from = cut ? a.begins + ((long long)segment * a.heads + h) * D * D : own;
  const float total = sum_of_sizes<THREADS>(a, s, h, sums);
  if (multiplies) {
    float held[16][4], peak = 0;
    EACH_PAIR({
      const float2 v = cut || has ? *(const float2*)(from + at) : make_float2(0, 0);
      x = v.x, y = v.y;
      peak = fmaxf(peak, fmaxf(fabsf(x), fabsf(y)));
    })
#pragma unroll
    for (int d = 16; d; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, d));
    if (lane == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
    peak = most(peaks);
    const float scale = 16384.0f / binade(D * peak + 2 * C * total);
    EACH_PAIR({ x *= scale, y *= scale; })
    for (int i = 0; i < s.chunks; i++) {
      __syncthreads();
      wait(BARRIER(i), i / STAGES % 2);
      const int stage = i % STAGES * STAGE;
      advance<true>(held, memory + stage, ring + stage, scale * (1 / READ_SCALE), results + i % 2 * (RESULT / 4));
    }
    __syncthreads();
    const float back = 1.0f / scale;
    if (s.until == s.end) EACH_PAIR({ *(float2*)(own + at) = make_float2(x * back, y * back); })
  } else {
    if (t == 0)
      for (int i = 0; i < STAGES - 1 && i < s.chunks; i++) bring<true>(a, ring + i * STAGE, BARRIER(i), s.place + i, h);
    if (s.until == s.end) move_history(a, s, h, has, t);
    // Gates come two chunks ahead: a chunk takes less time than what lies in memory needs.
    Ending even, odd;
    even.norm = odd.norm = *(const float4*)(a.norm + lane * 4);
    even.take(a, s, h, 0);
    odd.take(a, s, h, 1);
    __syncthreads();
    const float peak = most(peaks);
    const float scale = 1.0f / (ROOT * READ_SCALE * (16384.0f / binade(D * peak + 2 * C * total)));
    // The chunk before the i-th ends while the i-th is multiplied.
    auto go = [&](int i, Ending& before) {
      __syncthreads();
      const int next = i + STAGES - 1;
      if (t == 0 && next < s.chunks) bring<true>(a, ring + next % STAGES * STAGE, BARRIER(next), s.place + next, h);
      if (i == 0) return;
      before.end(a, s, h, i - 1, results + (i - 1) % 2 * (RESULT / 4), scale);
      before.take(a, s, h, i + 1);
    };
    for (int i = 0; i < s.chunks; i += 2) {
      go(i, odd);
      if (i + 1 < s.chunks) go(i + 1, even);
    }
    __syncthreads();
    const int last = s.chunks - 1;
    if (last % 2) odd.end(a, s, h, last, results + RESULT / 4, scale); else even.end(a, s, h, last, results, scale);
  }
}

// One segment of one head, but for the last of its sequence: from zero, and from the unit matrix without corrections.
extern "C" __global__ void __launch_bounds__(BOTH, 1) carry(const Arguments a) {
  extern __shared__ __align__(256) uint8_t memory[];
  __shared__ float sums[BOTH / 32];
  const int h = blockIdx.x, segment = blockIdx.y, part = threadIdx.x / MATH, lane = threadIdx.x % 32;
  const int row0 = threadIdx.x % MATH / 32 * 16;
  wait_for_the_kernel_before();
  let_the_next_kernel_start();
  const Segment s = segment_of(a, segment);
  if (s.begin >= s.until || s.until == s.end || s.slot == 0) return;
  const Address ring = address(memory);
  MAKE_BARRIERS
  const float total = sum_of_sizes<BOTH>(a, s, h, sums);
  const float scale = 16384.0f / (part ? (float)D : binade(2 * C * total)), back = 1.0f / scale;
  float held[16][4];
  EACH_PAIR({
    const int row = at / D;
    const int channel = at % D;
    x = part && row == channel ? scale : 0.0f;
    y = part && row == channel + 1 ? scale : 0.0f;
  })
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES - 1 && i < s.chunks; i++) bring<false>(a, ring + i * STAGE, BARRIER(i), s.place + i, h);
  for (int i = 0; i < s.chunks; i++) {
    __syncthreads();
    const int next = i + STAGES - 1, stage = i % STAGES * STAGE;
    if (threadIdx.x == 0 && next < s.chunks)
      bring<false>(a, ring + next % STAGES * STAGE, BARRIER(next), s.place + next, h);
    wait(BARRIER(i), i / STAGES % 2);
    advance<false>(held, memory + stage, ring + stage, part ? 0.0f : scale * (1 / READ_SCALE), nullptr);
  }
  float* to = a.carry + ((long long)segment * a.heads + h) * 2 * D * D + part * D * D;
  EACH_PAIR({ *(float2*)(to + at) = make_float2(x * back, y * back); })
}
