// What chunks of 32 tokens of KDA are to the states they meet, in half precision: the convolution, the gate and all
// products. A block takes one chunk of one head.
//
// Within blocks of 16 tokens keys and queries meet in the middle of the decay, in tf32, whose range it needs; the later
// block meets the earlier at their boundary, with factors of at most one, in half precision. Each chunk's U is stored
// over a power of two near its largest value, Q and M times READ_SCALE, so that none leaves half precision's range.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using Address = uint32_t;
#define ALL 0xffffffffu
__device__ Address address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void load(uint32_t (&r)[4], Address a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
__device__ void load_turned(uint32_t (&r)[4], Address a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
#define MULTIPLY(NAME, KIND)                                                                                     \
  __device__ void NAME(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {                        \
    asm volatile("mma.sync.aligned." KIND " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"               \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
  }
MULTIPLY(multiply, "m16n8k16.row.col.f32.f16.f16.f32")
MULTIPLY(multiply_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MULTIPLY(multiply_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#define PAIR_OF(NAME, KIND)                                                                             \
  __device__ uint32_t NAME(float a, float b) {                                                          \
    uint32_t r;                                                                                         \
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));                                \
    return r;                                                                                           \
  }
PAIR_OF(halves, "f16")
PAIR_OF(bf16_pair, "bf16")
#define FUNCTION(NAME, KIND)                                    \
  __device__ float NAME(float x) {                              \
    asm(KIND ".approx.ftz.f32 %0, %0;" : "+f"(x));              \
    return x;                                                   \
  }
FUNCTION(exp2_of, "ex2")
FUNCTION(over, "rcp")
__device__ void copy16(Address to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ void arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ void let_the_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Keeps the compiler from deriving an address anew wherever it is used.
template <typename T> __device__ T* settled(T* p) {
  asm volatile("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
  return p;
}
// ----
__device__ float2 pair_of(uint32_t bf16s) { return make_float2(__uint_as_float(bf16s << 16), __uint_as_float(bf16s & 0xffff0000u)); }
__device__ float sigmoid(float x) { return over(1.0f + exp2_of(-1.4426950408889634f * x)); }
__device__ float to_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

constexpr int D = 128, C = 32, HALF = 16, THREADS = 256, PAST = 3;
constexpr int FLOATS = 132, ROW = 136, SQUARE = 36, TURN = 40;  // Rows in shared memory, padded: no two of eight meet a bank.
constexpr float LOG2_E = 1.4426950408889634f, READ_SCALE = 256.0f;

// A chunk's operands, in units of uint16_t: W with Q, N, U, M, what is kept of a state, U's scale. Each matrix as warpgroups'
// products take it: 16 columns of all rows, then the next 16; the halves of a row of 16 change places every four rows.
constexpr int AT_Q = C * 16, AT_N = 2 * C * D, AT_U = AT_N + C * D, AT_M = AT_U + C * D, AT_KEEP = AT_M + C * C;
constexpr int RECORD = (AT_KEEP + D * 2 + 2 + 63) / 64 * 64;  // Whole lines of a cache.
__device__ uint32_t at(uint32_t row, uint32_t column, int rows) {
  return column / 16 * rows * 16 + row * 16 + (column / 8 ^ row / 4) % 2 * 8 + column % 8;
}

struct Arguments {
  const uint16_t *qkv, *raw_gate, *beta;
  const float *taps, *rate, *bias;
  const uint16_t* conv;
  const int *slots, *starts;
  const uint8_t* known;
  uint16_t* operands;
  float* sizes;
  long long qkv_stride, gate_stride, beta_stride, conv_stride;
  int count, heads, places;
  float bound;
};

struct Shared {
  union {
    struct { uint16_t qkv[3][C + PAST][D], gate[C][D]; } raw;
    struct { float grown[C * FLOATS], shrunk[C * FLOATS]; } keys;  // grown: of keys, then of queries
    struct { uint16_t half[C * TURN], big[C * TURN], rest[C * TURN]; } turn;  // T: in fp16; in bf16, and what that lacks
  };
  union { uint16_t raw_k[C * ROW], late[C * ROW]; };
  union { uint16_t raw_q[C * ROW]; struct { uint16_t late_k[HALF * ROW], late_q[HALF * ROW]; } cross; };
  uint16_t early_k[HALF * ROW], v[C * ROW];
  float inverse[C * SQUARE];  // At first what is to be inverted.
  union { float sums[4 * D], between[HALF * 20]; };
  float2 scales[C];  // of keys, of queries
  float own[C], beta[C], most[8];
};

// Raw inputs of a chunk and the three tokens before it, and its raw gates.
__device__ void bring(const Arguments& a, Shared& s, int h, int first) {
  const int row = threadIdx.x / 16, unit = threadIdx.x % 16 * 8;
  const uint16_t* from = a.qkv + (first - PAST + row) * a.qkv_stride + h * D + unit;
#pragma unroll
  for (int kind = 0; kind < 3; kind++)
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < 2 || row < PAST)
        copy16(address(&s.raw.qkv[kind][row + 16 * i][unit]), from + kind * a.heads * D + 16 * i * a.qkv_stride);
  const uint16_t* gate = a.raw_gate + (first + row) * a.gate_stride + h * D + unit;
#pragma unroll
  for (int i = 0; i < 2; i++) copy16(address(&s.raw.gate[row + 16 * i][unit]), gate + 16 * i * a.gate_stride);
}

// The same where a sequence begins or ends: before it lies `past`. What it does not have is zero, its gate open: tokens whose
// strength is zero leave a state alone.
__device__ void bring_some(const Arguments& a, Shared& s, int h, int first, int start, int end, const uint16_t* past) {
  const int channels = 3 * a.heads * D;
#pragma unroll 1
  for (int i = threadIdx.x; i < 3 * (C + PAST) * 16; i += THREADS) {
    const int kind = i / ((C + PAST) * 16), row = i / 16 % (C + PAST), unit = i % 16 * 8, token = first - PAST + row;
    const int channel = (kind * a.heads + h) * D + unit;
    uint16_t* to = &s.raw.qkv[kind][row][unit];
    if (token >= start && token < end) {
      copy16(address(to), a.qkv + token * a.qkv_stride + channel);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; e++)
        to[e] = token < start && past ? past[(long long)(token - start + PAST) * channels + channel + e] : 0;
    }
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < C * 16; i += THREADS) {
    const int row = i / 16, unit = i % 16 * 8;
    if (first + row < end)
      copy16(address(&s.raw.gate[row][unit]), a.raw_gate + (first + row) * a.gate_stride + h * D + unit);
    else
      *(uint4*)&s.raw.gate[row][unit] = make_uint4(0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u);  // -inf
  }
}

__device__ void take_taps(float2 (&w)[4], const Arguments& a, int kind, int h, int c) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    w[i] = *(const float2*)(a.taps + (long long)i * 3 * a.heads * D + (kind * a.heads + h) * D + c);
}

// Two channels of 8 tokens from `row`: the convolution with SiLU, rounded.
__device__ void convolve(const Shared& s, const float2 (&w)[4], int kind, int c, int row, uint32_t (&out)[8]) {
  float2 x[11];
#pragma unroll
  for (int i = 0; i < 11; i++) x[i] = pair_of(*(const uint32_t*)&s.raw.qkv[kind][row + i][c]);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float y = x[i].x * w[0].x + x[i + 1].x * w[1].x + x[i + 2].x * w[2].x + x[i + 3].x * w[3].x;
    const float z = x[i].y * w[0].y + x[i + 1].y * w[1].y + x[i + 2].y * w[2].y + x[i + 3].y * w[3].y;
    out[i] = bf16_pair(y * sigmoid(y), z * sigmoid(z));
  }
}

// 16 x 8 of a product of rows, over all channels: of fp32 in tf32, or of halves.
template <typename T>
__device__ void meet(float (&sum)[4], const T* left, const T* right, int lane) {
  constexpr int UNIT = 16 / sizeof(T), WIDTH = sizeof(T) == 4 ? FLOATS : ROW;
  const Address from = address(left + (lane % 16) * WIDTH + lane / 16 * UNIT);
  const Address other = address(right + lane % 8 * WIDTH + lane / 8 * UNIT);
#pragma unroll
  for (int k = 0; k < D * (int)sizeof(T); k += 64) {
    uint32_t x[4], y[4], z[4];
    load(x, from + k);
    load(y, from + k + 32);
    load(z, other + k);
    if (sizeof(T) == 4) {
      multiply_tf32(sum, x, z[0], z[1]);
      multiply_tf32(sum, y, z[2], z[3]);
    } else {
      multiply(sum, x, z[0], z[1]);
      multiply(sum, y, z[2], z[3]);
    }
  }
}

// Two channels of 8 tokens of the earlier or the LATER block, times their decays: from and to the middle of the block,
// its boundary, and the chunk's start and end, `other` blocks' decay away.
template <bool LATER>
__device__ void spread(Shared& s, const uint32_t (&k)[8], const uint32_t (&q)[8], const float2 (&decay)[8], float2 half_sum,
                       float2 root, float2 other, int row0, int c, uint16_t* out, float2 (&asks)[8]) {
  uint16_t *q_out = settled(out + AT_Q + at(row0, c, 2 * C)), *q_swapped = settled(out + AT_Q + at(row0 + 4, c, 2 * C) - 64);
  uint16_t *n_out = settled(out + AT_N + at(row0, c, C)), *n_swapped = settled(out + AT_N + at(row0 + 4, c, C) - 64);
  const int shuffled = c / 16 * 16 + c / 2 % 2 * 8 + c % 16 / 4 * 2;  // See `finish`.
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int r = row0 + i;
    float2 key = pair_of(k[i]), ask = pair_of(q[i]);
    const float x = s.scales[r].x, y = s.scales[r].y;
    const float2 middle = make_float2(decay[i].x - half_sum.x, decay[i].y - half_sum.y);
    const float2 up = make_float2(exp2_of(middle.x), exp2_of(middle.y)), down = make_float2(exp2_of(-middle.x), exp2_of(-middle.y));
    key.x *= x, key.y *= x;
    float2 late = make_float2(key.x * up.x, key.y * up.y), early = make_float2(key.x * down.x, key.y * down.y);
    ask.x *= y * up.x, ask.y *= y * up.y;
    *(float2*)(s.keys.grown + r * FLOATS + c) = make_float2(to_tf32(late.x), to_tf32(late.y));
    *(float2*)(s.keys.shrunk + r * FLOATS + c) = make_float2(to_tf32(early.x), to_tf32(early.y));
    asks[i] = make_float2(to_tf32(ask.x), to_tf32(ask.y));
    late.x *= root.x, late.y *= root.y, ask.x *= root.x, ask.y *= root.y, early.x *= root.x, early.y *= root.y;
    if (LATER) {
      *(uint32_t*)(s.cross.late_k + (r - HALF) * ROW + c) = halves(late.x, late.y);
      *(uint32_t*)(s.cross.late_q + (r - HALF) * ROW + c) = halves(ask.x, ask.y);
      late.x *= other.x, late.y *= other.y, ask.x *= other.x, ask.y *= other.y;
    } else {
      *(uint32_t*)(s.early_k + r * ROW + c) = halves(early.x, early.y);
      early.x *= other.x, early.y *= other.y;
    }
    *(uint32_t*)(s.late + r * ROW + shuffled) = halves(late.x, late.y);
    *(uint32_t*)((i < 4 ? q_out : q_swapped) + i * 16) = halves(ask.x, ask.y);
    *(uint32_t*)((i < 4 ? n_out : n_swapped) + i * 16) = halves(early.x, early.y);
  }
}

// A column of the inverse of a diagonal block a lane.
__device__ void invert_blocks(Shared& s, int lane) {
  const int block = lane / 16 * HALF, j = lane % 16;
  float x[HALF];
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int e = 0; e < i; e += 4) {
      const float4 f = *(const float4*)(s.inverse + (block + i) * SQUARE + block + e);
      sum -= f.x * x[e];
      if (e + 1 < i) sum -= f.y * x[e + 1];
      if (e + 2 < i) sum -= f.z * x[e + 2];
      if (e + 3 < i) sum -= f.w * x[e + 3];
    }
    x[i] = sum;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < HALF; i++) s.inverse[(block + i) * SQUARE + block + j] = x[i];
}

