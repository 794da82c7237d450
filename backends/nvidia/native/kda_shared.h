// A head of one row of KDA's decoding by a cluster of blocks.
//
// Each block mixes all of the inputs and has a share of the rows of the state. Every warp tells every block the sum of its
// results' squares; by then its block has read the history, which the first block writes once it has heard them all, and
// no block ends before it has.
//
// What lies between the wait and the result is the time of the whole: every address is computed before it.
template <int BLOCKS, int THREADS_EACH>
__device__ void by_cluster(const Arguments& a) {
  constexpr int SHARE = D / BLOCKS, ROWS = SHARE * 8 / THREADS_EACH, WARPS = THREADS_EACH / 32, TURNS = 256 / THREADS_EACH;
  static_assert(ROWS >= 1 && ROWS <= 8, "eight lanes share a row, and each ends with at most one row's result");
  __shared__ __align__(16) float token[4 * D];
  __shared__ __align__(16) float squares[BLOCKS * WARPS];
  __shared__ uint64_t told;
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, row = warp * 4 * ROWS + lane / 8, j = lane % 8, me = rank();
  const int h = blockIdx.x / BLOCKS, n = blockIdx.y;
  if (t == 0) {
    make_barrier(address(&told));
    expect_bytes(address(&told), sizeof squares);
  }
  arrive_in_cluster();
  const int guess = peek(a.slots + n);
  const long long first = guess > 0 && guess < a.places ? guess : 0;
  const int channels = 3 * a.heads * D;
  void* x[TURNS][4];    // The newest value, then the history; of the gate its rate comes second.
  void* tap[TURNS][4];  // Of the gate the first is its bias.
#pragma unroll
  for (int m = 0; m < TURNS; m++) {
    const int all = t + m * THREADS_EACH, kind = all / 64, at = h * D + all % 64 * 2, channel = kind * a.heads * D + at;
    if (kind < 3) {
      x[m][0] = (void*)(a.qkv + n * a.qkv_stride + channel);
      uint16_t* history = a.conv + first * a.conv_stride + channel;
#pragma unroll
      for (int i = 0; i < 3; i++) x[m][1 + i] = history + i * channels;
#pragma unroll
      for (int i = 0; i < 4; i++) tap[m][i] = (void*)(a.taps + (long long)i * channels + channel);
    } else {
      x[m][0] = (void*)(a.raw_gate + n * a.gate_stride + at);
      x[m][1] = x[m][2] = x[m][3] = (void*)(a.rate + h);
      tap[m][0] = tap[m][1] = tap[m][2] = tap[m][3] = (void*)(a.bias + at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      computed(x[m][i]), computed(tap[m][i]);
      if (lane % 16 == 0) expect_soon(tap[m][i]);
      if (lane == 0) expect_soon(x[m][i]);
    }
  }
  // Of eight lanes each of the first `ROWS` ends with one row's result.
  const int mine = j % ROWS, c = h * D + me * SHARE + row + 4 * mine;
  const bool writes = j < ROWS;
  const uint16_t *strength_at = a.beta + n * a.beta_stride + h, *gate_at = a.out_gate + n * a.out_gate_stride + c;
  const float* norm_at = a.norm + c % D;
  uint16_t* to = a.out + (long long)n * a.heads * D + c;
  float4* tile = (float4*)(a.state + first * a.state_stride + ((long long)h * D + me * SHARE + row) * D) + j;
  if (t == 0) {
    expect_soon(tile, SHARE * D * 4);
    expect_soon(strength_at);
    expect_soon(gate_at);
    expect_soon(norm_at);
  }
  computed(strength_at), computed(gate_at), computed(norm_at), computed(to), computed(tile);
  wait_for_cluster();  // The other blocks run, and their barriers expect numbers.
  wait_for_the_kernel_before();
  // Not earlier, or the blocks of many kernels wait at once: 3.3 us in place of 2.75 for 12 heads of two rows.
  let_the_next_kernel_start();
  uint32_t words[TURNS][4];
  float4 s[ROWS][4];
  auto take_words = [&] {
#pragma unroll
    for (int m = 0; m < TURNS; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) words[m][i] = load(x[m][i]);
  };
  auto take_state = [&] {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[r][i] = load4(tile + 4 * r * (D / 4) + i * 8);
  };
  const int slot = peek(a.slots + n);
  take_words();
  Inputs inputs[TURNS];
#pragma unroll
  for (int m = 0; m < TURNS; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) inputs[m].taps[i] = load2(tap[m][i]);
  const float norm = __uint_as_float(load(norm_at));
  const uint16_t strength = load_half(strength_at), gate = load_half(gate_at);
  take_state();
  if (slot != first && slot != 0) {
    tile += (slot - first) * a.state_stride / 4;
#pragma unroll
    for (int m = 0; m < TURNS; m++)
#pragma unroll
      for (int i = 1; i < 4; i++)
        if (t + m * THREADS_EACH < 192) x[m][i] = (uint16_t*)x[m][i] + (slot - first) * a.conv_stride;
    take_words();
    take_state();
  }
  if (slot == 0) {
    if (writes) store(to, (uint16_t)0);
    return;
  }
#pragma unroll
  for (int m = 0; m < TURNS; m++) {
    inputs[m].set({words[m][0], words[m][1], words[m][2], words[m][3], 0});
    inputs[m].mix(a, token, t + m * THREADS_EACH);
  }
  __syncthreads();
  Token now;
  now.take(token, j);
  float v[ROWS], u[ROWS], o[ROWS], square = 0, result;
#pragma unroll
  for (int r = 0; r < ROWS; r++) v[r] = token[2 * D + me * SHARE + row + 4 * r];
  now.read(s, v, strength_of(strength), u, o);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    square += o[r] * o[r];
    if (r == 0 || mine == r) result = o[r];
  }
  square += __shfl_xor_sync(ALL, square, 8);
  square += __shfl_xor_sync(ALL, square, 16);
  if (lane < BLOCKS) tell(address(squares + me * WARPS + warp), lane, square, address(&told));
  __syncthreads();  // Else the state is stored first.
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    now.add(s[r], u[r]);
#pragma unroll
    for (int i = 0; i < 4; i++) store(tile + 4 * r * (D / 4) + i * 8, s[r][i]);
  }
  result *= norm * sigmoid(__uint_as_float((uint32_t)gate << 16));
  wait(address(&told), 0);
  float4 sum = {};
#pragma unroll
  for (int i = 0; i < BLOCKS * WARPS; i += 4) {
    const float4 some = load4(address(squares + i));
    sum.x += some.x, sum.y += some.y, sum.z += some.z, sum.w += some.w;
  }
  square = (sum.x + sum.y) + (sum.z + sum.w);
  if (writes) store(to, (uint16_t)bf16_pair(result * rsqrtf(square * (1.0f / D) + a.eps), 0.0f));
  if (me == 0)
#pragma unroll
    for (int m = 0; m < TURNS; m++)
      if (t + m * THREADS_EACH < 192) {
        store(x[m][1], words[m][2]);
        store(x[m][2], words[m][3]);
        store(x[m][3], words[m][0]);
      }
}
