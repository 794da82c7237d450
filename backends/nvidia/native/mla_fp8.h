// The working warps of MLA decoding from a cache in float8_e4m3, widened to fp16, which holds all of its values.
// Two heads' queries a warp, g and g + 8, to fp16 whose largest is about 2^14, so that fp16 holds all that counts; and in
// the order of left factors of the matrix instructions, four channels at a time in the order in which cached ones are
// widened. `grown`: what each head's scores are to be multiplied by.
__device__ void narrow_queries(uint8_t* queries, float* grown, int warp, int lane) {
  uint32_t x[2][ENTRY / 64];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t* pairs = (const uint32_t*)(queries + (warp + 8 * h) * QUERY_PITCH) + lane;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < ENTRY / 64; i++) {
      x[h][i] = pairs[32 * i];
      largest = fmaxf(largest, fmaxf(fabsf(low(x[h][i])), fabsf(high(x[h][i]))));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, d));
    const int exponent = min(max((int)(__float_as_uint(largest) >> 23), 20), 240) - 127 - 14;
    const float shrunk = __uint_as_float((uint32_t)(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < ENTRY / 64; i++) x[h][i] = factors(low(x[h][i]) * shrunk, high(x[h][i]) * shrunk);
    if (lane == 0) grown[warp + 8 * h] = __uint_as_float((uint32_t)(127 + exponent) << 23);
  }
  meet();  // All have read what they overwrite.
  uint2* to = (uint2*)queries + warp * 8 + (lane & 7) + (lane >> 3) * 64;
#pragma unroll
  for (int i = 0; i < ENTRY / 64; i++) to[256 * i] = make_uint2(x[0][i], x[1][i]);
  meet();
}

// Scores of 16 heads with 8 rows. Four sums go on at a time.
__device__ void score(float (&sum)[4], const uint4 (&q)[STEPS], uint32_t at) {
  float part[4][4] = {};
  uint32_t b[4], first, last;
#pragma unroll
  for (int i = 0; i < STEPS / 4; i++) {
    read4(b, at + i * 64);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      widen(b[c], first, last);
      multiply(part[c], {q[4 * i + c].x, q[4 * i + c].y, q[4 * i + c].z, q[4 * i + c].w}, first, last);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; e++) sum[e] = part[0][e] + part[1][e] + (part[2][e] + part[3][e]);
}

// Adds the values of a tile's rows, a warp's 64 channels of them.
__device__ void add_values(float (&acc)[8][4], uint32_t weights_at, uint32_t at) {
  uint32_t weights[4], b[4];
#pragma unroll
  for (int s = 0; s < ROWS / 16; s++) {
    read4(weights, weights_at + s * 32);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      read4_turned(b, at + place_of(16 * s) + i * 32);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        // Two channels of two rows: to one channel of both rows, and the other.
        uint32_t even0, odd0, even1, odd1;
        widen(__byte_perm(b[2 * c], 0, 0x3120), even0, odd0);
        widen(__byte_perm(b[2 * c + 1], 0, 0x3120), even1, odd1);
        multiply(acc[4 * i + 2 * c], weights, even0, even1);
        multiply(acc[4 * i + 2 * c + 1], weights, odd0, odd1);
      }
    }
  }
}

