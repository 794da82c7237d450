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
// The powers of two of a scale word, and codes times them.
struct Factors {
  uint32_t even, odd;  // of bytes 0 and 2, and of bytes 1 and 3
  __device__ __forceinline__ explicit Factors(uint32_t s) : even(s << 7 & 0x7F807F80u), odd(s >> 1 & 0x7F807F80u) {}
  template <int J> __device__ __forceinline__ uint32_t of(uint32_t codes) const {
    return times<J / 2>(fields<J>(codes), J & 1 ? odd : even);
  }
};

// A thread's part of a unit: four words and a scale word of rows g and g + 8.
struct Words {
  uint4 lo, hi;
  uint2 s;
};
// A unit in shared memory.
__device__ __forceinline__ Words words_at(uint32_t unit) {
  const int lane = threadIdx.x & 31;
  return {read4(unit + lane * 16), read4(unit + 512 + lane * 16), read2(unit + 1024 + (lane >> 2) * 8)};
}
// Columns 32 J + 16 H to 32 J + 16 H + 15 as a 16 x 16 operand.
template <int J, int H>
__device__ __forceinline__ void decode(const Words& w, const Factors (&f)[2], uint32_t (&a)[4]) {
  a[0] = f[0].of<J>(H ? w.lo.z : w.lo.x), a[1] = f[1].of<J>(H ? w.hi.z : w.hi.x);
  a[2] = f[0].of<J>(H ? w.lo.w : w.lo.y), a[3] = f[1].of<J>(H ? w.hi.w : w.hi.y);
}
