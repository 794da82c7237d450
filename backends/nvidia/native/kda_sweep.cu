// The states of KDA from chunk to chunk over operands in half precision (kda_operands.cu), and what chunks read of them.
//
// A block takes a whole head's state [V, K] through one segment; a warp holds 32 of its rows in registers (16 where TILES
// is 1), where the sums of one product are the left operand of the next. Four warps (or eight) multiply; four bring the operands of chunks to come
// into a ring in shared memory, and normalise, gate and store what the chunk before has read. One barrier a chunk.
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
#ifndef TILES
#define TILES 2  // Tiles of 16 rows a warp.
#endif
#ifndef PACKED
#define PACKED 0  // A chunk's operands lie one after the other, in the order of a stage, and come in a single copy.
#endif
__device__ Address address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void load(uint32_t (&r)[4], Address a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ void load_turned(uint32_t (&r)[4], Address a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
__device__ void copy16(Address to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ void copy4(Address to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ void make_barrier(Address barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
__device__ void wait(Address barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void bring(Address to, const void* from, int bytes, Address barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// ----
__device__ float low(uint32_t pair) { return half_to_float((uint16_t)(pair & 0xffffu)); }
__device__ float high(uint32_t pair) { return half_to_float((uint16_t)(pair >> 16)); }
__device__ float sigmoid(float x) { return over(1.0f + exp2_of(-1.4426950408889634f * x)); }
__device__ float binade(float x) { return __uint_as_float(__float_as_uint(fmaxf(x, 7.888609052210118e-31f)) & 0x7F800000u); }

constexpr int D = 128, C = 32, STAGES = 4;
constexpr int ROWS = TILES * 16, MATH = D / ROWS * 32, HELP = 128, THREADS = MATH + HELP, BOTH = 2 * MATH;
constexpr float READ_SCALE = 256.0f, ROOT = 11.313708498984761f;
#if PACKED
// A stage in bytes, as it lies in memory: units of 16 bytes are swapped within a row, so that eight meet no bank twice.
constexpr int WIDE = 256, NARROW = 64, TILE = C * WIDE;
#define SWAP_WIDE(unit, row) (((unit) ^ (row) % 8) * 16)
#define SWAP_NARROW(unit, row) (((unit) ^ (row) / 2 % 4) * 16)
#else
// A stage in bytes: rows of 256 bytes are kept 272 apart, those of 64 bytes 80, so that eight of them meet no bank twice.
constexpr int WIDE = 272, NARROW = 80, TILE = C * WIDE;
#endif
constexpr int AT_W = 0, AT_N = TILE, AT_U = 2 * TILE, AT_KEEP = AT_U + D * NARROW, AT_SIZE = AT_KEEP + D * 4;
constexpr int AT_Q = AT_SIZE + 16, AT_M = AT_Q + TILE, STAGE = AT_M + C * NARROW;
constexpr int ROW = 132, RESULT = C * ROW * 4;  // What a chunk has read, [C, V] fp32.
constexpr int SHARED = STAGES * STAGE + 2 * RESULT;

struct Arguments {
  const uint16_t *w, *u, *q, *n, *m;
  const float *keep, *sizes;
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

// A chunk's operands to its stage, by `COUNT` threads. Without READ neither Q nor M.
template <bool READ, int COUNT>
__device__ void bring(const Arguments& a, Address stage, Address barrier, int place, int h, int t) {
  const long long chunk = (long long)place * a.heads + h;
#if PACKED
  if (t == 0) bring(stage, (const uint8_t*)a.w + chunk * STAGE, READ ? STAGE : AT_Q, barrier);
#else
  const uint8_t *w = (const uint8_t*)(a.w + chunk * C * D), *n = (const uint8_t*)(a.n + chunk * C * D);
  const uint8_t *u = (const uint8_t*)(a.u + chunk * C * D), *q = (const uint8_t*)(a.q + chunk * C * D);
#pragma unroll
  for (int i = 0; i < C * 16 / COUNT; i++) {
    const int piece = i * COUNT + t, wide = piece / 16 * WIDE + piece % 16 * 16;
    copy16(stage + AT_W + wide, w + piece * 16);
    copy16(stage + AT_N + wide, n + piece * 16);
    copy16(stage + AT_U + piece / 4 * NARROW + piece % 4 * 16, u + piece * 16);
    if (READ) copy16(stage + AT_Q + wide, q + piece * 16);
  }
  if (READ) copy16(stage + AT_M + t / 4 * NARROW + t % 4 * 16, (const uint8_t*)(a.m + chunk * C * C) + t * 16);
  if (t < 32) copy16(stage + AT_KEEP + t * 16, a.keep + chunk * D + t * 4);
  if (t == 32) copy4(stage + AT_SIZE, a.sizes + (long long)h * a.places + place);
#endif
}

// A warp's rows of a state, `held` [tiles of 16 rows][16 tiles of 8 channels], through a chunk; what is read to `result`.
template <bool READ>
__device__ void advance(float (&held)[TILES][16][4], const uint8_t* memory, Address stage, float added_scale, float* result) {
  const int lane = threadIdx.x % 32, row0 = threadIdx.x % MATH / 32 * ROWS;
  const int r8 = lane % 8, odd = lane / 8 % 2 * 8, late = lane / 16 * 8;
  // Tiles: rows 0 and channels 0, 8; rows 8 and the same.
#if PACKED
#define AT_ROWS(at, j, k) (stage + (at) + (j) * 16 * WIDE + (((late + r8) * WIDE + SWAP_WIDE(odd / 8, r8)) ^ (k) * 32))
#define AT_TURNED(j, c) (stage + AT_N + (j) * 16 * WIDE + (((odd + r8) * WIDE + SWAP_WIDE(late / 8, r8)) ^ (c) * 32))
#define AT_NARROW(at, row, unit, j) (stage + (at) + (row) * NARROW + (SWAP_NARROW(unit, r8) ^ (j) * 32))
#else
  const Address plain = stage + (late + r8) * WIDE + odd * 2;
#define AT_ROWS(at, j, k) (plain + (at) + (j) * 16 * WIDE + (k) * 32)
#define AT_TURNED(j, c) (stage + AT_N + ((j) * 16 + odd + r8) * WIDE + ((c) * 16 + late) * 2)
#define AT_NARROW(at, row, unit, j) (stage + (at) + (row) * NARROW + ((j) * 16 + (unit) * 8) * 2)
#endif
  float added[TILES][4][4] = {}, read[TILES][4][4] = {};
#pragma unroll
  for (int k = 0; k < 8; k++) {
    uint32_t left[TILES][4];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      left[m][0] = halves(held[m][2 * k][0], held[m][2 * k][1]);
      left[m][1] = halves(held[m][2 * k][2], held[m][2 * k][3]);
      left[m][2] = halves(held[m][2 * k + 1][0], held[m][2 * k + 1][1]);
      left[m][3] = halves(held[m][2 * k + 1][2], held[m][2 * k + 1][3]);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t right[4];
      load(right, AT_ROWS(AT_W, j, k));
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        multiply(added[m][2 * j], left[m], right[0], right[1]);
        multiply(added[m][2 * j + 1], left[m], right[2], right[3]);
      }
      if (READ) {
        load(right, AT_ROWS(AT_Q, j, k));
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          multiply(read[m][2 * j], left[m], right[0], right[1]);
          multiply(read[m][2 * j + 1], left[m], right[2], right[3]);
        }
      }
    }
  }
  const float factor = *(const float*)(memory + AT_SIZE) * added_scale;
  uint32_t left[TILES][2][4];  // [rows][16 tokens]
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t u[4];
      load(u, AT_NARROW(AT_U, row0 + m * 16 + odd + r8, late / 8, j));
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float* x = added[m][2 * j + e / 2] + e % 2 * 2;
        left[m][j][e] = halves(low(u[e]) * factor - x[0], high(u[e]) * factor - x[1]);
      }
    }
  if (READ) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j <= i; j++) {  // No token reads what a later block of tokens adds.
        uint32_t right[4];
        load(right, AT_NARROW(AT_M, i * 16 + late + r8, odd / 8, j));
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          multiply(read[m][2 * i], left[m][j], right[0], right[1]);
          multiply(read[m][2 * i + 1], left[m][j], right[2], right[3]);
        }
      }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          result[(i * 8 + lane % 4 * 2 + e % 2) * ROW + row0 + m * 16 + e / 2 * 8 + lane / 4] = read[m][i][e];
  }
#pragma unroll
  for (int c = 0; c < 8; c++) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const float2 keep = *(const float2*)(memory + AT_KEEP + ((2 * c + b) * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        held[m][2 * c + b][0] *= keep.x;
        held[m][2 * c + b][1] *= keep.y;
        held[m][2 * c + b][2] *= keep.x;
        held[m][2 * c + b][3] *= keep.y;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t right[4];
      load_turned(right, AT_TURNED(j, c));
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        multiply(held[m][2 * c], left[m][j], right[0], right[1]);
        multiply(held[m][2 * c + 1], left[m][j], right[2], right[3]);
      }
    }
  }
}

