// The launches of routed experts, for `experts.py`. Each returns CUDA's error code.
#include <ptx.h>

#include "experts_sort.h"
#include "experts_stream.h"
#include "experts_sum.h"
#include "experts_tall.h"

namespace {

// Of the kernels for few tokens: 100 of 228 KB, which hold two blocks of the first GEMM and one of the second.
constexpr int FEW_SHARE = 44;

template <bool GATE, int NT, int P, int KW, int RW, int D, int WARPS>
int stream_launch(const Gemm& a, int tiles, void* stream) {
  constexpr int bytes = SPACE<NT, 2 * P, KW, RW>, rows = 16 * RW * P * (GATE ? 1 : 2);
  int parts = (a.n + rows - 1) / rows;
  constexpr int share = NT ? cudaSharedmemCarveoutDefault : FEW_SHARE;
  return launch<stream_kernel<GATE, NT, P, KW, RW, D, WARPS>, share>(
      tiles * parts, KW * RW * 32, bytes, true, stream, a, parts);
}
template <int NT, int W, int D> int flat_launch(const Gemm& a, int tiles, int half, int parts, void* stream) {
  int bytes = (a.k + 127) / 128 * NT * 2048;
  if (half) {
    bytes += W * TURNED;
    return launch<flat_kernel<NT, W, D, __nv_bfloat16>>(tiles * parts, W * 32, bytes, true, stream, a, parts);
  }
  return launch<flat_kernel<NT, W, D, float>>(tiles * parts, W * 32, bytes, true, stream, a, parts);
}
template <int W, int D> int sum_launch(const Gemm& a, int tokens, int each, void* stream) {
  int bytes = W * D * UNIT + 16 + a.top_k * ((a.k + 127) / 128 * 256 + 128);
  return launch<sum_kernel<W, D>, FEW_SHARE>(tokens * ((a.n / 16 + each - 1) / each), W * 32, bytes, true, stream, a, each);
}
template <bool GATE> int tall_launch(const Gemm& a, int wide, int repeat, int blocks, void* stream) {
  if (wide) return launch<tall_kernel<GATE, true>>(blocks, 384, TALL_BYTES<GATE, true>, true, stream, a, repeat);
  return launch<tall_kernel<GATE, false>>(blocks, 384, TALL_BYTES<GATE, false>, true, stream, a, repeat);
}

}  // namespace

extern "C" {

int experts_sort(const Choices* a, void* stream) {
  int grid = (a->count + SORTED - 1) / SORTED, bytes = (a->experts + 64) * 4;
  if (grid == 1) return launch<sort_kernel<WHOLE>>(1, SORT_THREADS, bytes, true, stream, *a);
  if (int code = launch<sort_kernel<COUNT>>(grid, SORT_THREADS, bytes, true, stream, *a)) return code;
  return launch<sort_kernel<PLACE>>(grid, SORT_THREADS, bytes, true, stream, *a);
}
int experts_combine(
    const void* parts, int half, const int* ids, long stride, int tokens, int top_k, int n, void* out, void* stream) {
  int grid = tokens * ((n + 511) / 512), bytes = (top_k + 1) * 4;
  auto to = (__nv_bfloat16*)out;
  if (half)
    return launch<combine_kernel<__nv_bfloat16>>(
        grid, 128, bytes, true, stream, (const __nv_bfloat16*)parts, ids, stride, top_k, n, to);
  return launch<combine_kernel<float>>(grid, 128, bytes, true, stream, (const float*)parts, ids, stride, top_k, n, to);
}
int experts_sum(const Gemm* a, int tokens, void* stream) { return sum_launch<16, 2>(*a, tokens, 1, stream); }
int experts_gate_direct(const Gemm* a, int tiles, void* stream) {
  return stream_launch<true, 0, 1, 7, 1, 1, 28>(*a, tiles, stream);
}
// Tiles of at most 8 choices, or of 16.
int experts_gate_8(const Gemm* a, int tiles, void* stream) {
  return stream_launch<true, 1, 2, 4, 1, 1, 20>(*a, tiles, stream);
}
int experts_gate_16(const Gemm* a, int tiles, void* stream) {
  return stream_launch<true, 2, 2, 1, 4, 1, 16>(*a, tiles, stream);
}
int experts_flat_8(const Gemm* a, int tiles, int half, void* stream) {
  return flat_launch<1, 4, 3>(*a, tiles, half, 4, stream);
}
int experts_flat_16(const Gemm* a, int tiles, int half, void* stream) {
  return flat_launch<2, 4, 2>(*a, tiles, half, 4, stream);
}
int experts_deep_8(const Gemm* a, int tiles, void* stream) {
  return stream_launch<false, 1, 2, 4, 1, 1, 20>(*a, tiles, stream);
}
int experts_deep_16(const Gemm* a, int tiles, void* stream) {
  return stream_launch<false, 2, 2, 1, 4, 1, 16>(*a, tiles, stream);
}
int experts_gate_tall(const Gemm* a, int wide, int repeat, int blocks, void* stream) {
  return tall_launch<true>(*a, wide, repeat, blocks, stream);
}
int experts_down_tall(const Gemm* a, int wide, int repeat, int blocks, void* stream) {
  return tall_launch<false>(*a, wide, repeat, blocks, stream);
}

}  // extern "C"
