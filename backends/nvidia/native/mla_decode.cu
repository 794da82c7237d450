// Absorbed MLA decoding for up to 16 heads, of a cache in bf16 or (FP8) float8_e4m3: split KV, then a merge.
//
// One program a multiprocessor works through chunks of sequences, one after the other. Four warps fetch: the queries of
// the next chunk, and tiles of cached rows into a ring in shared memory, whose slots are never empty for long. Eight
// warps work. Values: each has 64 channels, and the weights of all rows. Scores: of fp8, whose tiles have twice the
// rows, each has 8 rows, and only their weights to find; of bf16 four warps take 8 rows each over half of the channels,
// four more the other half, and the halves meet in shared memory. A tile's scores are formed while those of the tile
// before are used, so that one barrier a tile is enough.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#define INFINITE __int_as_float(0x7f800000)
#define ALL 0xffffffffu
#ifndef FP8
#define FP8 0
#endif

constexpr int RANK = 512, ENTRY = 576, WARPS = 8, WORKERS = WARPS * 32, HEADS = 16, HALF = ENTRY / 2;
constexpr int STEPS = (FP8 ? ENTRY : HALF) / 16;
// Rows are 16 bytes apart from being whole banks, so that 8 of them do not meet in one.
constexpr int ROWS = FP8 ? 64 : 32, SLOTS = 5, FETCHERS = 4, ROWS_EACH = ROWS / FETCHERS;
constexpr int ROW_BYTES = FP8 ? ENTRY : 2 * ENTRY, PITCH = ROW_BYTES + 16, TILE = ROWS * PITCH, QUERY_PITCH = 2 * ENTRY + 16;
constexpr int FETCHER_REGS = 56, WORKER_REGS = 224;
constexpr int SCORES = 2 * 4 * 32;               // Of bf16: of 4 floats, for one tile.
constexpr int WEIGHT_PITCH = 2 * ROWS + 16;  // Of fp8: bytes from a head's weights to the next one's.

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

__device__ uint32_t shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(const uint64_t& barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(shared(&barrier)), "r"(parity) : "memory");
}
__device__ void prepare(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&barrier)), "r"(arrivals) : "memory");
}
__device__ void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&barrier)) : "memory");
}
__device__ void expect(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&barrier)), "r"(bytes) : "memory");
}
__device__ void fetch(void* to, const void* from, int bytes, uint64_t& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(&barrier)) : "memory");
}
// What this thread has read of shared memory is read before a bulk copy may overwrite it: see attn_res_mix.cu.
__device__ void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

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

