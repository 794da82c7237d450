// Attention residuals of rows of DIM bf16: add, mix over depth, norm and the stored block.
//
// One program a multiprocessor takes every so manieth row. One warp fetches: whole rows of the sources, one after the
// other, into a ring of SLOTS in shared memory, always as many as fit. The others keep a row's sources in registers, so
// that each is read once and all scores are summed up by one exchange between the warps.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#define INFINITE __int_as_float(0x7f800000)
#define ALL 0xffffffffu
#ifndef DIM
#define DIM 7168
#endif
#ifndef MOST
#define MOST 8
#endif
#ifndef WORKERS
#define WORKERS 224
#endif

// MOST stored blocks and the running sum; a thread has VECTORS of 8 channels of each.
constexpr int WARPS = WORKERS / 32, ROW_BYTES = DIM * 2, VECTORS = DIM / 8 / WORKERS, SOURCES = MOST + 1, SLOTS = 15;
static_assert(VECTORS * WORKERS * 8 == DIM && MOST <= 15, "threads share a row evenly");

struct Arguments {
  uint16_t *prefix, *blocks, *out;
  const uint16_t *delta, *norm;
  const float* key;
  long long prefix_row, delta_row, block_stride, block_row;
  int rows, count, reset, add, store, has_norm;
  float eps, out_eps;
};

__device__ uint32_t shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}
__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ uint32_t pair_of(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
// What this thread has read of shared memory is read before a bulk copy, which goes another way there, may overwrite it. An
// arrival alone does not wait for loads on their way: in 35 of 400 runs over 16,384 rows on an H200 a copy was faster, and
// a quarter or all of a warp's load was the next row's. With this fence, or an arrival that needs the values, in none.
__device__ void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier of all but the fetching warp.
__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

union Part {
  uint4 vector;
  uint32_t pairs[4];
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

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) mix(Arguments a) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ __align__(8) uint64_t full[SLOTS], empty[SLOTS];
  __shared__ float sums[2][WARPS][2 * SOURCES], squares[2][WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(full + i)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(empty + i)), "n"(WARPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();

  if (warp == WARPS) {
    if (lane) return;
    Place to{0, 1};
    auto fetch = [&](const uint16_t* from) {
      wait(shared(empty + to.slot), to.parity);
      const uint32_t barrier = shared(full + to.slot);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(ROW_BYTES) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   ::"r"(shared(ring) + to.slot * ROW_BYTES), "l"(from), "n"(ROW_BYTES), "r"(barrier) : "memory");
      to.next();
    };
    for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
      if (a.add) fetch(a.delta + row * a.delta_row);
      if (!a.add || !a.reset) fetch(a.prefix + row * a.prefix_row);
      for (int j = 0; j < a.count; j++) fetch(a.blocks + j * a.block_stride + row * a.block_row);
    }
    return;
  }

  float key[VECTORS][8];
  Part scale[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * WORKERS + threadIdx.x) * 8;
    *(float4*)key[v] = *(const float4*)(a.key + at);
    *(float4*)(key[v] + 4) = *(const float4*)(a.key + at + 4);
    if (a.has_norm) scale[v].vector = *(const uint4*)(a.norm + at);
  }
  Place from{0, 0};
  auto take = [&](Part(&into)[VECTORS]) {
    wait(shared(full + from.slot), from.parity);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      into[v].vector = *(const uint4*)(ring + from.slot * ROW_BYTES + (v * WORKERS + threadIdx.x) * 16);
    }
    have_read();
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(empty + from.slot)) : "memory");
    from.next();
  };
  auto put = [&](uint16_t* row, const Part(&what)[VECTORS]) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) *(uint4*)(row + (v * WORKERS + threadIdx.x) * 8) = what[v].vector;
  };

  int turn = 0;
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    Part source[SOURCES][VECTORS];
    take(source[MOST]);
    if (a.add) {
      if (!a.reset) {
        Part before[VECTORS];
        take(before);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const uint32_t x = before[v].pairs[e], y = source[MOST][v].pairs[e];
            source[MOST][v].pairs[e] = pair_of(low(x) + low(y), high(x) + high(y));
          }
      }
      put(a.prefix + row * a.prefix_row, source[MOST]);
    }
    if (a.store) put(a.blocks + a.count * a.block_stride + row * a.block_row, source[MOST]);

    // Of each source the sum of squares and the product with the key, over a warp.
