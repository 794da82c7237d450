// The working warps of MLA decoding from a cache in bf16.
// A warp's half of the queries' channels as left factors.
__device__ void take_queries(uint32_t (&q)[STEPS][4], const uint8_t* queries, int half, int lane) {
  const uint32_t from = shared(queries) + (lane & 15) * QUERY_PITCH + half * 2 * HALF + (lane >> 4) * 16;
#pragma unroll
  for (int s = 0; s < STEPS; s++) read4(q[s], from + s * 32);
}

// Scores of 16 heads with 8 rows over a warp's half of the channels. Two sums go on at a time.
__device__ float4 score(const uint32_t (&q)[STEPS][4], uint32_t at) {
  float x[4] = {}, y[4] = {};
  uint32_t b[4];
#pragma unroll
  for (int i = 0; i < STEPS / 2; i++) {
    read4(b, at + i * 64);
    multiply(x, q[2 * i], b[0], b[1]);
    multiply(y, q[2 * i + 1], b[2], b[3]);
  }
  return make_float4(x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]);
}

// Adds the values of a tile's rows, a warp's 64 channels of them.
__device__ void add_values(float (&acc)[8][4], const uint32_t (&weights)[ROWS / 16][4], uint32_t at) {
  uint32_t b[4];
#pragma unroll
  for (int s = 0; s < ROWS / 16; s++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      read4_turned(b, at + place_of(16 * s) + i * 32);
      multiply(acc[2 * i], weights[s], b[0], b[1]);
      multiply(acc[2 * i + 1], weights[s], b[2], b[3]);
    }
  }
}

// Eight warps: scores and values of this program's chunks, one after the other.
__device__ void attend_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  const int half = warp >> 2, group = warp & 3, in8 = lane & 7, quarter = lane >> 3;
  // Where this lane's rows of matrices are in a tile. Scores: row 8 group.., 16 bytes after the other; values: 16 rows.
  const uint32_t scores_at = place_of(8 * group + in8) + half * 2 * HALF + quarter * 16;
  const uint32_t values_at = place_of(in8 + (quarter & 1) * 8) + warp * 128 + (quarter >> 1) * 16;
  const uint32_t ring = shared(m.ring);

  int turn = 0;
  uint32_t parity = 0;
  Place<SLOTS> here{0, 0};
  while (true) {
    wait(m.given, parity);
    parity ^= 1;
    const Item item = m.item;
    if (item.n < 0) break;
    uint32_t q[STEPS][4];
    take_queries(q, m.queries, half, lane);
    have_read();
    __syncwarp();
    if (lane == 0) arrive(m.taken);
    const int tiles = (item.rows + ROWS - 1) / ROWS;
    float acc[8][4] = {};
    float top0 = -INFINITE, top1 = -INFINITE, sum0 = 0, sum1 = 0;
    int before = 0;
    // Step k forms the scores of tile k, and uses those of tile k - 1.
    auto step = [&](int k, auto forms, auto uses) {
      if (forms.value) wait(m.full[here.slot], here.parity);
      meet();  // The scores of the tile before are there.
      float4 part[4];
      if (uses.value) {
        const float4* from = m.between.scores[turn ^ 1] + lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4 x = from[j * 32], y = from[SCORES / 2 + j * 32];
          part[j] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
      }
      const int now = here.slot;
      if (forms.value) {
        float4* to = m.between.scores[turn] + SCORES / 2 * half + group * 32 + lane;
        *to = score(q, ring + now * TILE + scores_at);
        turn ^= 1;
        here.next();
      }
      if (uses.value) {
        const int rows = item.rows - (k - 1) * ROWS;
        float most0 = -INFINITE, most1 = -INFINITE;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (8 * j + 2 * t >= rows) part[j].x = part[j].z = -INFINITE;
          if (8 * j + 2 * t + 1 >= rows) part[j].y = part[j].w = -INFINITE;
          most0 = fmaxf(most0, fmaxf(part[j].x, part[j].y));
          most1 = fmaxf(most1, fmaxf(part[j].z, part[j].w));
        }
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          most0 = fmaxf(most0, __shfl_xor_sync(ALL, most0, d));
          most1 = fmaxf(most1, __shfl_xor_sync(ALL, most1, d));
        }
        most0 = fmaxf(most0 * a.scale, top0);
        most1 = fmaxf(most1 * a.scale, top1);
        if (__any_sync(ALL, most0 > top0 || most1 > top1)) {
          const float fade0 = exp2_of(top0 - most0), fade1 = exp2_of(top1 - most1);
          sum0 *= fade0;
          sum1 *= fade1;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            acc[j][0] *= fade0;
            acc[j][1] *= fade0;
            acc[j][2] *= fade1;
            acc[j][3] *= fade1;
          }
          top0 = most0;
          top1 = most1;
        }
        uint32_t weights[2][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float x = exp2_of(fmaf(part[j].x, a.scale, -top0)), y = exp2_of(fmaf(part[j].y, a.scale, -top0));
          const float z = exp2_of(fmaf(part[j].z, a.scale, -top1)), w = exp2_of(fmaf(part[j].w, a.scale, -top1));
          sum0 += x + y;
          sum1 += z + w;
          weights[j >> 1][(j & 1) * 2] = factors(x, y);
          weights[j >> 1][(j & 1) * 2 + 1] = factors(z, w);
        }
        add_values(acc, weights, ring + before * TILE + values_at);
        have_read();
        __syncwarp();
        if (lane == 0) arrive(m.empty[before]);
      }
      before = now;
    };
    if (tiles) {
      step(0, Flag<true>(), Flag<false>());
#pragma unroll 1
      for (int k = 1; k < tiles; k++) step(k, Flag<true>(), Flag<true>());
      step(tiles, Flag<false>(), Flag<true>());
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      sum0 += __shfl_xor_sync(ALL, sum0, d);
      sum1 += __shfl_xor_sync(ALL, sum1, d);
    }
    put(a, item, acc, top0, top1, sum0, sum1);
  }
}