// What the workers tell each other, of two tiles.
struct Between {
#if FP8
  uint8_t weights[2][HEADS * WEIGHT_PITCH];
  float4 most[2][HEADS][2];  // Of each head and warp.
  float4 sums[HEADS][2];
  float grown[HEADS];
#else
  float4 scores[2][SCORES];
#endif
};

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};
struct Item {
  int n, split, rows, whole;
};
struct Memory {
  uint8_t ring[SLOTS][TILE];
  uint8_t queries[HEADS * QUERY_PITCH];
  Between between;
  Item item;
  uint64_t full[SLOTS], empty[SLOTS], given, taken;
};
struct Place {
  int slot = 0;
  uint32_t parity;
  __device__ void next() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Warps that fetch have some rows of every tile each, a lane a row: a copy takes some fifty cycles to issue. Rows beyond
// the last become zeros; where rows are not aligned to 16 bytes they are copied byte by byte. The first warp also hands
// out chunks with their queries, of which those beyond the last head are never used.
__device__ void fetch_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, mine = threadIdx.x / 32 - WARPS, r = mine * ROWS_EACH + lane;
  Walk at;
  Place to{0, 1};
  uint32_t parity = 1;
  for (int item = blockIdx.x;; item += gridDim.x) {
    const bool more = at.find(a, item), some = more && at.first < at.last;
    if (mine == 0) {
      wait(m.taken, parity);
      parity ^= 1;
      if (lane == 0) {
        m.item = more ? Item{at.n, at.split, at.last - at.first, at.last - at.first == at.length} : Item{-1, 0, 0, 0};
        expect(m.given, some ? a.heads * 2 * ENTRY : 0);
      }
      __syncwarp();
      if (some && lane < a.heads) {
        fetch(m.queries + lane * QUERY_PITCH, a.q + at.n * a.q_row + lane * a.q_head, 2 * ENTRY, m.given);
      }
    }
    if (!more) return;
    const int* table = a.table + at.n * a.table_row + at.first / a.page;
    int in_page = at.first % a.page, page = some ? *table : 0;
    for (int row = at.first; row < at.last; row += ROWS) {
      const uint8_t* from = a.cache + page * a.page_bytes + (in_page + r) * ROW_BYTES;
      const int rows = min(at.last - row, ROWS);
      in_page += ROWS;
      if (in_page == a.page) {
        in_page = 0;
        table++;
      }
      if (row + ROWS < at.last) page = *table;
      wait(m.empty[to.slot], to.parity);
      uint8_t* here = m.ring[to.slot] + r * PITCH;
      if (rows < ROWS || !a.aligned) {
        if (lane < ROWS_EACH) {
          for (int byte = 0; r >= rows && byte < ROW_BYTES; byte += 16) *(uint4*)(here + byte) = make_uint4(0, 0, 0, 0);
          for (int byte = 0; r < rows && !a.aligned && byte < ROW_BYTES; byte++) here[byte] = from[byte];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
      }
      const int copied = a.aligned ? min(max(rows - mine * ROWS_EACH, 0), ROWS_EACH) : 0;
      if (lane == 0) expect(m.full[to.slot], copied * ROW_BYTES);
      __syncwarp();
      if (lane < copied) fetch(here, from, ROW_BYTES, m.full[to.slot]);
      to.next();
    }
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

// Writes a chunk's result, as the output where it is a whole sequence.
__device__ void put(const Arguments& a, const Item& item, const float (&acc)[8][4], float top0, float top1, float sum0, float sum1) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const float r0 = sum0 > 0 ? 1 / sum0 : 0, r1 = sum1 > 0 ? 1 / sum1 : 0;
  if (item.whole) {
    uint16_t* out = a.out + (long long)item.n * a.heads * RANK;
    each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { *(uint32_t*)(out + at) = bf16_pair(x, y); });
  } else {
    const long long unit = ((long long)item.n * a.max_splits + item.split) * a.heads;
    float* out = a.partial + unit * RANK;
    each_pair(acc, a, warp, g, t, r0, r1, [&](int at, float x, float y) { *(float2*)(out + at) = make_float2(x, y); });
    if (warp == 0 && t == 0) {
      if (g < a.heads) a.lse[unit + g] = top0 + log2f(sum0);
      if (g + 8 < a.heads) a.lse[unit + g + 8] = top1 + log2f(sum1);
    }
  }
}

#if FP8
// Two heads' queries a warp, g and g + 8, to fp16 whose largest is about 2^14, so that fp16 holds all that counts; and in
// the order of left factors of the matrix instructions, four channels at a time in the order in which cached ones are
// widened. `grown`: what each head's scores are to be multiplied by.
__device__ void narrow_queries(uint8_t* queries, float* grown, int warp, int lane) {
  uint32_t x[2][ENTRY / 64];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t* pairs = (const uint32_t*)(queries + (warp + 8 * h) * QUERY_PITCH) + lane;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < ENTRY / 64; i++) {
      x[h][i] = pairs[32 * i];
      largest = fmaxf(largest, fmaxf(fabsf(low(x[h][i])), fabsf(high(x[h][i]))));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, d));
    const int exponent = min(max((int)(__float_as_uint(largest) >> 23), 20), 240) - 127 - 14;
    const float shrunk = __uint_as_float((uint32_t)(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < ENTRY / 64; i++) x[h][i] = factors(low(x[h][i]) * shrunk, high(x[h][i]) * shrunk);
    if (lane == 0) grown[warp + 8 * h] = __uint_as_float((uint32_t)(127 + exponent) << 23);
  }
  meet();  // All have read what they overwrite.
  uint2* to = (uint2*)queries + warp * 8 + (lane & 7) + (lane >> 3) * 64;