// Scales that normalise the chunk's keys and queries, and what each query is to its own key.
__device__ void normalise(Shared& s) {
  const int row = threadIdx.x / 8, at = threadIdx.x % 8 * 8;
  float kk = 0, qq = 0, kq = 0;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const uint4 k4 = *(const uint4*)(s.raw_k + row * ROW + part * 64 + at);
    const uint4 q4 = *(const uint4*)(s.raw_q + row * ROW + part * 64 + at);
    const uint32_t ks[4] = {k4.x, k4.y, k4.z, k4.w}, qs[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 x = pair_of(ks[i]), y = pair_of(qs[i]);
      kk += x.x * x.x + x.y * x.y;
      qq += y.x * y.x + y.y * y.y;
      kq += x.x * y.x + x.y * y.y;
    }
  }
#pragma unroll
  for (int o = 1; o < 8; o *= 2)
    kk += __shfl_xor_sync(ALL, kk, o), qq += __shfl_xor_sync(ALL, qq, o), kq += __shfl_xor_sync(ALL, kq, o);
  if (threadIdx.x % 8 == 0) {
    const float x = rsqrtf(kk + 1e-6f), y = rsqrtf(qq + 1e-6f);
    s.scales[row] = make_float2(x, y * READ_SCALE), s.own[row] = kq * x * y * READ_SCALE;
  }
}

