"""The two GEMMs of routed experts and the sum of their rows.

Weights are the left operand, so that a tile may be as few as 16 choices wide: an accumulator is [BM weight rows, BT
choices]. PACKED weights are blocks of words and scales (`backends/triton/_mxfp4.py`), others plain rows of x's dtype.
"""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._activations import silu_mul, situ_mul
from k3hal.backends.triton.kernels._mxfp4 import columns
from k3hal.backends.triton.kernels.mxfp8 import power, rounded

RESCALE = tl.constexpr(65536.0)
"""Undoes the 2^-16 that packed weights carry."""


@triton.jit
def tile_of(ids, experts, rows, stride, tile, TOP_K: tl.constexpr, BT: tl.constexpr, DIRECT: tl.constexpr):
    """A tile's expert and its choices [BT]; DIRECT is one choice a tile, without a table."""
    slot = tl.arange(0, BT)
    if DIRECT:
        expert = tl.load(ids + (tile // TOP_K).to(tl.int64) * stride + tile % TOP_K)
        choice = tl.where(slot == 0, tile, -1)
    else:
        expert = tl.load(experts + tile)
        choice = tl.load(rows + tile * BT + slot)
    return expert, choice


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
def _split_dot(
    w, scales, n, inputs, live, K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, SPLIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """`_packed_dot` with K cut into SPLIT parts, a warp or more each: as many weights on their way from few rows."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    PART: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    at, part = tl.arange(0, 32), tl.arange(0, SPLIT) * PART
    first = n // 16 * BLOCKS
    word = (part * 256)[:, None, None] + (first * 256 + n % 16 * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    scale = (part * 16)[:, None] + (first * 16 + n % 16)[None, :]
    total = tl.zeros([SPLIT, BM, BT], tl.float32)
    for block in range(PART):
        if BLOCKS % SPLIT == 0:
            words, factors = tl.load(w + block * 256 + word), tl.load(scales + block * 16 + scale)
        else:
            within = part + block < BLOCKS
            words = tl.load(w + block * 256 + word, within[:, None, None], 0)
            factors = tl.load(scales + block * 16 + scale, within[:, None], 0)
        for j in tl.static_range(4):
            k = (part + block)[:, None] * 128 + 32 * j + at[None, :]
            mask = live[None, None, :]
            if K % (128 * SPLIT) != 0:
                mask = mask & (k < K)[:, :, None]
            x = tl.load(inputs[None, None, :] + k[:, :, None], mask, 0.0)
            weights = tl.reshape(columns(words, factors, j, PTX), [SPLIT, BM, 32])
            total = tl.dot(weights.to(x.dtype), x, total, input_precision="ieee")
    return tl.sum(total, 0) * RESCALE


@triton.jit
def _dot(
    w, scales, expert, n, inputs, live, N: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Rows n of an expert's N, times inputs: fp32 [BM, BT]."""
    which = expert.to(tl.int64)
    if PACKED:
        BLOCKS: tl.constexpr = N // 16 * ((K + 127) // 128)
        own, factors = w + which * (BLOCKS * 256), scales + which * (BLOCKS * 16)
        if SPLIT > 1:
            total = _split_dot(own, factors, n, inputs, live, K, BM, BT, SPLIT, PTX)
        else:
            total = _packed_dot(own, factors, n, inputs, live, K, BM, BT, PTX)
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
    TOP_K: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr,
    SITU: tl.constexpr, ROUND: tl.constexpr, PTX: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """`hidden[choice] = act(w13 x)`, BM / 2 of the INNER columns of a tile's choices; hidden [T k, INNER].

    With ROUND they are rounded to MXFP8, which takes BM of 64 or more.

    Rows of gate and of up take turns by eight: in the layout of a tensor core's result both are one thread's.
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
    row = tl.arange(0, BM)
    column = base + row // 16 * 8 + row % 8
    n = (tl.minimum(column, INNER - 1) if INNER % WIDE != 0 else column) + row % 16 // 8 * INNER
    total = _dot(w, scales, expert, n, inputs, live, 2 * INNER, K, PACKED, PTX, BM, BT, BK, SPLIT)
    gate, up = tl.split(tl.permute(tl.reshape(total, [BM // 16, 2, 8, BT]), [0, 2, 3, 1]))
    out = situ_mul(gate, up, beta, linear_beta) if SITU else silu_mul(gate, up)
    if ROUND:
        out = in_groups(tl.reshape(out, [WIDE // 32, 32, BT]))
    value = tl.reshape(out, [WIDE, BT]).to(hidden.dtype.element_ty)
    column = base + tl.arange(0, WIDE)
    place = hidden + safe.to(tl.int64)[None, :] * INNER + column[:, None]
    tl.store(place, value, live[None, :] & (column < INNER)[:, None])


@triton.jit
def down(
    hidden, ids, experts, rows, weights, w, scales, out, ids_stride, weights_stride,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr,
    PTX: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
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
    column = tl.program_id(0) % BLOCKS * BM + tl.arange(0, BM)
    n = tl.minimum(column, WIDTH - 1) if WIDTH % BM != 0 else column
    total = _dot(w, scales, expert, n, inputs, live, WIDTH, K, PACKED, PTX, BM, BT, BK, SPLIT)
    weight = tl.load(weights + (safe // TOP_K).to(tl.int64) * weights_stride + safe % TOP_K, live, 0.0)
    place = out + safe.to(tl.int64)[None, :] * WIDTH + column[:, None]
    tl.store(place, total * weight[None, :], live[None, :] & (column < WIDTH)[:, None])


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