#pragma unroll
  for (int i = 0; i < ENTRY / 64; i++) to[256 * i] = make_uint2(x[0][i], x[1][i]);
  meet();
}

// Scores of 16 heads with 8 rows. Four sums go on at a time.
__device__ void score(float (&sum)[4], const uint4 (&q)[STEPS], uint32_t at) {
  float part[4][4] = {};
  uint32_t b[4], first, last;
#pragma unroll
  for (int i = 0; i < STEPS / 4; i++) {
    read4(b, at + i * 64);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      widen(b[c], first, last);
      multiply(part[c], {q[4 * i + c].x, q[4 * i + c].y, q[4 * i + c].z, q[4 * i + c].w}, first, last);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; e++) sum[e] = part[0][e] + part[1][e] + (part[2][e] + part[3][e]);
}

// Adds the values of a tile's rows, a warp's 64 channels of them.
__device__ void add_values(float (&acc)[8][4], uint32_t weights_at, uint32_t at) {
  uint32_t weights[4], b[4];
#pragma unroll
  for (int s = 0; s < ROWS / 16; s++) {
    read4(weights, weights_at + s * 32);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      read4_turned(b, at + s * 16 * PITCH + i * 32);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        // Two channels of two rows: to one channel of both rows, and the other.
        uint32_t even0, odd0, even1, odd1;
        widen(__byte_perm(b[2 * c], 0, 0x3120), even0, odd0);
        widen(__byte_perm(b[2 * c + 1], 0, 0x3120), even1, odd1);
        multiply(acc[4 * i + 2 * c], weights, even0, even1);
        multiply(acc[4 * i + 2 * c + 1], weights, odd0, odd1);
      }
    }
  }
}

// The largest of eight.
__device__ float largest_of(const float4 (&x)[2]) {
  return fmaxf(fmaxf(fmaxf(x[0].x, x[0].y), fmaxf(x[0].z, x[0].w)), fmaxf(fmaxf(x[1].x, x[1].y), fmaxf(x[1].z, x[1].w)));
}
__device__ float sum_of(const float4 (&x)[2]) {
  return x[0].x + x[0].y + (x[0].z + x[0].w) + (x[1].x + x[1].y + (x[1].z + x[1].w));
}

