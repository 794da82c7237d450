// Absorbed MLA decoding for up to 16 heads, of a cache in bf16 or (FP8) float8_e4m3: split KV, then a merge.
//
// One program a multiprocessor works through chunks of sequences, one after the other; a ring in shared memory has the
// next tiles of 32 cached rows on their way all the while, across the ends of chunks too. Scores: four warps take 8 rows
// each over half of the channels, the other four the other half; the halves meet in shared memory. Values: every warp
// has 64 channels, and the weights of all rows. A tile's scores are formed while those of the tile before are used, so
// that one barrier a tile is enough.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
#define INFINITE __int_as_float(0x7f800000)
#define ALL 0xffffffffu
#ifndef FP8
#define FP8 0
#endif

constexpr int RANK = 512, ENTRY = 576, ROWS = 32, THREADS = 256, HALF = ENTRY / 2, STEPS = HALF / 16;
constexpr int ROW_BYTES = FP8 ? ENTRY : 2 * ENTRY, TILE = ROWS * ROW_BYTES, STAGES = FP8 ? 12 : 6;
constexpr int PIECES = TILE / 16, PIECES_OF_ROW = ROW_BYTES / 16, COPIES = (PIECES + THREADS - 1) / THREADS;

struct Arguments {
  const uint16_t* q;
  const uint8_t* cache;
  const int *table, *lengths;
  uint16_t* out;
  float *partial, *lse;
  long long q_row, q_head, page_bytes, table_row;
  int count, heads, page, max_splits, least, most, aligned;
  float scale;
};

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ uint32_t bf16_pair(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
// Factors of the matrix instructions: bf16, or fp16, which holds every float8_e4m3.
__device__ uint32_t factors(float a, float b) {
#if FP8
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
#else
  return bf16_pair(a, b);
#endif
}
__device__ void widen(uint32_t four, uint32_t& first, uint32_t& last) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(first), "=r"(last) : "r"(four));
}
__device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if FP8
#define KIND "f16.f16"
#else
#define KIND "bf16.bf16"
#endif
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void read4(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ void read2(uint32_t (&r)[2], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
}
__device__ void read4_turned(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// Byte of a row's piece of 16 bytes in a tile: pieces change places by row, so that 8 rows are in different banks.
__device__ int place(int row, int piece) {
#if FP8
  return row * ROW_BYTES + ((piece & ~3) | ((piece ^ (row >> 1)) & 3)) * 16;
#else
  return row * ROW_BYTES + ((piece & ~7) | ((piece ^ row) & 7)) * 16;
#endif
}

__device__ int chunk_of(int length, int least, int most) {
  return max((length + most * ROWS - 1) / (most * ROWS) * ROWS, least);
}

// Finds the sequence and chunk of ever later items, with 32 sequences in hand. An empty sequence is one empty chunk.
struct Walk {
  int from = 0, before = 0;
  int n, first, last, length, split;
  __device__ bool find(const Arguments& a, int item) {
    const int lane = threadIdx.x & 31;
    while (from < a.count) {
      const int mine = from + lane, its = mine < a.count ? a.lengths[mine] : 0, its_chunk = chunk_of(its, a.least, a.most);
      const int splits = mine < a.count ? max((its + its_chunk - 1) / its_chunk, 1) : 0;
      int sum = splits;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
      }
      const int all = __shfl_sync(ALL, sum, 31);
      if (item < before + all) {
        const int at = __popc(__ballot_sync(ALL, before + sum <= item)), chunk = __shfl_sync(ALL, its_chunk, at);
        n = from + at;
        length = __shfl_sync(ALL, its, at);
        split = item - before - __shfl_sync(ALL, sum - splits, at);
        first = split * chunk;
        last = min(first + chunk, length);
        return true;
      }
      before += all;
      from += 32;
    }
    return false;
  }
};

// Copies of tiles into the ring: those of this program's items, in order.
struct Stream {
  Walk at;
  int item, row = 0, page = 0;
  bool more = true;
  uint32_t to[COPIES];
  __device__ void next_item(const Arguments& a) {
    while ((more = at.find(a, item))) {
      item += gridDim.x;
      row = at.first;
      if (row < at.last) break;
    }
    look_up(a);
  }
  __device__ void look_up(const Arguments& a) {
    if (more) page = a.table[at.n * a.table_row + row / a.page];
  }
  __device__ void start(const Arguments& a) {
    item = blockIdx.x;
#pragma unroll
    for (int k = 0; k < COPIES; k++) {
      const int id = threadIdx.x + k * THREADS;
      to[k] = place(id / PIECES_OF_ROW, id % PIECES_OF_ROW);
    }
    next_item(a);
  }
  // The page of a tile is looked up when the tile before it is under way. Rows beyond the last become zeros.
  __device__ void copy(const Arguments& a, uint32_t base, uint8_t* memory) {
    if (more) {
      const uint8_t* from = a.cache + page * a.page_bytes + row % a.page * ROW_BYTES;
      const int rows = at.last - row;
#pragma unroll
      for (int k = 0; k < COPIES; k++) {
        const int id = threadIdx.x + k * THREADS;
        if (PIECES % THREADS == 0 || id < PIECES) {
          const bool there = rows >= ROWS || id / PIECES_OF_ROW < rows;
          const uint8_t* source = there ? from + id * 16 : a.cache;
          if (a.aligned) {
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                         ::"r"(base + to[k]), "l"(source), "r"(there ? 16 : 0) : "memory");
          } else {
            for (int byte = 0; byte < 16; byte++) memory[to[k] + byte] = there ? source[byte] : 0;
          }
        }
      }
      row += ROWS;
      if (row < at.last) look_up(a);
      else next_item(a);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

// A warp's half of the queries' channels as left factors; returns what scores are to be multiplied by.
__device__ float take_queries(uint32_t (&q)[STEPS][4], const Arguments& a, int n, int half, int g, int t) {
#if FP8
  // Four channels at a time, in the order in which a piece of a cached row is widened. The largest becomes about 2^14,
  // so that fp16 holds all that counts.
  const uint16_t* from = a.q + n * a.q_row + half * HALF + 4 * t;
  uint2 raw[STEPS][2];
  float largest = 0;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int head = g + 8 * h;
      const uint2 x = head < a.heads ? *(const uint2*)(from + head * a.q_head + s * 16) : make_uint2(0, 0);
      raw[s][h] = x;
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(low(x.x)), fabsf(high(x.x))), fmaxf(fabsf(low(x.y)), fabsf(high(x.y)))));
    }
