"""The two GEMMs of routed experts and the sum of their rows.

Weights are the left operand, so that a tile may be as few as 16 choices wide: an accumulator is [BM weight rows, BT
choices]. Their FORMAT is "plain", rows of x's dtype, or blocks of words and scales: "mxfp4" (`_mxfp4.py` of
`backends/triton`) or "int4" (`_int4.py` there).
"""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._expert_frame import activated, put_weighted, rows_of, tile_of, turns
from k3hal.backends.triton.kernels._int4 import int4_dot
from k3hal.backends.triton.kernels._mxfp4 import columns
from k3hal.backends.triton.kernels.mxfp8 import power, rounded

RESCALE = tl.constexpr(65536.0)
"""Undoes the 2^-16 that packed weights carry."""


@triton.jit
def _plain_dot(w, n, inputs, live, K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """w[n] @ inputs as fp32 [BM, BT]; inputs [BT] are pointers to rows."""
    at = tl.arange(0, BK)
    rows, columns_of = w + n.to(tl.int64)[:, None] * K + at[None, :], inputs[None, :] + at[:, None]
    total = tl.zeros([BM, BT], tl.float32)
    for first in range(0, K, BK):
        if K % BK == 0:
            weights, x = tl.load(rows + first), tl.load(columns_of + first, live[None, :], 0.0)
        else:
            within = first + at < K
            weights = tl.load(rows + first, within[None, :], 0.0)
            x = tl.load(columns_of + first, live[None, :] & within[:, None], 0.0)
        total = tl.dot(weights, x, total, input_precision="ieee")
    return total


@triton.jit
def _packed_dot(
    w, scales, n, inputs, live, K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """w[n] @ inputs as fp32 [BM, BT]."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    at = tl.arange(0, 32)
    first = n // 16 * BLOCKS
    word = (first * 256 + n % 16 * 16)[:, None] + tl.arange(0, 16)[None, :]
    scale = first * 16 + n % 16
    total = tl.zeros([BM, BT], tl.float32)
    for block in range(BLOCKS):
        words, factors = tl.load(w + block * 256 + word), tl.load(scales + block * 16 + scale)
        for j in tl.static_range(4):
            k = block * 128 + 32 * j + at
            mask = live[None, :] & (k < K)[:, None] if K % 128 != 0 else live[None, :]
            x = tl.load(inputs[None, :] + k[:, None], mask, 0.0)
            weights = tl.reshape(columns(words, factors, j, PTX), [BM, 32])
            total = tl.dot(weights.to(x.dtype), x, total, input_precision="ieee")
    return total * RESCALE


@triton.jit
def _dot(
    w, scales, expert, n, inputs, live, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows n of an expert's N, times inputs: fp32 [BM, BT]."""
    which = expert.to(tl.int64)
    BLOCKS: tl.constexpr = N // 16 * ((K + 127) // 128)
    if FORMAT == "int4":
        total = int4_dot(w + which * (BLOCKS * 256), scales + which * (BLOCKS * 64), n, inputs, live, K, BM, BT, PTX)
    elif FORMAT == "mxfp4":
        total = _packed_dot(w + which * (BLOCKS * 256), scales + which * (BLOCKS * 16), n, inputs, live, K, BM, BT, PTX)
    else:
        total = _plain_dot(w + which * (N * K), n, inputs, live, K, BM, BT, BK)
    return total


@triton.jit
def in_groups(values):
    """fp32 [groups, 32, BT] rounded to MXFP8."""
    number, exponent = rounded(values, 1)
    return number * tl.expand_dims(power(exponent), 1)


@triton.jit
def gate_up(
    x, ids, experts, rows, w, scales, hidden, x_stride, ids_stride, beta, linear_beta,
    TOP_K: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, DIRECT: tl.constexpr,
    SITU: tl.constexpr, ROUND: tl.constexpr, PTX: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`hidden[choice] = act(w13 x)`, BM / 2 of the INNER columns of a tile's choices; hidden [T k, INNER].

    With ROUND they are rounded to MXFP8, which takes BM of 64 or more.
    """
    WIDE: tl.constexpr = BM // 2
    BLOCKS: tl.constexpr = (INNER + WIDE - 1) // WIDE
    tile, base = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * WIDE
    expert, choice = tile_of(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0)
    inputs = x + (safe // TOP_K).to(tl.int64) * x_stride
    n = turns(base, INNER, BM)
    total = _dot(w, scales, expert, n, inputs, live, 2 * INNER, K, FORMAT, PTX, BM, BT, BK)
    out = activated(total, beta, linear_beta, SITU, BM, BT)
    if ROUND:
        out = in_groups(tl.reshape(out, [WIDE // 32, 32, BT]))
    value = tl.reshape(out, [WIDE, BT]).to(hidden.dtype.element_ty)
    column = base + tl.arange(0, WIDE)
    place = hidden + safe.to(tl.int64)[None, :] * INNER + column[:, None]
    tl.store(place, value, live[None, :] & (column < INNER)[:, None])


@triton.jit
def down(
    hidden, ids, experts, rows, weights, w, scales, out, ids_stride, weights_stride,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, DIRECT: tl.constexpr,
    PTX: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`out[choice] = weight * w2 hidden[choice]` in fp32, BM of the WIDTH columns of a tile's choices."""
    BLOCKS: tl.constexpr = (WIDTH + BM - 1) // BM
    tile = tl.program_id(0) // BLOCKS
    expert, choice = tile_of(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0)
    inputs = hidden + safe.to(tl.int64) * K
    base = tl.program_id(0) % BLOCKS * BM
    n = rows_of(base, WIDTH, BM)
    total = _dot(w, scales, expert, n, inputs, live, WIDTH, K, FORMAT, PTX, BM, BT, BK)
    put_weighted(out, weights, total, safe, live, base, weights_stride, TOP_K, WIDTH, BM)


@triton.jit
def combine(
    parts, ids, out, ids_stride, TOP_K: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`out[t] = sum_j parts[t k + j]` over the choices that are not negative, in ascending order of their experts."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    expert = tl.load(ids + token * ids_stride + slot, slot < TOP_K, -1)
    below = (expert[None, :] < expert[:, None]) & (expert >= 0)[None, :]
    rank = tl.where(expert >= 0, tl.sum(below.to(tl.int32), 1), -1)
    chosen = tl.sum((expert >= 0).to(tl.int32))
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        choice = token * TOP_K + tl.sum(tl.where(rank == i, slot, 0))
        total += tl.load(parts + choice * WIDTH + column, column < tl.where(i < chosen, WIDTH, 0), 0.0)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), column < WIDTH)