// Eight warps: scores and values of this program's chunks, one after the other.
__device__ void attend_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int in8 = lane & 7, quarter = lane >> 3;
  // Where this lane's rows of matrices are in a tile. Scores: row 8 warp.., 16 bytes after the other; values: 16 rows.
  const uint32_t scores_at = (8 * warp + in8) * PITCH + quarter * 16;
  const uint32_t values_at = (in8 + (quarter & 1) * 8) * PITCH + warp * 64 + (quarter >> 1) * 16;
  const uint32_t ring = shared(m.ring), weights_at = shared(m.between.weights) + (lane & 15) * WEIGHT_PITCH + (lane >> 4) * 16;

  int turn = 0;
  uint32_t parity = 0;
  Place here{0, 0};
  while (true) {
    wait(m.given, parity);
    parity ^= 1;
    const Item item = m.item;
    if (item.n < 0) break;
    narrow_queries(m.queries, m.between.grown, warp, lane);
    uint4 q[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) q[s] = ((const uint4*)m.queries)[32 * s + lane];
    const float scale0 = a.scale * m.between.grown[g], scale1 = a.scale * m.between.grown[g + 8];
    have_read();
    __syncwarp();
    if (lane == 0) arrive(m.taken);
    const int tiles = (item.rows + ROWS - 1) / ROWS;
    float acc[8][4] = {};
    float top0 = -INFINITE, top1 = -INFINITE, sum0 = 0, sum1 = 0;
    int before = 0;
    // Step k forms the weights of tile k, and uses those of tile k - 1.
    auto step = [&](int k, auto forms, auto uses) {
      float s[4];
      if (forms.value) {
        wait(m.full[here.slot], here.parity);
        score(s, q, ring + here.slot * TILE + scores_at);
        s[0] *= scale0;
        s[1] *= scale0;
        s[2] *= scale1;
        s[3] *= scale1;
        const int rows = item.rows - k * ROWS - 8 * warp;
        if (rows < 8) {
          if (2 * t >= rows) s[0] = s[2] = -INFINITE;
          if (2 * t + 1 >= rows) s[1] = s[3] = -INFINITE;
        }
        float most0 = fmaxf(s[0], s[1]), most1 = fmaxf(s[2], s[3]);
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          most0 = fmaxf(most0, __shfl_xor_sync(ALL, most0, d));
          most1 = fmaxf(most1, __shfl_xor_sync(ALL, most1, d));
        }
        if (t == 0) {
          ((float*)m.between.most[turn][g])[warp] = most0;
          ((float*)m.between.most[turn][g + 8])[warp] = most1;
        }
      }
      meet();  // The weights of the tile before are there, and the largest scores of this one.
      float higher0 = top0, higher1 = top1;
      if (forms.value) {
        higher0 = fmaxf(top0, largest_of(m.between.most[turn][g]));
        higher1 = fmaxf(top1, largest_of(m.between.most[turn][g + 8]));
#pragma unroll
        for (int e = 0; e < 4; e++) s[e] = exp2_of(s[e] - (e < 2 ? higher0 : higher1));
        uint8_t* to = m.between.weights[turn] + g * WEIGHT_PITCH + 16 * warp + 4 * t;
        *(uint32_t*)to = factors(s[0], s[1]);
        *(uint32_t*)(to + 8 * WEIGHT_PITCH) = factors(s[2], s[3]);
      }
      if (uses.value) {
        add_values(acc, weights_at + (turn ^ 1) * HEADS * WEIGHT_PITCH, ring + before * TILE + values_at);
        have_read();
        __syncwarp();
        if (lane == 0) arrive(m.empty[before]);
      }
      if (forms.value) {
        if (__any_sync(ALL, higher0 > top0 || higher1 > top1)) {
          const float fade0 = exp2_of(top0 - higher0), fade1 = exp2_of(top1 - higher1);
          sum0 *= fade0;
          sum1 *= fade1;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            acc[j][0] *= fade0;
            acc[j][1] *= fade0;
            acc[j][2] *= fade1;
            acc[j][3] *= fade1;
          }
          top0 = higher0;
          top1 = higher1;
        }
        sum0 += s[0] + s[1];
        sum1 += s[2] + s[3];
        before = here.slot;
        turn ^= 1;
        here.next();
      }
    };
    if (tiles) {
      step(0, Flag<true>(), Flag<false>());
#pragma unroll 1
      for (int k = 1; k < tiles; k++) step(k, Flag<true>(), Flag<true>());
      step(tiles, Flag<false>(), Flag<true>());
#pragma unroll
      for (int d = 1; d < 4; d *= 2) {
        sum0 += __shfl_xor_sync(ALL, sum0, d);
        sum1 += __shfl_xor_sync(ALL, sum1, d);
      }
      if (t == 0) {
        ((float*)m.between.sums[g])[warp] = sum0;
        ((float*)m.between.sums[g + 8])[warp] = sum1;
      }
      meet();
      sum0 = sum_of(m.between.sums[g]);
      sum1 = sum_of(m.between.sums[g + 8]);
    }
    put(a, item, acc, top0, top1, sum0, sum1);
  }
}
#else
// A warp's half of the queries' channels as left factors.
__device__ void take_queries(uint32_t (&q)[STEPS][4], const uint8_t* queries, int half, int lane) {
  const uint32_t from = shared(queries) + (lane & 15) * QUERY_PITCH + half * 2 * HALF + (lane >> 4) * 16;
#pragma unroll
  for (int s = 0; s < STEPS; s++) read4(q[s], from + s * 32);
}