#pragma unroll
  for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, d));
  const int exponent = min(max((int)(__float_as_uint(largest) >> 23), 20), 240) - 127 - 14;
  const float shrunk = __uint_as_float((uint32_t)(127 - exponent) << 23);
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      q[s][h] = factors(low(raw[s][h].x) * shrunk, high(raw[s][h].x) * shrunk);
      q[s][2 + h] = factors(low(raw[s][h].y) * shrunk, high(raw[s][h].y) * shrunk);
    }
  return __uint_as_float((uint32_t)(127 + exponent) << 23);
#else
  const uint16_t* from = a.q + n * a.q_row + half * HALF + 2 * t;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int head = g + 8 * h;
      const uint16_t* x = from + head * a.q_head + s * 16;
      q[s][h] = head < a.heads ? *(const uint32_t*)x : 0;
      q[s][2 + h] = head < a.heads ? *(const uint32_t*)(x + 8) : 0;
    }
  return 1.0f;
#endif
}

// Scores of 16 heads with a warp's 8 rows over its half of the channels. Two sums go on at a time.
__device__ float4 score(const uint32_t (&q)[STEPS][4], uint32_t even, uint32_t odd, float grown) {
  float x[4] = {}, y[4] = {};
  uint32_t b[4];
#if FP8
  uint32_t first, last, rest[2];
#pragma unroll
  for (int i = 0; i < STEPS / 4; i++) {
    read4(b, even + i * 64);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      widen(b[c], first, last);
      multiply(c & 1 ? y : x, q[4 * i + c], first, last);
    }
  }
  read2(rest, odd);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    widen(rest[c], first, last);
    multiply(c ? y : x, q[STEPS - 2 + c], first, last);
  }
#else
#pragma unroll
  for (int i = 0; i < STEPS / 2; i++) {
    read4(b, (i & 1 ? odd : even) + (i >> 1) * 128);
    multiply(x, q[2 * i], b[0], b[1]);
    multiply(y, q[2 * i + 1], b[2], b[3]);
  }
#endif
  return make_float4((x[0] + y[0]) * grown, (x[1] + y[1]) * grown, (x[2] + y[2]) * grown, (x[3] + y[3]) * grown);
}