// Where a thread's values of 32 rows lie in a state: two channels at a time.
#define EACH_PAIR(...)                                                                         \
  _Pragma("unroll") for (int m = 0; m < TILES; m++) _Pragma("unroll") for (int c = 0; c < 16; c++) \
      _Pragma("unroll") for (int e = 0; e < 2; e++) {                                          \
    const int at = (row0 + m * 16 + e * 8 + lane / 4) * D + c * 8 + lane % 4 * 2;              \
    float &x = held[m][c][2 * e], &y = held[m][c][2 * e + 1];                                  \
    __VA_ARGS__                                                                                \
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
  const float peak = fmaxf(fmaxf(peaks[0], peaks[1]), fmaxf(peaks[2], peaks[3]));
  return MATH == HELP ? peak : fmaxf(peak, fmaxf(fmaxf(peaks[4], peaks[5]), fmaxf(peaks[6], peaks[7])));
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

#if PACKED
#define MAKE_BARRIERS                                                              \
  __shared__ uint64_t barriers[STAGES];                                            \
  if (threadIdx.x == 0)                                                            \
    for (int i = 0; i < STAGES; i++) make_barrier(address(barriers + i));          \
  __syncthreads();
#define BARRIER(i) address(barriers + (i) % STAGES)
#define COMMIT
#define ARRIVED
#define WAIT(i) wait(BARRIER(i), (i) / STAGES % 2);
#else
#define MAKE_BARRIERS
#define BARRIER(i) 0
#define COMMIT commit();
#define ARRIVED arrived<STAGES - 2>();
#define WAIT(i)
#endif

// One segment of one head from its first state to the results, and to the slot at the sequence's end. What comes after
// the last sequence is padding.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sweep(const Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[THREADS / 32], peaks[8];
  const int h = blockIdx.x, segment = blockIdx.y, t = threadIdx.x % HELP, lane = threadIdx.x % 32;
  const int row0 = threadIdx.x % MATH / 32 * ROWS;
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
    float held[TILES][16][4], peak = 0;
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
      WAIT(i)
      const int stage = i % STAGES * STAGE;
      advance<true>(held, memory + stage, ring + stage, scale * (1 / READ_SCALE), results + i % 2 * (RESULT / 4));
    }
    __syncthreads();
    const float back = 1.0f / scale;
    if (s.until == s.end) EACH_PAIR({ *(float2*)(own + at) = make_float2(x * back, y * back); })
  } else {
    for (int i = 0; i < STAGES - 1; i++) {
      if (i < s.chunks) bring<true, HELP>(a, ring + i * STAGE, BARRIER(i), s.place + i, h, t);
      COMMIT
    }
    if (s.until == s.end) move_history(a, s, h, has, t);
    Ending ending;
    ending.norm = *(const float4*)(a.norm + lane * 4);
    ending.take(a, s, h, 0);
    __syncthreads();
    const float peak = most(peaks);
    const float scale = 1.0f / (ROOT * READ_SCALE * (16384.0f / binade(D * peak + 2 * C * total)));
    for (int i = 0; i < s.chunks; i++) {
      ARRIVED
      __syncthreads();
      const int next = i + STAGES - 1;
      if (next < s.chunks) bring<true, HELP>(a, ring + next % STAGES * STAGE, BARRIER(next), s.place + next, h, t);
      COMMIT
      if (i) {
        ending.end(a, s, h, i - 1, results + (i - 1) % 2 * (RESULT / 4), scale);
        ending.take(a, s, h, i);
      }
    }
    __syncthreads();
    ending.end(a, s, h, s.chunks - 1, results + (s.chunks - 1) % 2 * (RESULT / 4), scale);
  }
}