__device__ void keep_turn(Shared& s, int row, int column, float x) {
  x *= s.beta[column];
  const uint32_t big = bf16_pair(x, 0.0f) & 0xffffu;
  s.turn.half[row * TURN + column] = (uint16_t)halves(x, 0.0f);
  s.turn.big[row * TURN + column] = (uint16_t)big;
  s.turn.rest[row * TURN + column] = (uint16_t)bf16_pair(x - __uint_as_float(big << 16), 0.0f);
}

// The rest, once `s.turn` is complete: W = T K and U = T V.
__device__ void finish(const Arguments& a, Shared& s, uint16_t* out, int h, int place) {
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, pair = lane % 4 * 2, c0 = warp * 16;
  // Fragments of T [row tile, column tile]: 00, 10, 11. Their rows are shuffled, so that a thread gets four tokens of U
  // in a row: row g + 8 e is token 4 (g / 2) + 2 e + g % 2. Channels of `late` lie likewise, for W.
  const int token = g / 2 * 4 + g % 2;
  uint32_t half[3][4], big[3][4], rest[3][4];
#pragma unroll
  for (int f = 0; f < 3; f++) {
    const int row = (f > 0) * HALF + lane % 8 / 2 * 4 + lane % 2 + lane / 8 % 2 * 2, column = (f > 1) * HALF + lane / 16 * 8;
    load(half[f], address(s.turn.half + row * TURN + column));
    load(big[f], address(s.turn.big + row * TURN + column));
    load(rest[f], address(s.turn.rest + row * TURN + column));
  }
  {
    const int row = lane % 16, column = c0 + lane / 16 * 8;
    uint32_t first[4], second[4];
    load_turned(first, address(s.late + row * ROW + column));
    load_turned(second, address(s.late + (HALF + row) * ROW + column));
    uint16_t* w_out = settled(out + at(token, c0 + pair * 2, 2 * C));
    float w[2][2][4] = {};
#pragma unroll
    for (int b = 0; b < 2; b++) {
      multiply(w[0][b], half[0], first[2 * b], first[2 * b + 1]);
      multiply(w[1][b], half[1], first[2 * b], first[2 * b + 1]);
      multiply(w[1][b], half[2], second[2 * b], second[2 * b + 1]);
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        *(uint2*)(w_out + m * HALF * 16 + e * 2 * 16) =
            make_uint2(halves(w[m][0][2 * e], w[m][0][2 * e + 1]), halves(w[m][1][2 * e], w[m][1][2 * e + 1]));
  }
  float u[4][4] = {};  // [V, C]: 16 channels, four tiles of eight tokens.
  {
    const int row = lane % 8 + lane / 16 * 8, column = c0 + lane / 8 % 2 * 8;
    uint32_t x[2][4];
    load_turned(x[0], address(s.v + row * ROW + column));
    load_turned(x[1], address(s.v + (HALF + row) * ROW + column));
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const int e = b % 2;
      if (b < 2) {
        multiply_bf16(u[b], x[0], rest[0][e], rest[0][e + 2]);
        multiply_bf16(u[b], x[0], big[0][e], big[0][e + 2]);
      } else {
        multiply_bf16(u[b], x[0], rest[1][e], rest[1][e + 2]);
        multiply_bf16(u[b], x[1], rest[2][e], rest[2][e + 2]);
        multiply_bf16(u[b], x[0], big[1][e], big[1][e + 2]);
        multiply_bf16(u[b], x[1], big[2][e], big[2][e + 2]);
      }
    }
  }
  float most = 0;
#pragma unroll
  for (int b = 0; b < 4; b++)
#pragma unroll
    for (int e = 0; e < 4; e++) most = fmaxf(most, fabsf(u[b][e]));
#pragma unroll
  for (int o = 16; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, o));
  if (lane == 0) s.most[warp] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++) most = fmaxf(most, s.most[i]);
  const float size = __uint_as_float(__float_as_uint(fmaxf(most, 7.888609052210118e-31f)) & 0x7F800000u);
  if (t == 0) {
    a.sizes[(long long)h * a.places + place] = size;
    *(float*)(out + AT_KEEP + 2 * D) = size;
  }
  const float scale = __uint_as_float(((254u + 8u) << 23) - __float_as_uint(size));  // READ_SCALE / size
  uint16_t* u_out = settled(out + AT_U + at(c0 + g, pair * 2, D));