// Scores of 16 heads with 8 rows over a warp's half of the channels. Two sums go on at a time.
__device__ float4 score(const uint32_t (&q)[STEPS][4], uint32_t at) {
  float x[4] = {}, y[4] = {};
  uint32_t b[4];
#pragma unroll
  for (int i = 0; i < STEPS / 2; i++) {
    read4(b, at + i * 64);
    multiply(x, q[2 * i], b[0], b[1]);
    multiply(y, q[2 * i + 1], b[2], b[3]);
  }
  return make_float4(x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]);
}

// Adds the values of a tile's rows, a warp's 64 channels of them.
__device__ void add_values(float (&acc)[8][4], const uint32_t (&weights)[ROWS / 16][4], uint32_t at) {
  uint32_t b[4];
#pragma unroll
  for (int s = 0; s < ROWS / 16; s++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      read4_turned(b, at + s * 16 * PITCH + i * 32);
      multiply(acc[2 * i], weights[s], b[0], b[1]);
      multiply(acc[2 * i + 1], weights[s], b[2], b[3]);
    }
  }
}

// Eight warps: scores and values of this program's chunks, one after the other.
__device__ void attend_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  const int half = warp >> 2, group = warp & 3, in8 = lane & 7, quarter = lane >> 3;
  // Where this lane's rows of matrices are in a tile. Scores: row 8 group.., 16 bytes after the other; values: 16 rows.
  const uint32_t scores_at = (8 * group + in8) * PITCH + half * 2 * HALF + quarter * 16;
  const uint32_t values_at = (in8 + (quarter & 1) * 8) * PITCH + warp * 128 + (quarter >> 1) * 16;
  const uint32_t ring = shared(m.ring);

  int turn = 0;
  uint32_t parity = 0;
  Place here{0, 0};
  while (true) {
    wait(m.given, parity);
    parity ^= 1;
    const Item item = m.item;
    if (item.n < 0) break;
    uint32_t q[STEPS][4];
    take_queries(q, m.queries, half, lane);
    have_read();
    __syncwarp();
    if (lane == 0) arrive(m.taken);
    const int tiles = (item.rows + ROWS - 1) / ROWS;
    float acc[8][4] = {};
    float top0 = -INFINITE, top1 = -INFINITE, sum0 = 0, sum1 = 0;
    int before = 0;
    // Step k forms the scores of tile k, and uses those of tile k - 1.
    auto step = [&](int k, auto forms, auto uses) {
      if (forms.value) wait(m.full[here.slot], here.parity);
      meet();  // The scores of the tile before are there.
      float4 part[4];
      if (uses.value) {
        const float4* from = m.between.scores[turn ^ 1] + lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4 x = from[j * 32], y = from[SCORES / 2 + j * 32];
          part[j] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
      }
      const int now = here.slot;
      if (forms.value) {
        float4* to = m.between.scores[turn] + SCORES / 2 * half + group * 32 + lane;
        *to = score(q, ring + now * TILE + scores_at);
        turn ^= 1;
        here.next();
      }
      if (uses.value) {
        const int rows = item.rows - (k - 1) * ROWS;
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
        add_values(acc, weights, ring + before * TILE + values_at);
        have_read();
        __syncwarp();
        if (lane == 0) arrive(m.empty[before]);
      }
      before = now;
    };
    if (tiles) {
      step(0, Flag<true>(), Flag<false>());
#pragma unroll 1
      for (int k = 1; k < tiles; k++) step(k, Flag<true>(), Flag<true>());
      step(tiles, Flag<false>(), Flag<true>());
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      sum0 += __shfl_xor_sync(ALL, sum0, d);
      sum1 += __shfl_xor_sync(ALL, sum1, d);
    }
    put(a, item, acc, top0, top1, sum0, sum1);
  }
}
#endif