// Eight warps: scores and values of this program's chunks, one after the other.
__device__ void attend_all(const Arguments& a, Memory& m) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int in8 = lane & 7, quarter = lane >> 3;
  // Where this lane's rows of matrices are in a tile. Scores: row 8 warp.., 16 bytes after the other; values: 16 rows.
  const uint32_t scores_at = place_of(8 * warp + in8) + quarter * 16;
  const uint32_t values_at = place_of(in8 + (quarter & 1) * 8) + warp * 64 + (quarter >> 1) * 16;
  const uint32_t ring = shared(m.ring), weights_at = shared(m.between.weights) + (lane & 15) * WEIGHT_PITCH + (lane >> 4) * 16;

  int turn = 0;
  uint32_t parity = 0;
  Place<SLOTS> here{0, 0};
  while (true) {
    wait(m.given, parity);
    parity ^= 1;
    const Item item = m.item;
    if (item.n < 0) break;
    narrow_queries(m.queries, m.between.grown, warp, lane);
    uint4 q[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) q[s] = ((const uint4*)m.queries)[32 * s + lane];
    const float scale0 = a.scale * m.between.grown[g], scale1 = a.scale * m.between.grown[g + 8];
    have_read();
    __syncwarp();
    if (lane == 0) arrive(m.taken);
    const int tiles = (item.rows + ROWS - 1) / ROWS;
    float acc[8][4] = {};
    float top0 = -INFINITE, top1 = -INFINITE, sum0 = 0, sum1 = 0;
    int before = 0;
    // Step k forms the weights of tile k, and uses those of tile k - 1.
    auto step = [&](int k, auto forms, auto uses) {
      float s[4];
      if (forms.value) {
        wait(m.full[here.slot], here.parity);
        score(s, q, ring + here.slot * TILE + scores_at);
        s[0] *= scale0;
        s[1] *= scale0;
        s[2] *= scale1;
        s[3] *= scale1;
        const int rows = item.rows - k * ROWS - 8 * warp;
        if (rows < 8) {
          if (2 * t >= rows) s[0] = s[2] = -INFINITE;
          if (2 * t + 1 >= rows) s[1] = s[3] = -INFINITE;
        }
        float most0 = fmaxf(s[0], s[1]), most1 = fmaxf(s[2], s[3]);
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          most0 = fmaxf(most0, __shfl_xor_sync(ALL, most0, d));
          most1 = fmaxf(most1, __shfl_xor_sync(ALL, most1, d));
        }
        if (t == 0) {
          ((float*)m.between.most[turn][g])[warp] = most0;
          ((float*)m.between.most[turn][g + 8])[warp] = most1;
        }
      }
      meet();  // The weights of the tile before are there, and the largest scores of this one.
      float higher0 = top0, higher1 = top1;
      if (forms.value) {
        higher0 = fmaxf(top0, largest_of(m.between.most[turn][g]));
        higher1 = fmaxf(top1, largest_of(m.between.most[turn][g + 8]));
#pragma unroll
        for (int e = 0; e < 4; e++) s[e] = exp2_of(s[e] - (e < 2 ? higher0 : higher1));
        uint8_t* to = m.between.weights[turn] + g * WEIGHT_PITCH + 16 * warp + 4 * t;
        *(uint32_t*)to = factors(s[0], s[1]);
        *(uint32_t*)(to + 8 * WEIGHT_PITCH) = factors(s[2], s[3]);
      }
      if (uses.value) {
        add_values(acc, weights_at + (turn ^ 1) * HEADS * WEIGHT_PITCH, ring + before * TILE + values_at);
        have_read();
        __syncwarp();
        if (lane == 0) arrive(m.empty[before]);
      }
      if (forms.value) {
        if (__any_sync(ALL, higher0 > top0 || higher1 > top1)) {
          const float fade0 = exp2_of(top0 - higher0), fade1 = exp2_of(top1 - higher1);
          sum0 *= fade0;
          sum1 *= fade1;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            acc[j][0] *= fade0;
            acc[j][1] *= fade0;
            acc[j][2] *= fade1;
            acc[j][3] *= fade1;
          }
          top0 = higher0;
          top1 = higher1;
        }
        sum0 += s[0] + s[1];
        sum1 += s[2] + s[3];
        before = here.slot;
        turn ^= 1;
        here.next();
      }
    };
    if (tiles) {
      step(0, Flag<true>(), Flag<false>());
#pragma unroll 1
      for (int k = 1; k < tiles; k++) step(k, Flag<true>(), Flag<true>());
      step(tiles, Flag<false>(), Flag<true>());
#pragma unroll
      for (int d = 1; d < 4; d *= 2) {
        sum0 += __shfl_xor_sync(ALL, sum0, d);
        sum1 += __shfl_xor_sync(ALL, sum1, d);
      }
      if (t == 0) {
        ((float*)m.between.sums[g])[warp] = sum0;
        ((float*)m.between.sums[g + 8])[warp] = sum1;
      }
      meet();
      sum0 = sum_of(m.between.sums[g]);
      sum1 = sum_of(m.between.sums[g + 8]);
    }
    put(a, item, acc, top0, top1, sum0, sum1);
  }
}
