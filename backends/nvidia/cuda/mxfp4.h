// MXFP4 weights as `experts.py` packs them, to bfloat16 operands of tensor cores.
#pragma once

constexpr int UNIT = 1088;  // bytes: 16 rows x 128 columns of codes, and the rows' scale words
constexpr float RESCALE = 65536.f;  // undoes the 2^-16 of decoded weights

// Code J of each half of a word as bfloat16 bits: a subnormal number, 2^-126 of the code's value.
template <int J> __device__ __forceinline__ uint32_t fields(uint32_t w) {
  if (J == 0) return w & 0x81C081C0u;
  if (J == 1) return (w << 6) & 0x81C081C0u;
  if (J == 2) return ((w << 4) & 0x81808180u) | ((w >> 4) & 0x00400040u);
  return (w << 10 | w >> 22) & 0x81C081C0u;
}
// The power of two of byte J of a scale word, twice.
template <int J> __device__ __forceinline__ uint32_t factor(uint32_t s) {
  return __byte_perm(s, 0, 0x4040 | J | J << 8) << 7;
}

// A thread's part of a unit: four words and a scale word of rows g and g + 8.
struct Words {
  uint4 lo, hi;
  uint32_t s0, s1;
};
// A unit in shared memory.
__device__ __forceinline__ Words words_at(uint32_t unit) {
  const int lane = threadIdx.x & 31;
  uint32_t scale = unit + 1024 + (lane >> 2) * 4;
  return {read4(unit + lane * 16), read4(unit + 512 + lane * 16), read1(scale), read1(scale + 32)};
}
// Columns 32 J + 16 H to 32 J + 16 H + 15 as a 16 x 16 operand.
template <int J, int H> __device__ __forceinline__ void decode(const Words& w, uint32_t (&a)[4]) {
  uint32_t f0 = factor<J>(w.s0), f1 = factor<J>(w.s1);
  a[0] = times(fields<J>(H ? w.lo.z : w.lo.x), f0), a[1] = times(fields<J>(H ? w.hi.z : w.hi.x), f1);
  a[2] = times(fields<J>(H ? w.lo.w : w.lo.y), f0), a[3] = times(fields<J>(H ? w.hi.w : w.hi.y), f1);
}
