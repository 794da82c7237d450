// What all MLA decoding shares: how the arguments lie, how a program finds its chunks, and waiting for memory.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#define INFINITE __int_as_float(0x7f800000)
#define ALL 0xffffffffu
constexpr int RANK = 512, ENTRY = 576, WARPS = 8, WORKERS = WARPS * 32;

struct Arguments {
  const uint16_t* q;
  const uint8_t* cache;
  const int *table, *lengths;
  uint16_t* out;
  float *partial, *lse;
  long long q_row, q_head, page_bytes, table_row;
  int count, heads, page, max_splits, least, most, aligned, blocks;
  float scale;
  int pages, columns;  // Of the cache, and of the page table.
};

__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ uint32_t bf16_pair(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
// The largest, and the sum, of what eight warps found.
__device__ float largest_of(const float4 (&x)[2]) {
  return fmaxf(fmaxf(fmaxf(x[0].x, x[0].y), fmaxf(x[0].z, x[0].w)), fmaxf(fmaxf(x[1].x, x[1].y), fmaxf(x[1].z, x[1].w)));
}
__device__ float sum_of(const float4 (&x)[2]) {
  return x[0].x + x[0].y + (x[0].z + x[0].w) + (x[1].x + x[1].y + (x[1].z + x[1].w));
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
__device__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// A sequence is cut into chunks by its own length alone. An empty one is one empty chunk.
__device__ int chunks_of(int length, const Arguments& a) { return max(min((length + a.least - 1) / a.least, a.most), 1); }

// What may still change.
__device__ int now_of(const int* from) {
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(from));
  return r;
}

// Finds the sequence and chunk of ever later items, with 32 sequences in hand. Chunks differ by a tile of ROWS at most.
template <int ROWS>
struct Walk {
  int from = 0, before = 0;
  int n, first, last, length, chunk;
  __device__ bool find(const Arguments& a, int item) {
    const int lane = threadIdx.x & 31;
    while (from < a.count)
      if (find(a, item, from + lane < a.count ? a.lengths[from + lane] : 0)) return true;
    return false;
  }
  // Among the sequences in hand, of which a lane's has `its` rows; else on to the next ones.
  __device__ bool find(const Arguments& a, int item, int its) {
    const int lane = threadIdx.x & 31, its_chunks = from + lane < a.count ? chunks_of(its, a) : 0;
    int sum = its_chunks;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(ALL, sum, d);
      if (lane >= d) sum += other;
    }
    const int all = __shfl_sync(ALL, sum, 31);
    if (item >= before + all) {
      before += all;
      from += 32;
      return false;
    }
    const int at = __popc(__ballot_sync(ALL, before + sum <= item));
    const unsigned chunks = __shfl_sync(ALL, its_chunks, at);
    n = from + at;
    length = __shfl_sync(ALL, its, at);
    chunk = item - before - __shfl_sync(ALL, sum - its_chunks, at);
    // Tiles times the chunk over the chunks, in 32 bits.
    const unsigned tiles = (length + ROWS - 1) / ROWS, each = tiles / chunks, rest = tiles % chunks;
    first = (each * chunk + rest * chunk / chunks) * ROWS;
    last = min((int)(each * (chunk + 1) + rest * (chunk + 1) / chunks) * ROWS, length);
    return true;
  }
  // The first sequences' lengths as they are while what this kernel waits for may still write them.
  static __device__ int guess(const Arguments& a) {
    const int lane = threadIdx.x & 31;
    return lane < a.count ? min(max(now_of(a.lengths + lane), 0), a.columns * a.page) : 0;
  }
};

// A slot of a ring, and the parity of its turn.
template <int SLOTS>
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
