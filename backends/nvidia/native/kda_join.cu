// The states that segments of KDA begin with: what each makes of a state [V, K], times it, and what it adds (`carry` of
// kda_sweep.cu). Products of fp32 in three of tf32.
using uint8_t = unsigned char;
using uint32_t = unsigned;
using Address = uint32_t;
__device__ Address address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void copy16(Address to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ void wait_for_the_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ void let_the_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// ----
constexpr int D = 128, THREADS = 256;
constexpr int TURN = 136, ROW = 132;  // Rows in shared memory, padded: what a warp reads meets no bank twice.

struct Arguments {
  const float* state;
  const int *slots, *starts;
  const uint8_t* known;
  float* begins;
  const float* carry;
  long long state_stride;
  int heads, length;
};

__device__ void bring_turn(Address to, const float* from) {
#pragma unroll
  for (int i = 0; i < D * D / 4 / THREADS; i++) {
    const int piece = i * THREADS + threadIdx.x;
    copy16(to + (piece / 32 * TURN + piece % 32 * 4) * 4, from + piece * 4);
  }
}
__device__ void split(float x, uint32_t& big, uint32_t& rest) {
  big = __float_as_uint(x) & 0xffffe000u;
  rest = __float_as_uint(x - __uint_as_float(big));
}

// 16 rows of the state one head of one sequence has at the start of each segment, where there is more than one. A warp
// has 16 channels of it.
extern "C" __global__ void __launch_bounds__(THREADS, 1) join(const Arguments a) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int part = blockIdx.x % 8, h = blockIdx.x / 8, n = blockIdx.y, lane = threadIdx.x % 32, c0 = threadIdx.x / 32 * 16;
  const int start = a.starts[n], end = a.starts[n + 1], row = lane / 4, pair = lane % 4 * 2;
  wait_for_the_kernel_before();
  let_the_next_kernel_start();
  const long long slot = a.slots[n];
  if (slot == 0 || end - start <= a.length) return;
  const int first = start / a.length + n, turns = (end - start + a.length - 1) / a.length - 1;
  const float* state = a.state + slot * a.state_stride + (long long)h * D * D + part * 16 * D;
  float* rows = (float*)(memory + 2 * D * TURN * 4);  // Twice: of this segment, of the next.
  const Address turn = address(memory);
  const long long step = (long long)a.heads * D * D;
  float* begins = a.begins + ((long long)first * a.heads + h) * D * D + part * 16 * D;
  const float* carried = a.carry + ((long long)first * a.heads + h) * 2 * D * D;
  bring_turn(turn, carried + D * D);
  commit();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int piece = i * THREADS + threadIdx.x, at = piece / 32 * D + piece % 32 * 4;
    const float4 x = a.known[n] ? *(const float4*)(state + at) : make_float4(0, 0, 0, 0);
    *(float4*)(rows + piece / 32 * ROW + piece % 32 * 4) = x;
    *(float4*)(begins + at) = x;
  }
  for (int i = 0; i < turns; i++) {
    if (i + 1 < turns) bring_turn(turn + (i + 1) % 2 * (D * TURN * 4), carried + 2 * step + D * D);
    commit();
    float sums[2][4];
    const float* more = carried + part * 16 * D + c0 + pair;
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float2 v = *(const float2*)(more + (row + e * 8) * D + c * 8);
        sums[c][2 * e] = v.x, sums[c][2 * e + 1] = v.y;
      }
    arrived<1>();
    __syncthreads();
    const float* held = rows + i % 2 * (16 * ROW);
    const float* right = (const float*)memory + i % 2 * (D * TURN) + c0 + row;
#pragma unroll 4
    for (int k = 0; k < D; k += 8) {
      uint32_t big[4], rest[4];
#pragma unroll
      for (int e = 0; e < 4; e++) split(held[(row + e % 2 * 8) * ROW + k + lane % 4 + e / 2 * 4], big[e], rest[e]);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        uint32_t b0, b1, r0, r1;
        split(right[(k + lane % 4) * TURN + c * 8], b0, r0);
        split(right[(k + lane % 4 + 4) * TURN + c * 8], b1, r1);
        multiply_tf32(sums[c], rest, b0, b1);
        multiply_tf32(sums[c], big, r0, r1);
        multiply_tf32(sums[c], big, b0, b1);
      }
    }
    begins += step;
    carried += 2 * step;
    float* next = rows + (i + 1) % 2 * (16 * ROW);
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int at = c0 + c * 8 + pair;
        const float2 v = make_float2(sums[c][2 * e], sums[c][2 * e + 1]);
        *(float2*)(next + (row + e * 8) * ROW + at) = v;
        *(float2*)(begins + (row + e * 8) * D + at) = v;
      }
    __syncthreads();
  }
}
