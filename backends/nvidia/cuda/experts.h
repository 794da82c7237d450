// What the kernels of routed experts share.
#pragma once
#include "mxfp4.h"

// Of one GEMM. Where `tile_expert` is null every choice is a tile of its own, and nothing is sorted.
struct Gemm {
  const __nv_bfloat16* x;  // rows of tokens in the first GEMM, of choices in the second
  const uint32_t* w;
  const uint32_t* scales;
  void* out;               // first: hidden [choices, n]; second: fp32 or bf16 parts [choices, n], or the sum [tokens, n]
  const float* weights;    // of choices, for the second
  const int* ids;
  const int* tile_expert;
  const int* tile_start;   // tile i is choices rows[start .. start + length - 1]
  const int* tile_length;
  const int* rows;
  const int* tiles;
  long x_stride, weights_stride, ids_stride;
  int top_k, k, n;         // n: columns of gate, or of the output
  float beta, linear_beta;
};

__device__ __forceinline__ float tanh_of(float x) {
  float square = x * x;
  float series = 2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835));
  float near = x + x * square * (square * series - 1.f / 3);
  float decay = __expf(-2 * fabsf(x));
  float far = __fdividef(1 - decay, 1 + decay);
  return square < 0.04f ? near : copysignf(far, x);
}
// SiTU, or SwiGLU where beta is 0.
__device__ __forceinline__ float activation(float gate, float up, float beta, float linear_beta) {
  float sigmoid = 1 / (1 + __expf(-gate));
  if (beta == 0) return gate * sigmoid * up;
  return beta * tanh_of(gate / beta) * sigmoid * (linear_beta * tanh_of(up / linear_beta));
}
__device__ __forceinline__ void put(float* to, float v) { *to = v; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float v) { *to = __float2bfloat16(v); }