#pragma unroll
    for (int i = 0; i < SOURCES; i++) {
      const int j = i ? i - 1 : MOST;
      if (j == MOST || j < a.count) {
        if (j != MOST) take(source[j]);
        float square = 0, product = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float x = low(source[j][v].pairs[e]), y = high(source[j][v].pairs[e]);
            square = fmaf(x, x, fmaf(y, y, square));
            product = fmaf(x, key[v][2 * e], fmaf(y, key[v][2 * e + 1], product));
          }
        // Half of the lanes go on with one sum, half with the other.
        float sum = (lane & 16 ? product : square) + __shfl_xor_sync(ALL, lane & 16 ? square : product, 16);
#pragma unroll
        for (int d = 8; d; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
        if ((lane & 15) == 0) sums[turn][warp][(lane >> 4) * SOURCES + j] = sum;
      }
    }
    meet();
    // Every warp knows all scores: lane j that of source j, the last that of the running sum.
    float sum = 0, product = 0;
    const bool valid = lane < a.count || lane == MOST;
    if (valid) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        sum += sums[turn][w][lane];
        product += sums[turn][w][SOURCES + lane];
      }
    }
    const float score = valid ? product / sqrtf(sum / DIM + a.eps) : -INFINITE;
    float most = score;
#pragma unroll
    for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, d));
    float share = valid ? __expf(score - most) : 0, shares = share;
#pragma unroll
    for (int d = 16; d; d /= 2) shares += __shfl_xor_sync(ALL, shares, d);
    share /= shares;

    float mixed[VECTORS][8] = {};
#pragma unroll
    for (int j = 0; j < SOURCES; j++) {
      if (j == MOST || j < a.count) {
        const float part = __shfl_sync(ALL, share, j);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            mixed[v][2 * e] = fmaf(part, low(source[j][v].pairs[e]), mixed[v][2 * e]);
            mixed[v][2 * e + 1] = fmaf(part, high(source[j][v].pairs[e]), mixed[v][2 * e + 1]);
          }
      }
    }
    Part result[VECTORS];
    float square = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const uint32_t pair = result[v].pairs[e] = pair_of(mixed[v][2 * e], mixed[v][2 * e + 1]);
        square = fmaf(low(pair), low(pair), fmaf(high(pair), high(pair), square));
      }
    if (a.has_norm) {
#pragma unroll
      for (int d = 16; d; d /= 2) square += __shfl_xor_sync(ALL, square, d);
      if (lane == 0) squares[turn][warp] = square;
      meet();
      float whole = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) whole += squares[turn][w];
      const float factor = 1 / sqrtf(whole / DIM + a.out_eps);
#pragma unroll
      for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const uint32_t x = result[v].pairs[e], y = scale[v].pairs[e];
          result[v].pairs[e] = pair_of(low(x) * factor * low(y), high(x) * factor * high(y));
        }
    }
    put(a.out + row * DIM, result);
  }
}

// For few rows: a cluster of SPREAD programs shares a row, a thread has 8 channels of every source, and all loads are
// on their way at once. Sums go straight into the shared memory of all programs of the cluster.
constexpr int SPREAD = 4, FEW = DIM / 8 / SPREAD, FEW_WARPS = FEW / 32;
static_assert(FEW * 8 * SPREAD == DIM && FEW_WARPS * 32 == FEW, "threads of a cluster share a row evenly");

