// Positions and cache rows of a step: programs share out each sequence, and the padding at the end.
using int64_t = long long;
#define ALL 0xffffffffu

constexpr int THREADS = 128, WARPS = THREADS / 32;

struct Arguments {
  const int *contexts, *news, *table;
  int64_t *positions, *rows;
  int *offsets, *lengths;
  int64_t context_step, new_step, table_row, table_step;
  int count, tokens, page, unused;
};

extern "C" __global__ void __launch_bounds__(THREADS) step_metadata(Arguments a) {
  __shared__ int sums[WARPS];
  const int n = blockIdx.x, piece = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int context = n < a.count ? a.contexts[n * a.context_step] : 0, fresh = n < a.count ? a.news[n * a.new_step] : 0;
  int before = 0;
  for (int other = threadIdx.x; other < n; other += THREADS) before += a.news[other * a.new_step];
#pragma unroll
  for (int d = 16; d; d /= 2) before += __shfl_xor_sync(ALL, before, d);
  if (lane == 0) sums[warp] = before;
  __syncthreads();
  before = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) before += sums[w];
  if (piece == 0 && threadIdx.x == 0) {
    a.offsets[n] = before;
    if (n < a.count) a.lengths[n] = context + fresh;
  }
  const int first = piece * THREADS + threadIdx.x, step = gridDim.y * THREADS;
  if (n < a.count) {
    const int* table = a.table + n * a.table_row;
    for (int i = first; i < fresh; i += step) {
      const int position = context + i;
      a.positions[before + i] = position;
      a.rows[before + i] = (int64_t)table[position / a.page * a.table_step] * a.page + position % a.page;
    }
  } else {
    for (int at = before + first; at < a.tokens; at += step) {
      a.positions[at] = 0;
      a.rows[at] = -1;
    }
  }
}
