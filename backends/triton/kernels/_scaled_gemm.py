"""The two GEMMs of routed experts where tensor cores multiply MXFP4 by MXFP8 themselves.

Weights are the left operand as a checkpoint has them: codes u8 [N, K / 2], the low half of a byte first, and scales u8
[N, K / 32]. Activations are codes of E4M3 and scales u8 [.., K / 32].
"""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._expert_frame import activated, put_weighted, rows_of, tile_of, turns
from k3hal.backends.triton.kernels.mxfp8 import rounded

WEIGHTS = tl.constexpr("e2m1")
ACTIVATIONS = tl.constexpr("e4m3")


@triton.jit
def _dot(
    w, w_scales, n, codes, scales, row, live, K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Rows n of the weights times rows `row` of the activations: fp32 [BM, BT]."""
    half, group, at = tl.arange(0, BK // 2), tl.arange(0, BK // 32), tl.arange(0, BK)
    own, own_scales = n.to(tl.int64)[:, None] * (K // 2), n.to(tl.int64)[:, None] * (K // 32)
    total = tl.zeros([BM, BT], tl.float32)
    for first in range(0, K, BK):
        if K % BK == 0:
            weights = tl.load(w + own + (first // 2 + half)[None, :])
            factors = tl.load(w_scales + own_scales + (first // 32 + group)[None, :])
            x = tl.load(codes + row[None, :] * K + (first + at)[:, None], live[None, :], 0.0)
            powers = tl.load(scales + row[:, None] * (K // 32) + (first // 32 + group)[None, :], live[:, None], 0)
        else:
            weights = tl.load(w + own + (first // 2 + half)[None, :], (first + 2 * half < K)[None, :], 0)
            inside = (first + 32 * group < K)[None, :]
            factors = tl.load(w_scales + own_scales + (first // 32 + group)[None, :], inside, 0)
            within = (first + at < K)[:, None]
            x = tl.load(codes + row[None, :] * K + (first + at)[:, None], live[None, :] & within, 0.0)
            place = scales + row[:, None] * (K // 32) + (first // 32 + group)[None, :]
            powers = tl.load(place, live[:, None] & inside, 0)
        total = tl.dot_scaled(weights, factors, WEIGHTS, x, powers, ACTIVATIONS, total)
    return total


@triton.jit
def gate_up(
    codes, scales, ids, experts, rows, w, w_scales, hidden, hidden_scales, ids_stride, beta, linear_beta,
    TOP_K: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, DIRECT: tl.constexpr, SITU: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of `act(w13 x)`, BM / 2 of the INNER columns of a tile's choices; hidden [T k, INNER]."""
    WIDE: tl.constexpr = BM // 2
    BLOCKS: tl.constexpr = (INNER + WIDE - 1) // WIDE
    tile, base = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * WIDE
    expert, choice = tile_of(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0).to(tl.int64)
    n = turns(base, INNER, BM)
    which = expert.to(tl.int64) * (2 * INNER)
    total = _dot(
        w + which * (K // 2), w_scales + which * (K // 32), n, codes, scales, safe // TOP_K, live, K, BM, BT, BK
    )  # fmt: skip
    out = activated(total, beta, linear_beta, SITU, BM, BT)
    number, exponent = rounded(tl.reshape(out, [WIDE // 32, 32, BT]), 1)
    column = base + tl.arange(0, WIDE)
    value = tl.reshape(number, [WIDE, BT]).to(hidden.dtype.element_ty)
    tl.store(hidden + safe[None, :] * INNER + column[:, None], value, live[None, :] & (column < INNER)[:, None])
    group = base // 32 + tl.arange(0, WIDE // 32)
    place = hidden_scales + safe[None, :] * (INNER // 32) + group[:, None]
    tl.store(place, (exponent + 127).to(tl.uint8), live[None, :] & (group < INNER // 32)[:, None])


@triton.jit
def down(
    hidden, hidden_scales, ids, experts, rows, weights, w, w_scales, out, ids_stride, weights_stride,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, DIRECT: tl.constexpr, BT: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`out[choice] = weight * w2 hidden[choice]` in fp32, BM of the WIDTH columns of a tile's choices."""
    BLOCKS: tl.constexpr = (WIDTH + BM - 1) // BM
    tile = tl.program_id(0) // BLOCKS
    expert, choice = tile_of(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0).to(tl.int64)
    base = tl.program_id(0) % BLOCKS * BM
    n = rows_of(base, WIDTH, BM)
    which = expert.to(tl.int64) * WIDTH
    total = _dot(
        w + which * (K // 2), w_scales + which * (K // 32), n, hidden, hidden_scales, safe, live, K, BM, BT, BK
    )  # fmt: skip
    put_weighted(out, weights, total, safe, live, base, weights_stride, TOP_K, WIDTH, BM)