// One segment of one head, but for the last of its sequence: from zero, and from the unit matrix without corrections.
extern "C" __global__ void __launch_bounds__(BOTH, 1) carry(const Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[BOTH / 32];
  const int h = blockIdx.x, segment = blockIdx.y, part = threadIdx.x / MATH, lane = threadIdx.x % 32;
  const int row0 = threadIdx.x % MATH / 32 * ROWS;
  const Segment s = segment_of(a, segment);
  if (s.begin >= s.until || s.until == s.end || s.slot == 0) return;
  const Address ring = address(memory);
  MAKE_BARRIERS
  const float total = sum_of_sizes<BOTH>(a, s, h, sums);
  const float scale = 16384.0f / (part ? (float)D : binade(2 * C * total)), back = 1.0f / scale;
  float held[TILES][16][4];
  EACH_PAIR({
    const int row = at / D;
    const int channel = at % D;
    x = part && row == channel ? scale : 0.0f;
    y = part && row == channel + 1 ? scale : 0.0f;
  })
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < s.chunks) bring<false, BOTH>(a, ring + i * STAGE, BARRIER(i), s.place + i, h, threadIdx.x);
    COMMIT
  }
  for (int i = 0; i < s.chunks; i++) {
    ARRIVED
    __syncthreads();
    const int next = i + STAGES - 1, stage = i % STAGES * STAGE;
    if (next < s.chunks) bring<false, BOTH>(a, ring + next % STAGES * STAGE, BARRIER(next), s.place + next, h, threadIdx.x);
    COMMIT
    WAIT(i)
    advance<false>(held, memory + stage, ring + stage, part ? 0.0f : scale * (1 / READ_SCALE), nullptr);
  }
  float* to = a.carry + ((long long)segment * a.heads + h) * 2 * D * D + part * D * D;
  EACH_PAIR({ *(float2*)(to + at) = make_float2(x * back, y * back); })
}
