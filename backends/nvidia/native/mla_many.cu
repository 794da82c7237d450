// Absorbed MLA decoding for many heads of a bf16 cache: blocks of up to 48 heads, by the matrix instructions of a warp group.
//
// One program a multiprocessor works through chunks of sequences for a block of heads. A warp fetches tiles of 64 cached
// rows, swizzled, one ahead. Rows are the long side of both products, heads the other, so that no head is padded to 64:
// scores [row, head], of which two warp groups sum up half of the channels each and swap parts, and values
// [channel, head], of which each has half of the channels.
#include "mla_common.h"
#ifndef HEADS
#define HEADS 48
#endif

constexpr int ROWS = 64, BOXES = ENTRY / 64, BOX = ROWS * 128, TILE = BOXES * BOX, SLOTS = 2;
constexpr int PAIRS = HEADS / 8, QUERY_BOX = HEADS * 128;

// The cache as a tensor [page, row, channel] for the unit that copies, and the arguments.
struct Many {
  alignas(64) uint8_t map[128];
  Arguments arguments;
};

// A box of a tile: 64 channels of 64 rows.
__device__ void fetch(void* to, const void* map, int channel, int row, int page, uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(shared(to)), "l"(map), "r"(channel), "r"(row), "r"(page), "r"(shared(&barrier)) : "memory");
}
// Ordinary writes to shared memory are there for the matrix unit, which goes another way.
__device__ void have_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 128-byte rows, swizzled, of which eight are 1024 bytes.
__device__ uint64_t swizzled(uint32_t at) {
  return (uint64_t)((at & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define SUMS4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define PRODUCT_OF(SHAPE, C, A, B, ADDS, TURNED, ...)                                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\nwgmma.mma_async.sync.aligned." SHAPE        \
               ".f32.bf16.bf16 {" C "}, " A ", " B ", p, 1, 1, " TURNED ", 0;\n}"                          \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(adds))
#define C12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define C16 C12 ", %12, %13, %14, %15"
#define C24 C16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#if HEADS == 24
#define PRODUCT(TURNED) PRODUCT_OF("m64n24k16", C12, "%12", "%13", "%14", TURNED, SUMS4(0), SUMS4(4), SUMS4(8))
#elif HEADS == 32
#define PRODUCT(TURNED) \
  PRODUCT_OF("m64n32k16", C16, "%16", "%17", "%18", TURNED, SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12))
#else
#define PRODUCT(TURNED)                                                                                      \
  PRODUCT_OF("m64n48k16", C24, "%24", "%25", "%26", TURNED, SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12), SUMS4(16), \
             SUMS4(20))
#endif
static_assert(HEADS == 24 || HEADS == 32 || HEADS == 48, "as the products are written out");

// Adds a product of 64 by 16 and 16 by HEADS to `c`, or starts it. The first factor is [long side, 16], or turned.
__device__ void multiply(float (&c)[4 * PAIRS], uint64_t a, uint64_t b, int adds) { PRODUCT("0"); }
__device__ void multiply_turned(float (&c)[4 * PAIRS], uint64_t a, uint64_t b, int adds) { PRODUCT("1"); }
__device__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

struct Item {
  int n, chunk, rows, whole, block;
};
struct Memory {
  uint8_t ring[SLOTS][TILE];
  uint8_t queries[BOXES * QUERY_BOX];
  uint8_t weights[QUERY_BOX];
  float2 swapped[2][PAIRS][128];
  float4 most[HEADS][2], sums[HEADS][2];  // Of each warp.
  Item item;
  uint64_t full[SLOTS], empty[SLOTS], given, taken;
};
// One warp: chunks to the workers, and their tiles. A tile is within a page.
__device__ void fetch_all(const Many& many, Memory& m) {
  const Arguments& a = many.arguments;
  const int lane = threadIdx.x & 31;
  Walk<ROWS> at;
  Place<SLOTS> to{0, 1};
  uint32_t parity = 1;
  for (int item = blockIdx.x;; item += gridDim.x) {
    const bool more = at.find(a, item / a.blocks);
    wait(m.taken, parity);
    parity ^= 1;
    if (lane == 0) {
      m.item = more ? Item{at.n, at.chunk, at.last - at.first, at.last - at.first == at.length, item % a.blocks} : Item{-1};
      arrive(m.given);
    }
    if (!more) return;
    const int* table = a.table + at.n * a.table_row;
    for (int row = at.first; row < at.last; row += ROWS) {
      const int page = table[row / a.page];
      wait(m.empty[to.slot], to.parity);
      if (lane == 0) {
        expect(m.full[to.slot], TILE);
        for (int b = 0; b < BOXES; b++) fetch(m.ring[to.slot] + b * BOX, many.map, 64 * b, row % a.page, page, m.full[to.slot]);
      }
      __syncwarp();
      to.next();
    }
  }
}

// A block's queries, swizzled as cached rows are; zeros for heads there are not.
__device__ void take_queries(const Arguments& a, Memory& m, const Item& item) {
  const uint16_t* from = a.q + item.n * a.q_row;
  for (int i = threadIdx.x; i < HEADS * (ENTRY / 8); i += WORKERS) {
    const int head = i / (ENTRY / 8), part = i % (ENTRY / 8), h = item.block * HEADS + head;
    const uint4 x = h < a.heads && item.rows ? *(const uint4*)(from + h * a.q_head + part * 8) : make_uint4(0, 0, 0, 0);
    *(uint4*)(m.queries + part / 8 * QUERY_BOX + head * 128 + ((part ^ head) & 7) * 16) = x;
  }
  have_written();
  meet();
}

