// CUDA on a CPU, in place of the `ptx.h` of the kernels: a block's threads are fibers that take turns, and what copies
// or multiplies in the background does so at once. Finds wrong indices, counts and barriers; not missing fences.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define SHARED_MEMORY(name) char* name = emulated::memory
#define EMULATED 1

using std::max;
using std::min;
struct Dim {
  int x;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

namespace emulated {

inline __attribute__((aligned(1024))) char memory[1 << 20];
struct Fiber {
  ucontext_t context;
  char* stack;
  bool done;
};
struct Meeting {
  int came = 0, round = 0;
};
inline std::vector<Fiber> fibers;
inline ucontext_t home;
inline int current;
inline std::function<void()> body;
inline Meeting block, warps[32], groups[4];
inline uint64_t mail[32][32][4];
constexpr int STACK = 1 << 17;
constexpr long PATIENCE = 1 << 22;

inline void pass() { swapcontext(&fibers[current].context, &home); }
inline void enter() {
  body();
  fibers[current].done = true;
  for (;;) pass();
}
inline void meet(Meeting& m, int count) {
  int round = m.round;
  if (++m.came == count) {
    m.came = 0, m.round++;
    return;
  }
  while (m.round == round) pass();
}
inline int lane() { return current & 31; }
inline void warp() { meet(warps[current / 32], 32); }
inline char* at(uint32_t address) { return memory + (int32_t)address; }
inline float wide(uint32_t bits) {
  float f;
  bits <<= 16;
  memcpy(&f, &bits, 4);
  return f;
}
[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "block %d: %s\n", blockIdx.x, what);
  abort();
}
inline void run_block(int threads) {
  block = {};
  for (auto& w : warps) w = {};
  for (auto& g : groups) g = {};
  memset(memory, 0x7f, sizeof memory);
  fibers.resize(threads);
  for (auto& f : fibers) {
    if (!f.stack) f.stack = (char*)malloc(STACK);
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  long rounds = 0;
  for (int left = threads; left;) {
    left = 0;
    for (int i = 0; i < threads; i++) {
      if (fibers[i].done) continue;
      current = i, threadIdx = {i};
      swapcontext(&home, &fibers[i].context);
      left += !fibers[i].done;
    }
    if (++rounds > PATIENCE) fail("its threads wait for each other");
  }
}

}  // namespace emulated

inline float __uint_as_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline __nv_bfloat16 __float2bfloat16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return {(uint16_t)(std::isnan(f) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
template <class T> T __ldg(const T* p) { return *p; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t v = (uint64_t)b << 32 | a;
  uint32_t o = 0;
  for (int i = 0; i < 4; i++) o |= (uint32_t)(v >> ((s >> 4 * i & 7) * 8) & 255) << 8 * i;
  return o;
}
inline void __syncthreads() { emulated::meet(emulated::block, blockDim.x); }
inline void __syncwarp() { emulated::warp(); }
template <class T> T __shfl_sync(unsigned, T v, int from) {
  auto& mail = emulated::mail[emulated::current / 32];
  memcpy(mail[emulated::lane()], &v, sizeof v);
  emulated::warp();
  memcpy(&v, mail[from & 31], sizeof v);
  emulated::warp();
  return v;
}
template <class T> T __shfl_up_sync(unsigned all, T v, int by) {
  return __shfl_sync(all, v, max(emulated::lane() - by, 0));
}
inline unsigned __ballot_sync(unsigned all, bool v) {
  unsigned o = 0;
  for (int i = 0; i < 32; i++) o |= (unsigned)__shfl_sync(all, (int)v, i) << i;
  return o;
}
inline int atomicAdd(int* p, int v) {
  int before = *p;
  *p += v;
  return before;
}

inline uint32_t smem(const void* p) { return (uint32_t)((const char*)p - emulated::memory); }
inline void copy16(uint32_t to, const void* from, int bytes = 16) {
  memset(emulated::at(to), 0, 16);
  memcpy(emulated::at(to), from, bytes);
}
inline void commit_copies() {}
template <int N> void wait_copies() {}
inline uint4 read4(uint32_t at) {
  if (at & 15) emulated::fail("16 bytes from an odd place");
  uint4 v;
  memcpy(&v, emulated::at(at), 16);
  return v;
}
inline uint2 read2(uint32_t at) {
  uint2 v;
  memcpy(&v, emulated::at(at), 8);
  return v;
}
inline uint32_t read1(uint32_t at) {
  uint32_t v;
  memcpy(&v, emulated::at(at), 4);
  return v;
}
inline void write4(uint32_t at, uint4 v) { memcpy(emulated::at(at), &v, 16); }
inline uint4 read_once(const uint32_t* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline uint2 read_once2(const uint32_t* p) {
  uint2 v;
  memcpy(&v, p, 8);
  return v;
}
inline uint4 matrices(uint32_t at) {
  uint32_t v[4];
  for (int m = 0; m < 4; m++) {
    uint32_t row = __shfl_sync(~0u, at, m * 8 + emulated::lane() / 4);
    memcpy(&v[m], emulated::at(row) + emulated::lane() % 4 * 4, 4);
  }
  return {v[0], v[1], v[2], v[3]};
}
template <int HALF> uint32_t times(uint32_t a, uint32_t b) {
  float factor = emulated::wide(HALF ? b >> 16 : b & 0xffff);
  uint32_t low = __float2bfloat16(emulated::wide(a & 0xffff) * factor).bits;
  return low | (uint32_t)__float2bfloat16(emulated::wide(a >> 16) * factor).bits << 16;
}
inline float fast_tanh(float x) { return tanhf(x); }
inline float fast_exp2(float x) { return exp2f(x); }
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& mail = emulated::mail[emulated::current / 32];
  const int l = emulated::lane();
  mail[l][0] = (uint64_t)a[1] << 32 | a[0], mail[l][1] = (uint64_t)a[3] << 32 | a[2], mail[l][2] = (uint64_t)b1 << 32 | b0;
  emulated::warp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      uint64_t left = mail[l / 4 * 4 + k % 8 / 2][k / 8] >> (i / 2 * 32);
      uint64_t right = mail[(l % 4 * 2 + i % 2) * 4 + k % 8 / 2][2] >> (k / 8 * 32);
      c[i] += emulated::wide(left >> k % 2 * 16 & 0xffff) * emulated::wide(right >> k % 2 * 16 & 0xffff);
    }
  emulated::warp();
}

struct Barrier {
  int16_t count, left;
  int phase;
};
inline Barrier& barrier_at(uint32_t bar) { return *(Barrier*)emulated::at(bar); }
inline void barrier_init(uint32_t bar, int count) { barrier_at(bar) = {(int16_t)count, (int16_t)count, 0}; }
inline void barriers_ready() {}
inline void barrier_arrive(uint32_t bar) {
  Barrier& b = barrier_at(bar);
  if (b.left <= 0) emulated::fail("a barrier nobody made");
  if (--b.left == 0) b.left = b.count, b.phase ^= 1;
}
inline void copies_arrive(uint32_t bar) { barrier_arrive(bar); }
inline void barrier_wait(uint32_t bar, int parity) {
  while (barrier_at(bar).phase == parity) emulated::pass();
}

inline uint64_t descriptor(uint32_t at) {
  if (at & 1023) emulated::fail("a tile is not aligned");
  return at >> 4;
}
inline void write_matrix(uint32_t at, uint32_t v, int m) {
  for (int j = 0; j < 2; j++) {  // this lane's two elements are of rows 2 t and 2 t + 1 and column g
    uint32_t row = __shfl_sync(~0u, at, m * 8 + emulated::lane() % 4 * 2 + j);
    if (row & 15) emulated::fail("a matrix's row is not aligned");
    memcpy(emulated::at(row) + emulated::lane() / 4 * 2, (const char*)&v + 2 * j, 2);
  }
}
inline void write_matrices(uint32_t at, uint32_t a, uint32_t b) { write_matrix(at, a, 0), write_matrix(at, b, 1); }
inline void write_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  write_matrix(at, a, 0), write_matrix(at, b, 1), write_matrix(at, c, 2), write_matrix(at, d, 3);
}
inline uint32_t pair(float low, float high) {
  return __float2bfloat16(low).bits | (uint32_t)__float2bfloat16(high).bits << 16;
}
inline void meet(int which) { emulated::meet(emulated::groups[which], 128); }
template <int THREADS> void meet(int which) { emulated::meet(emulated::groups[which], THREADS); }
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
inline void see_copies() {}
template <int N> void more_registers() {}
template <int N> void fewer_registers() {}
template <int N> void hold(float (&)[N]) {}
inline void late(int&) {}
inline void late(uint32_t&) {}
inline void launch_next() {}
inline void wait_for_launch() {}

constexpr int cudaSharedmemCarveoutDefault = -1;
template <auto KERNEL, int SHARE = cudaSharedmemCarveoutDefault, typename... A>
int launch(int grid, int threads, int bytes, bool, void*, A... args) {
  if (bytes > (int)sizeof emulated::memory) emulated::fail("too much shared memory");
  gridDim = {grid}, blockDim = {threads};
  emulated::body = [=] { KERNEL(args...); };
  for (int b = 0; b < grid; b++) blockIdx = {b}, emulated::run_block(threads);
  return 0;
}