__device__ void send(const float* place, int rank, float value) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(place)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
__device__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(SPREAD, 1, 1) __launch_bounds__(FEW, 2) spread(Arguments a) {
  __shared__ float sums[SPREAD * FEW_WARPS][2 * SOURCES], squares[SPREAD * FEW_WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = blockIdx.x % SPREAD;
  const long long row = blockIdx.x / SPREAD;
  const int at = (rank * FEW + threadIdx.x) * 8;
  Part source[SOURCES], before, scale;
  uint16_t* prefix = a.prefix + row * a.prefix_row + at;
  uint16_t* blocks = a.blocks + row * a.block_row + at;
  source[MOST].vector = *(const uint4*)(a.add ? a.delta + row * a.delta_row + at : prefix);
  if (a.add && !a.reset) before.vector = *(const uint4*)prefix;
#pragma unroll
  for (int j = 0; j < MOST; j++) {
    source[j].vector = j < a.count ? *(const uint4*)(blocks + j * a.block_stride) : make_uint4(0, 0, 0, 0);
  }
  float key[8];
  *(float4*)key = *(const float4*)(a.key + at);
  *(float4*)(key + 4) = *(const float4*)(a.key + at + 4);
  if (a.has_norm) scale.vector = *(const uint4*)(a.norm + at);
  // No program writes into another that has not started.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (a.add) {
    if (!a.reset) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const uint32_t x = before.pairs[e], y = source[MOST].pairs[e];
        source[MOST].pairs[e] = pair_of(low(x) + low(y), high(x) + high(y));
      }
    }
    *(uint4*)prefix = source[MOST].vector;
  }
  if (a.store) *(uint4*)(blocks + a.count * a.block_stride) = source[MOST].vector;

  // After the exchanges a lane has one of 2 * SOURCES sums: lane j that of the squares, or of the products, of j.
  float mine = 0;
#pragma unroll
  for (int j = 0; j < SOURCES; j++) {
    float square = 0, product = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float x = low(source[j].pairs[e]), y = high(source[j].pairs[e]);
      square = fmaf(x, x, fmaf(y, y, square));
      product = fmaf(x, key[2 * e], fmaf(y, key[2 * e + 1], product));
    }
    float sum = (lane & 16 ? product : square) + __shfl_xor_sync(ALL, lane & 16 ? square : product, 16);
#pragma unroll
    for (int d = 8; d; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
    if ((lane & 15) == j) mine = sum;
  }
  if ((lane & 15) < SOURCES) {
#pragma unroll
    for (int r = 0; r < SPREAD; r++) send(&sums[rank * FEW_WARPS + warp][(lane >> 4) * SOURCES + (lane & 15)], r, mine);
  }
  meet_cluster();
  float sum = 0, product = 0;
  const bool valid = lane < a.count || lane == MOST;
  if (valid) {
#pragma unroll
    for (int w = 0; w < SPREAD * FEW_WARPS; w++) {
      sum += sums[w][lane];
      product += sums[w][SOURCES + lane];
    }
  }
  const float score = valid ? product / sqrtf(sum / DIM + a.eps) : -INFINITE;
  float most = score;
#pragma unroll
  for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, d));
  float share = valid ? __expf(score - most) : 0, shares = share;
#pragma unroll
  for (int d = 16; d; d /= 2) shares += __shfl_xor_sync(ALL, shares, d);
  share /= shares;
  float mixed[8] = {};
#pragma unroll
  for (int j = 0; j < SOURCES; j++) {
    const float part = __shfl_sync(ALL, share, j);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      mixed[2 * e] = fmaf(part, low(source[j].pairs[e]), mixed[2 * e]);
      mixed[2 * e + 1] = fmaf(part, high(source[j].pairs[e]), mixed[2 * e + 1]);
    }
  }
  Part result;
  float square = 0;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const uint32_t pair = result.pairs[e] = pair_of(mixed[2 * e], mixed[2 * e + 1]);
    square = fmaf(low(pair), low(pair), fmaf(high(pair), high(pair), square));
  }
  if (a.has_norm) {
#pragma unroll
    for (int d = 16; d; d /= 2) square += __shfl_xor_sync(ALL, square, d);
    if (lane < SPREAD) send(&squares[rank * FEW_WARPS + warp], lane, square);
    meet_cluster();
    float whole = 0;
#pragma unroll
    for (int w = 0; w < SPREAD * FEW_WARPS; w++) whole += squares[w];
    const float factor = 1 / sqrtf(whole / DIM + a.out_eps);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const uint32_t x = result.pairs[e], y = scale.pairs[e];
      result.pairs[e] = pair_of(low(x) * factor * low(y), high(x) * factor * high(y));
    }
  }
  *(uint4*)(a.out + row * DIM + at) = result.vector;
}