// Registers go from the fetching warps to the workers.
extern "C" __global__ void __launch_bounds__(WORKERS + FETCHERS * 32, 1) attend(Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  Memory& m = *(Memory*)memory;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      prepare(m.full[i], FETCHERS);
      prepare(m.empty[i], WARPS);
    }
    prepare(m.given, 1);
    prepare(m.taken, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  // The page table comes to the L2 cache while the lengths are read.
  const int line = blockIdx.x * 32;
  if (threadIdx.x == 0 && line < a.count * a.table_row) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.table + line));
  __syncthreads();
  // What this kernel reads and overwrites is ready; what comes after it may get ready too.
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x >= WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCHER_REGS));
    fetch_all(a, m);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGS));
    attend_all(a, m);
  }
}

// 64 channels of one head of one sequence: its chunks' results weighted by their sums of exponentials. Sixteen threads
// have 4 channels each of every sixteenth chunk, and read all of them at once.
constexpr int MERGED = 64, GROUPS = WORKERS * 4 / MERGED, AT_ONCE = 9;
extern "C" __global__ void __launch_bounds__(WORKERS) merge(Arguments a) {
  __shared__ float4 sums[WARPS][MERGED / 4];
  __shared__ float tops[GROUPS], totals[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockIdx.x / a.heads, h = blockIdx.x % a.heads;
  const int group = threadIdx.x / (MERGED / 4), place = threadIdx.x % (MERGED / 4);
  // Lengths were there before the kernel that this one waits for.
  const int length = a.lengths[n], chunk = chunk_of(length, a.least, a.most), count = (length + chunk - 1) / chunk;
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (count < 2) return;
  const long long first = (long long)n * a.max_splits * a.heads + h;
  const float* lse = a.lse + first;
  const float4* from = (const float4*)(a.partial + first * RANK) + blockIdx.y * (MERGED / 4) + place;
  float top = -INFINITE, total = 0;
  float4 acc = make_float4(0, 0, 0, 0);
  for (int start = group; start < count; start += GROUPS * AT_ONCE) {
    float weight[AT_ONCE], most = top;
    float4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int s = start + i * GROUPS;
      weight[i] = s < count ? lse[s * a.heads] : -INFINITE;
      x[i] = s < count ? from[s * (long long)a.heads * (RANK / 4)] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) most = fmaxf(most, weight[i]);
    const float fade = exp2_of(top - most);
    top = most;
    total *= fade;
    acc = make_float4(acc.x * fade, acc.y * fade, acc.z * fade, acc.w * fade);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float w = exp2_of(weight[i] - top);
      total += w;
      acc = make_float4(acc.x + w * x[i].x, acc.y + w * x[i].y, acc.z + w * x[i].z, acc.w + w * x[i].w);
    }
  }
  if (place == 0) tops[group] = top;
  __syncthreads();
  float most = tops[0];
#pragma unroll
  for (int i = 1; i < GROUPS; i++) most = fmaxf(most, tops[i]);
  const float fade = exp2_of(top - most);
  total *= fade;
  acc = make_float4(acc.x * fade, acc.y * fade, acc.z * fade, acc.w * fade);
  // A warp has two groups.
  total += __shfl_xor_sync(ALL, total, 16);
  acc.x += __shfl_xor_sync(ALL, acc.x, 16);
  acc.y += __shfl_xor_sync(ALL, acc.y, 16);
  acc.z += __shfl_xor_sync(ALL, acc.z, 16);
  acc.w += __shfl_xor_sync(ALL, acc.w, 16);
  if (lane < MERGED / 4) sums[warp][lane] = acc;
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (threadIdx.x >= MERGED / 4) return;
  for (int w = 1; w < WARPS; w++) {
    const float4 x = sums[w][lane];
    acc = make_float4(acc.x + x.x, acc.y + x.y, acc.z + x.z, acc.w + x.w);
    total += totals[w];
  }
  const float r = 1 / total;
  const uint2 packed = make_uint2(bf16_pair(acc.x * r, acc.y * r), bf16_pair(acc.z * r, acc.w * r));
  *(uint2*)(a.out + ((long long)n * a.heads + h) * RANK + blockIdx.y * MERGED + lane * 4) = packed;
}
