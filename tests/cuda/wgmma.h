// `wgmma` on a CPU: d += a b of 64 rows, 16 of each of four warps, whose right operand lies swizzled in shared memory.
#pragma once

template <int N> struct Wgmma {
  static void go(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
    auto& mail = emulated::mail[emulated::current / 32];
    const int l = emulated::lane();
    mail[l][0] = (uint64_t)a[1] << 32 | a[0], mail[l][1] = (uint64_t)a[3] << 32 | a[2];
    emulated::warp();
    for (int i = 0; i < N / 2; i++) {
      const int column = i / 4 * 8 + l % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) {
        uint64_t left = mail[l / 4 * 4 + k % 8 / 2][k / 8] >> (i % 4 / 2 * 32);
        uint32_t at = ((uint32_t)b << 4) + column * 128 + k * 2;
        uint16_t right;
        memcpy(&right, emulated::at(at ^ (at >> 7 & 7) << 4), 2);
        d[i] += emulated::wide(left >> k % 2 * 16 & 0xffff) * emulated::wide(right);
      }
    }
    emulated::warp();
  }
};