#pragma unroll
  for (int b = 0; b < 4; b += 2)
#pragma unroll
    for (int e = 0; e < 2; e++)
      *(uint2*)(u_out + e * 8 * 16 + b / 2 * D * 16) =
          make_uint2(halves(u[b][2 * e] * scale, u[b][2 * e + 1] * scale), halves(u[b + 1][2 * e] * scale, u[b + 1][2 * e + 1] * scale));
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) operands(const Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& s = *(Shared*)memory;
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, h = blockIdx.x, place = blockIdx.y;
  let_the_next_kernel_start();
  int lower = 0, upper = a.count;
  while (upper - lower > 1) {
    const int middle = (lower + upper) / 2;
    if (a.starts[middle] / C + middle <= place) lower = middle; else upper = middle;
  }
  const int start = a.starts[lower], end = a.starts[lower + 1], first = start + (place - start / C - lower) * C;
  const long long slot = a.slots[lower];
  uint16_t* out = settled(a.operands + ((long long)place * a.heads + h) * RECORD);
  if (first >= end || slot == 0) return;
  const uint16_t* past = a.known[lower] ? a.conv + slot * a.conv_stride : nullptr;
  if (first - PAST >= start && first + C <= end) bring(a, s, h, first); else bring_some(a, s, h, first, start, end, past);
  const int c = t % 64 * 2, group = t / 64, row0 = group * 8, block = group / 2;
  const float rate = a.rate[h] * -LOG2_E, bound = a.bound * LOG2_E;
  float2 bias = *(const float2*)(a.bias + h * D + c);
  bias.x *= rate, bias.y *= rate;
  if (t < C) {
    const int token = first + t;
    s.beta[t] = token < end ? sigmoid(__uint_as_float((uint32_t)a.beta[token * a.beta_stride + h] << 16)) : 0.0f;
  }
  float2 v_taps[4], k_taps[4], q_taps[4];  // Asked for before they are needed.
  take_taps(v_taps, a, 2, h, c);
  take_taps(k_taps, a, 1, h, c);
  arrived();
  __syncthreads();
  take_taps(q_taps, a, 0, h, c);
  float2 decay[8], sum = make_float2(0, 0);  // Summed within 8 tokens, in base 2.
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 raw = pair_of(*(const uint32_t*)&s.raw.gate[row0 + i][c]);
    sum.x += bound * over(1.0f + exp2_of(rate * raw.x + bias.x));
    sum.y += bound * over(1.0f + exp2_of(rate * raw.y + bias.y));
    decay[i] = sum;
  }
  *(float2*)(s.sums + group * D + c) = sum;
  uint32_t k[8], q[8];
  {
    uint32_t v[8];
    convolve(s, v_taps, 2, c, row0, v);
#pragma unroll
    for (int i = 0; i < 8; i++) *(uint32_t*)(s.v + (row0 + i) * ROW + c) = v[i];
  }
  convolve(s, k_taps, 1, c, row0, k);