// Two warp groups: scores and values. A thread has eight heads' pair 2 t of its rows and channels, PAIRS times.
__device__ void attend_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x >> 7, g = lane >> 2, t = lane & 3;
  const int thread = threadIdx.x & 127;
  const uint32_t ring = shared(m.ring), queries = shared(m.queries), weights = shared(m.weights);
  uint32_t parity = 0;
  Place<SLOTS> here{0, 0};
  while (true) {
    wait(m.given, parity);
    parity ^= 1;
    const Item item = m.item;
    if (item.n < 0) break;
    __syncwarp();
    if (lane == 0) arrive(m.taken);
    take_queries(a, m, item);
    const int tiles = (item.rows + ROWS - 1) / ROWS;
    float values[4][4 * PAIRS] = {};
    float top[2 * PAIRS], sum[2 * PAIRS];
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
      top[i] = -INFINITE;
      sum[i] = 0;
    }
#pragma unroll 1
    for (int k = 0; k < tiles; k++) {
      const uint32_t tile = ring + here.slot * TILE;
      const int rows = item.rows - k * ROWS;
      float score[4 * PAIRS], mine[2 * PAIRS];
      wait(m.full[here.slot], here.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < ENTRY / 32; i++) {
        const int step = group * (ENTRY / 32) + i, box = step / 4, within = step % 4 * 32;
        multiply(score, swizzled(tile + box * BOX + within), swizzled(queries + box * QUERY_BOX + within), i > 0);
      }
      products_end();
      // The first group goes on with every other eight rows, the second with those between.
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const float x = group ? score[4 * j] : score[4 * j + 2], y = group ? score[4 * j + 1] : score[4 * j + 3];
        m.swapped[group][j][thread] = make_float2(x, y);
      }
      meet();
      const bool valid = 16 * warp + 8 * group + g < rows;
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const float2 other = m.swapped[group ^ 1][j][thread];
        const float x = group ? score[4 * j + 2] : score[4 * j], y = group ? score[4 * j + 3] : score[4 * j + 1];
        mine[2 * j] = valid ? (x + other.x) * a.scale : -INFINITE;
        mine[2 * j + 1] = valid ? (y + other.y) * a.scale : -INFINITE;
      }
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; i++) {
        float most = mine[i];
#pragma unroll
        for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, d));
        if (g == 0) ((float*)m.most[i / 2 * 8 + 2 * t + i % 2])[group * 4 + warp] = most;
      }
      // Rows beyond the last count nothing, whatever they hold.
      if (rows < ROWS) {
        for (int i = threadIdx.x; i < (ROWS - rows) * 64; i += WORKERS) {
          *(uint4*)(m.ring[here.slot] + i / 8 % 8 * BOX + (rows + i / 64) * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
      }
      meet();
      bool changed = false;
      float fade[2 * PAIRS];
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; i++) {
        const float higher = fmaxf(top[i], largest_of(m.most[i / 2 * 8 + 2 * t + i % 2]));
        changed |= higher > top[i];
        fade[i] = exp2_of(top[i] - higher);
        mine[i] = exp2_of(mine[i] - higher);
        sum[i] = fmaf(sum[i], fade[i], mine[i]);
        top[i] = higher;
      }
#pragma unroll
      for (int j = 0; j < PAIRS; j++) {
        const int head = 8 * j + (lane & 7);
        const uint32_t at = weights + head * 128 + (((2 * warp + group) ^ head) & 7) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};"
                     ::"r"(at), "r"(bf16_pair(mine[2 * j], mine[2 * j + 1])) : "memory");
      }
      have_written();
      meet();
      if (__any_sync(ALL, changed)) {
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
          for (int i = 0; i < 4 * PAIRS; i++) values[c][i] *= fade[i / 4 * 2 + i % 2];
      }
      products_begin();
#pragma unroll
      for (int c = 0; c < 4; c++)
#pragma unroll
        for (int s = 0; s < ROWS / 16; s++) {
          multiply_turned(values[c], swizzled(tile + (group * 4 + c) * BOX + s * 2048), swizzled(weights + s * 32), 1);
        }
      products_end();
      if (lane == 0) arrive(m.empty[here.slot]);
      here.next();
    }
    // A head's sum is of all rows.
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[i] += __shfl_xor_sync(ALL, sum[i], d);
      if (g == 0) ((float*)m.sums[i / 2 * 8 + 2 * t + i % 2])[group * 4 + warp] = sum[i];
    }
    meet();
    const long long unit = ((long long)item.n * a.max_splits + item.chunk) * a.heads;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
      const int head = i / 2 * 8 + 2 * t + i % 2, h = item.block * HEADS + head;
      const float total = sum_of(m.sums[head]), r = total > 0 ? 1 / total : 0;
      if (h >= a.heads) continue;
#pragma unroll
      for (int c = 0; c < 4; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int channel = (group * 4 + c) * 64 + 16 * warp + g + 8 * e;
          const float x = values[c][i / 2 * 4 + 2 * e + i % 2] * r;
          if (item.whole) {
            a.out[((long long)item.n * a.heads + h) * RANK + channel] = (uint16_t)bf16_pair(x, 0);
          } else {
            a.partial[(unit + h) * RANK + channel] = x;
          }
        }
      if (!item.whole && threadIdx.x < 4) a.lse[unit + h] = top[i] + log2f(total);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 128, 1) attend_many(const __grid_constant__ Many a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Memory& m = *(Memory*)(memory + (-shared(memory) & 1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      prepare(m.full[i], 1);
      prepare(m.empty[i], WARPS);
    }
    prepare(m.given, 1);
    prepare(m.taken, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x >= WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x < WORKERS + 32) fetch_all(a, m);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    attend_all(a.arguments, m);
  }
}
