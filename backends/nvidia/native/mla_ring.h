// The ring that cached rows come through to decoding for up to 16 heads, and what fills it.
#ifndef FP8
#define FP8 0
#endif
#ifndef ONCE
#define ONCE 0
#endif

constexpr int HEADS = 16, HALF = ENTRY / 2, STEPS = (FP8 ? ENTRY : HALF) / 16;
// A copy brings 1152 bytes: one row of bf16, two of fp8. They are 16 bytes apart from being whole banks, so that 8 rows do
// not meet in one.
constexpr int ROWS = FP8 ? 64 : 32, SLOTS = 5, FETCHERS = 4, ROWS_EACH = ROWS / FETCHERS;
constexpr int ROW_BYTES = FP8 ? ENTRY : 2 * ENTRY, TOGETHER = FP8 ? 2 : 1, COPY_PITCH = TOGETHER * ROW_BYTES + 16;
constexpr int TILE = ROWS / TOGETHER * COPY_PITCH, QUERY_PITCH = 2 * ENTRY + 16;
constexpr int FETCHER_REGS = 56, WORKER_REGS = 224;
constexpr int AHEAD = FP8 ? 0 : 4;  // Tiles that are sent for before what this kernel waits for has ended; of fp8 it did not pay.
constexpr int SCORES = 2 * 4 * 32;           // Of bf16: of 4 floats, for one tile.
constexpr int WEIGHT_PITCH = 2 * ROWS + 16;  // Of fp8: bytes from a head's weights to the next one's.

__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
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

__device__ void fetch(void* to, const void* from, int bytes, uint64_t& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(&barrier)) : "memory");
}
// Rows of the cache. With ONCE they are the first to leave the L2 cache, and what is read again stays.
__device__ void fetch_rows(void* to, const void* from, int bytes, uint64_t& barrier) {
#if ONCE
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(&barrier)), "l"(policy) : "memory");
#else
  fetch(to, from, bytes, barrier);
#endif
}
// What this thread has read of shared memory is read before a bulk copy may overwrite it: see attn_res_mix.cu.
__device__ void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where a row of a tile is.
__device__ int place_of(int row) { return row / TOGETHER * COPY_PITCH + row % TOGETHER * ROW_BYTES; }

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
  int n, chunk, rows, whole;
};
struct Memory {
  uint8_t ring[SLOTS][TILE];
  uint8_t queries[HEADS * QUERY_PITCH];
  Between between;
  Item item;
  uint64_t full[SLOTS], empty[SLOTS], given, taken;
};
__device__ void fetch_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ void wait_for_launch() { asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory"); }
// Finds a program's first chunk and its page by the lengths and the page table as they are, sends for its first tiles as
// far as the L2 cache, waits for the launch in front, and says whether the chunk has some rows and the lengths were right.
// What is in L2 is still seen to change. Where they were not, all starts anew.
__device__ bool find_ahead(const Arguments& a, Walk<ROWS>& at, int mine, int& page) {
  const int lane = threadIdx.x & 31, guessed = Walk<ROWS>::guess(a);
  bool right = at.find(a, blockIdx.x, guessed) && at.first < at.last;
  const int* table = a.table + at.n * a.table_row;
  if (right && a.aligned) {
    const int row = at.first + lane * ROWS;
    if (mine == 0 && lane < AHEAD && row < at.last) {
      const int likely = now_of(table + row / a.page);
      if (likely >= 0 && likely < a.pages) fetch_to_l2(a.cache + likely * a.page_bytes + row % a.page * ROW_BYTES, ROWS * ROW_BYTES);
    }
    if (mine == 1 && lane < a.heads) fetch_to_l2(a.q + at.n * a.q_row + lane * a.q_head, 2 * ENTRY);
  }
  wait_for_launch();
  if (right) {
    page = table[at.first / a.page];
    right = __all_sync(ALL, (lane < a.count ? a.lengths[lane] : 0) == guessed);
  }
  if (!right) at = Walk<ROWS>();
  return right;
}
// Warps that fetch have some rows of every tile each, a lane a copy: one takes some fifty cycles to issue. Rows beyond
// the last become zeros; where rows are not aligned to 16 bytes they are copied byte by byte. The first warp also hands
// out chunks with their queries, of which those beyond the last head are never used.
__device__ void fetch_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, mine = threadIdx.x / 32 - WARPS, r = mine * ROWS_EACH + lane * TOGETHER;
  Walk<ROWS> at;
  Place<SLOTS> to{0, 1};
  uint32_t parity = 1;
  int page = 0;
  bool known = AHEAD && find_ahead(a, at, mine, page);
  for (int item = blockIdx.x;; item += gridDim.x, known = false) {
    const bool more = known || at.find(a, item), some = more && at.first < at.last;
    if (mine == 0) {
      wait(m.taken, parity);
      parity ^= 1;
      if (lane == 0) {
        m.item = more ? Item{at.n, at.chunk, at.last - at.first, at.last - at.first == at.length} : Item{-1, 0, 0, 0};
        expect(m.given, some ? a.heads * 2 * ENTRY : 0);
      }
      __syncwarp();
      if (some && lane < a.heads) {
        fetch(m.queries + lane * QUERY_PITCH, a.q + at.n * a.q_row + lane * a.q_head, 2 * ENTRY, m.given);
      }
    }
    if (!more) return;
    const int* table = a.table + at.n * a.table_row + at.first / a.page;
    int in_page = at.first % a.page;
    if (!known) page = some ? *table : 0;
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
      uint8_t* here = m.ring[to.slot] + place_of(r);
      const int bytes = min(max(rows - r, 0), TOGETHER) * ROW_BYTES;
      if (rows < ROWS || !a.aligned) {
        if (lane < ROWS_EACH / TOGETHER) {
          for (int byte = bytes; byte < TOGETHER * ROW_BYTES; byte += 16) *(uint4*)(here + byte) = make_uint4(0, 0, 0, 0);
          for (int byte = 0; !a.aligned && byte < bytes; byte++) here[byte] = from[byte];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
      }
      const int copied = a.aligned ? min(max(rows - mine * ROWS_EACH, 0), ROWS_EACH) : 0;
      if (lane == 0) expect(m.full[to.slot], copied * ROW_BYTES);
      __syncwarp();
      if (lane * TOGETHER < copied) fetch_rows(here, from, bytes, m.full[to.slot]);
      to.next();
    }
  }
}