#pragma unroll
  for (int i = 0; i < 8; i++) *(uint32_t*)(s.raw_k + (row0 + i) * ROW + c) = k[i];
  convolve(s, q_taps, 0, c, row0, q);
#pragma unroll
  for (int i = 0; i < 8; i++) *(uint32_t*)(s.raw_q + (row0 + i) * ROW + c) = q[i];
  __syncthreads();
  normalise(s);
  float2 half_sum, decay0, decay1;
  {
    float2 p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = *(const float2*)(s.sums + i * D + c);
    if (group % 2) {
      const float2 before = block ? p[2] : p[0];
#pragma unroll
      for (int i = 0; i < 8; i++) decay[i].x += before.x, decay[i].y += before.y;
    }
    const float2 s0 = make_float2(p[0].x + p[1].x, p[0].y + p[1].y), s1 = make_float2(p[2].x + p[3].x, p[2].y + p[3].y);
    half_sum = block ? make_float2(0.5f * s1.x, 0.5f * s1.y) : make_float2(0.5f * s0.x, 0.5f * s0.y);
    decay0 = make_float2(exp2_of(s0.x), exp2_of(s0.y));
    decay1 = make_float2(exp2_of(s1.x), exp2_of(s1.y));
    if (group == 0) *(float2*)(out + AT_KEEP + 2 * c) = make_float2(decay0.x * decay1.x, decay0.y * decay1.y);
  }
  const float2 root = make_float2(exp2_of(half_sum.x), exp2_of(half_sum.y));
  __syncthreads();
  float2 asks[8];
  if (block)
    spread<true>(s, k, q, decay, half_sum, root, decay0, row0, c, out, asks);
  else
    spread<false>(s, k, q, decay, half_sum, root, decay1, row0, c, out, asks);
  __syncthreads();
  // Four tiles of 16 x 8 in the diagonal blocks, two between them.
  const int g = lane / 4, pair = lane % 4 * 2, of = warp < 4 ? warp / 2 : 1, tile = warp % 2;
  auto meet_tile = [&](float (&met)[4], const uint16_t* late) {
    if (warp < 4)
      meet(met, s.keys.grown + of * HALF * FLOATS, s.keys.shrunk + (of * HALF + tile * 8) * FLOATS, lane);
    else
      meet(met, late, s.early_k + tile * 8 * ROW, lane);
  };
  if (warp < 6) {  // Keys on keys.
    float met[4] = {};
    meet_tile(met, s.cross.late_k);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = g + e * 8, column = tile * 8 + pair, r = of * HALF + row;
      const float beta = s.beta[r];
      *(float2*)(s.inverse + r * SQUARE + (warp < 4 ? of * HALF : 0) + column) =
          make_float2(warp >= 4 || row > column ? met[2 * e] * beta : 0.0f, warp >= 4 || row > column + 1 ? met[2 * e + 1] * beta : 0.0f);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; i++) *(float2*)(s.keys.grown + (row0 + i) * FLOATS + c) = asks[i];
  __syncthreads();
  if (warp == 7) {
    invert_blocks(s, lane);
  } else if (warp == 6) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      *(uint32_t*)(out + AT_M + at(i * 4 + lane / 8, HALF + lane % 8 * 2, C)) = 0;
  } else {  // Queries on keys.
    float met[4] = {};
    meet_tile(met, s.cross.late_q);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = g + e * 8, column = tile * 8 + pair, r = of * HALF + row;
      const float own = s.own[r];
      float x = met[2 * e], y = met[2 * e + 1];
      if (warp < 4) {
        x = row > column ? x : row == column ? own : 0.0f;
        y = row > column + 1 ? y : row == column + 1 ? own : 0.0f;
      }
      *(uint32_t*)(out + AT_M + at(r, (warp < 4 ? of * HALF : 0) + column, C)) = halves(x, y);
    }
  }
  __syncthreads();
  const int i = t / 16, j = t % 16;
  float dot = 0;
#pragma unroll
  for (int e = 0; e < HALF; e += 4) {
    const float4 f = *(const float4*)(s.inverse + (HALF + i) * SQUARE + e);
    const float* x = s.inverse + e * SQUARE + j;
    dot += f.x * x[0] + f.y * x[SQUARE] + f.z * x[2 * SQUARE] + f.w * x[3 * SQUARE];
  }
  s.between[i * 20 + j] = dot;
  keep_turn(s, i, j, s.inverse[i * SQUARE + j]);
  keep_turn(s, HALF + i, HALF + j, s.inverse[(HALF + i) * SQUARE + HALF + j]);
  __syncthreads();
  dot = 0;
#pragma unroll
  for (int e = 0; e < HALF; e += 4) {
    const float4 f = *(const float4*)(s.inverse + (HALF + i) * SQUARE + HALF + e);
    const float* x = s.between + e * 20 + j;
    dot -= f.x * x[0] + f.y * x[20] + f.z * x[40] + f.w * x[60];
  }
  keep_turn(s, HALF + i, j, dot);
  __syncthreads();
  finish(a, s, out, h, place);
}