// Adds the values of a tile's 32 rows, a warp's 64 channels of them.
__device__ void add_values(float (&acc)[8][4], const uint32_t (&weights)[2][4], uint32_t base, const uint32_t (&at)[4]) {
  uint32_t b[4];
#pragma unroll
  for (int s = 0; s < 2; s++) {
#if FP8
#pragma unroll
    for (int i = 0; i < 2; i++) {
      read4_turned(b, base + s * 16 * ROW_BYTES + at[i]);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        // Two channels of two rows: to one channel of both rows, and the other.
        uint32_t even0, odd0, even1, odd1;
        widen(__byte_perm(b[2 * c], 0, 0x3120), even0, odd0);
        widen(__byte_perm(b[2 * c + 1], 0, 0x3120), even1, odd1);
        multiply(acc[4 * i + 2 * c], weights[s], even0, even1);
        multiply(acc[4 * i + 2 * c + 1], weights[s], odd0, odd1);
      }
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
      read4_turned(b, base + s * 16 * ROW_BYTES + at[i]);
      multiply(acc[2 * i], weights[s], b[0], b[1]);
      multiply(acc[2 * i + 1], weights[s], b[2], b[3]);
    }
#endif
  }
}

// A thread's pairs of channels of two heads, g and g + 8. Of fp8, pairs alternate between two accumulators.
template <typename Store>
__device__ void each_pair(const float (&acc)[8][4], const Arguments& a, int warp, int g, int t, float r0, float r1, Store store) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float r = h ? r1 : r0;
#if FP8
      const float x = acc[j & ~1][2 * h + (j & 1)], y = acc[j | 1][2 * h + (j & 1)];
      const int channel = warp * 64 + (j >> 1) * 16 + 4 * t + 2 * (j & 1);
#else
      const float x = acc[j][2 * h], y = acc[j][2 * h + 1];
      const int channel = warp * 64 + j * 8 + 2 * t;
#endif
      if (g + 8 * h < a.heads) store((g + 8 * h) * RANK + channel, x * r, y * r);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int half = warp >> 2, group = warp & 3, in8 = lane & 7, quarter = lane >> 3;
  const uint32_t ring = (uint32_t)__cvta_generic_to_shared(memory);
  float4* scores = (float4*)(memory + STAGES * TILE);  // [2 tiles, 2 halves, 4 groups of rows, lane]

  // Where this lane's rows of matrices are in a tile: for scores by pieces 4 and 4 (see `score`), for values by 2 and 2.
#if FP8
  const uint32_t even = place(8 * group + in8, half * STEPS + quarter);
  const uint32_t odd = place(8 * group + in8, half * STEPS + 16 + (quarter & 1));
#else
  const uint32_t even = place(8 * group + in8, half * 2 * STEPS + quarter);
  const uint32_t odd = place(8 * group + in8, half * 2 * STEPS + 4 + quarter);
#endif
  uint32_t values[4];
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] = place(in8 + (quarter & 1) * 8, warp * (FP8 ? 4 : 8) + 2 * i + (quarter >> 1));

  Stream stream;
  stream.start(a);
#pragma unroll 1
  for (int i = 0; i < STAGES - 2; i++) stream.copy(a, ring + i * TILE, memory + i * TILE);

  int slot = 0, fill = STAGES - 2, turn = 0;
  Walk here;
  for (int item = blockIdx.x; here.find(a, item); item += gridDim.x) {
    const int tiles = (here.last - here.first + ROWS - 1) / ROWS;
    float acc[8][4] = {};
    float top0 = -INFINITE, top1 = -INFINITE, sum0 = 0, sum1 = 0;
    uint32_t q[STEPS][4];
    const float grown = tiles ? take_queries(q, a, here.n, half, g, t) : 0;
    int before = 0;
#pragma unroll 1
    for (int k = 0; tiles && k <= tiles; k++) {
      // This tile has come, the scores of the one before are there, and the values of that before are done with.
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
      __syncthreads();
      float4 part[4];
      if (k > 0) {
        const float4* from = scores + (turn ^ 1) * 256 + lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4 x = from[j * 32], y = from[128 + j * 32];
          part[j] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
      }
      const int now = slot;
      if (k < tiles) {
        stream.copy(a, ring + fill * TILE, memory + fill * TILE);
        fill = fill + 1 == STAGES ? 0 : fill + 1;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        scores[turn * 256 + half * 128 + group * 32 + lane] = score(q, ring + now * TILE + even, ring + now * TILE + odd, grown);
        turn ^= 1;
      }
      if (k > 0) {
        const int rows = here.last - here.first - (k - 1) * ROWS;
        float most0 = -INFINITE, most1 = -INFINITE;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (8 * j + 2 * t >= rows) part[j].x = part[j].z = -INFINITE;
          if (8 * j + 2 * t + 1 >= rows) part[j].y = part[j].w = -INFINITE;
          most0 = fmaxf(most0, fmaxf(part[j].x, part[j].y));
          most1 = fmaxf(most1, fmaxf(part[j].z, part[j].w));
        }
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          most0 = fmaxf(most0, __shfl_xor_sync(ALL, most0, d));
          most1 = fmaxf(most1, __shfl_xor_sync(ALL, most1, d));
        }
        most0 = fmaxf(most0 * a.scale, top0);
        most1 = fmaxf(most1 * a.scale, top1);
        if (__any_sync(ALL, most0 > top0 || most1 > top1)) {
          const float fade0 = exp2_of(top0 - most0), fade1 = exp2_of(top1 - most1);
          sum0 *= fade0;
          sum1 *= fade1;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            acc[j][0] *= fade0;
            acc[j][1] *= fade0;
            acc[j][2] *= fade1;
            acc[j][3] *= fade1;
          }
          top0 = most0;
          top1 = most1;
        }
        uint32_t weights[2][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float x = exp2_of(fmaf(part[j].x, a.scale, -top0)), y = exp2_of(fmaf(part[j].y, a.scale, -top0));
          const float z = exp2_of(fmaf(part[j].z, a.scale, -top1)), w = exp2_of(fmaf(part[j].w, a.scale, -top1));
          sum0 += x + y;
          sum1 += z + w;
          weights[j >> 1][(j & 1) * 2] = factors(x, y);
          weights[j >> 1][(j & 1) * 2 + 1] = factors(z, w);
        }
        add_values(acc, weights, ring + before * TILE, values);
      }
      before = now;
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      sum0 += __shfl_xor_sync(ALL, sum0, d);
      sum1 += __shfl_xor_sync(ALL, sum1, d);
    }
    const float r0 = sum0 > 0 ? 1 / sum0 : 0, r1 = sum1 > 0 ? 1 / sum1 : 0;
    if (here.first == 0 && here.last == here.length) {
      uint16_t* out = a.out + (long long)here.n * a.heads * RANK;
      each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { *(uint32_t*)(out + at) = bf16_pair(x, y); });
    } else {
      const long long unit = ((long long)here.n * a.max_splits + here.split) * a.heads;
      float* out = a.partial + unit * RANK;
      each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { *(float2*)(out + at) = make_float2(x, y); });
      if (warp == 0 && t == 0) {
        if (g < a.heads) a.lse[unit + g] = top0 + log2f(sum0);
        if (g + 8 < a.heads) a.lse[unit + g + 8] = top1 + log2f(sum1);
      }
    }
  }
  asm volatile("griddepcontrol.launch_dependents;");
}

// 128 channels of one head of one sequence: its chunks' results weighted by their sums of exponentials.
extern "C" __global__ void __launch_bounds__(THREADS) merge(Arguments a) {
  extern __shared__ float weight[];
  __shared__ float4 sums[8][32];
  __shared__ float tops[8], totals[8];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockIdx.x / a.heads, h = blockIdx.x % a.heads;
  const int length = a.lengths[n], chunk = chunk_of(length, a.least, a.most);
  if (length <= chunk) return;
  const int count = (length + chunk - 1) / chunk;
  const float* lse = a.lse + (long long)n * a.max_splits * a.heads + h;
  float top = -INFINITE;
  for (int s = threadIdx.x; s < count; s += THREADS) {
    weight[s] = lse[s * a.heads];
    top = fmaxf(top, weight[s]);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, d));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) top = fmaxf(top, tops[w]);
  const float4* from = (const float4*)(a.partial + ((long long)n * a.max_splits * a.heads + h) * RANK) + blockIdx.y * 32 + lane;
  const long long stride = (long long)a.heads * RANK / 4;
  float4 acc = make_float4(0, 0, 0, 0);
  float total = 0;
#pragma unroll 8
  for (int s = warp; s < count; s += 8) {
    const float w = exp2_of(weight[s] - top);
    const float4 x = from[s * stride];
    total += w;
    acc.x += w * x.x;
    acc.y += w * x.y;
    acc.z += w * x.z;
    acc.w += w * x.w;
  }
  sums[warp][lane] = acc;
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (warp == 0) {
    for (int w = 1; w < 8; w++) {
      const float4 x = sums[w][lane];
      acc.x += x.x;
      acc.y += x.y;
      acc.z += x.z;
      acc.w += x.w;
      total += totals[w];
    }
    const float r = 1 / total;
    const uint2 packed = make_uint2(bf16_pair(acc.x * r, acc.y * r), bf16_pair(acc.z * r, acc.w * r));
    *(uint2*)(a.out + ((long long)n * a.heads + h) * RANK + blockIdx.y * 128 + lane * 4) = packed;
  }
}
