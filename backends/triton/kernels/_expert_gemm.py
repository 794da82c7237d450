"""The two GEMMs of routed experts and the sum of their rows.

Weights are the left operand, so that a tile may be as few as 16 choices wide: an accumulator is [BN weight rows, BT
choices]. PACKED weights are blocks of words and scales (`backends/triton/_mxfp4.py`), others plain rows of x's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._activations import silu_mul, situ_mul
from k3hal.backends.triton.kernels._mxfp4 import columns

RESCALE = tl.constexpr(65536.0)
"""Undoes the 2^-16 that packed weights carry."""


@triton.jit
def _tile(ids, experts, rows, stride, tile, TOP_K: tl.constexpr, BT: tl.constexpr, DIRECT: tl.constexpr):
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
def _depth(k, live, K: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of a block's inputs [BLOCK, BT]: rows that are live, within K."""
    mask = live[None, :]
    if K % BLOCK != 0:
        mask = mask & (k < K)[:, None]
    return mask


@triton.jit
def _plain_dot(total, w, n, inputs, live, K: tl.constexpr, BK: tl.constexpr):
    """total + w[n] @ inputs; inputs [1, BT] are pointers to rows."""
    at = tl.arange(0, BK)
    weights = w + n[:, None].to(tl.int64) * K + at[None, :]
    for first in range(0, K, BK):
        k = first + at
        x = tl.load(inputs + k[:, None], _depth(k, live, K, BK), 0.0)
        if K % BK == 0:
            tile = tl.load(weights + first)
        else:
            tile = tl.load(weights + first, (k < K)[None, :], 0.0)
        total = tl.dot(tile, x, total, input_precision="ieee")
    return total


@triton.jit
def _plain_dots(gate, up, w, n, INNER: tl.constexpr, inputs, live, K: tl.constexpr, BK: tl.constexpr):
    """gate + w[n] @ inputs and up + w[n + INNER] @ inputs."""
    at = tl.arange(0, BK)
    weights = w + n[:, None].to(tl.int64) * K + at[None, :]
    for first in range(0, K, BK):
        k = first + at
        x = tl.load(inputs + k[:, None], _depth(k, live, K, BK), 0.0)
        if K % BK == 0:
            gates, ups = tl.load(weights + first), tl.load(weights + first + INNER * K)
        else:
            gates = tl.load(weights + first, (k < K)[None, :], 0.0)
            ups = tl.load(weights + first + INNER * K, (k < K)[None, :], 0.0)
        gate = tl.dot(gates, x, gate, input_precision="ieee")
        up = tl.dot(ups, x, up, input_precision="ieee")
    return gate, up


@triton.jit
def _words(n, BLOCKS: tl.constexpr):
    """Offsets of block 0 of rows n: of their words [BN, 16], and of their scales [BN]."""
    return ((n // 16) * (BLOCKS * 256) + n % 16 * 16)[:, None] + tl.arange(0, 16)[None, :], (
        n // 16
    ) * (BLOCKS * 16) + n % 16


@triton.jit
def _packed_dot(total, w, scales, n, inputs, live, K: tl.constexpr, BN: tl.constexpr, PTX: tl.constexpr):
    """total + w[n] @ inputs, times 2^-16."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    word, scale = _words(n, BLOCKS)
    for block in range(BLOCKS):
        words, factors = tl.load(w + block * 256 + word), tl.load(scales + block * 16 + scale)
        for j in tl.static_range(4):
            k = block * 128 + 32 * j + tl.arange(0, 32)
            x = tl.load(inputs + k[:, None], _depth(k, live, K, 128), 0.0)
            tile = columns(words, factors, j, BN, PTX).to(x.dtype)
            total = tl.dot(tile, x, total, input_precision="ieee")
    return total


@triton.jit
def _packed_dots(
    gate, up, w, scales, n, INNER: tl.constexpr, inputs, live, K: tl.constexpr, BN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """gate + w[n] @ inputs and up + w[n + INNER] @ inputs, times 2^-16."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    word, scale = _words(n, BLOCKS)
    FURTHER: tl.constexpr = INNER // 16 * BLOCKS
    for block in range(BLOCKS):
        gates, gate_factors = tl.load(w + block * 256 + word), tl.load(scales + block * 16 + scale)
        ups = tl.load(w + (FURTHER + block) * 256 + word)
        up_factors = tl.load(scales + (FURTHER + block) * 16 + scale)
        for j in tl.static_range(4):
            k = block * 128 + 32 * j + tl.arange(0, 32)
            x = tl.load(inputs + k[:, None], _depth(k, live, K, 128), 0.0)
            gate = tl.dot(columns(gates, gate_factors, j, BN, PTX).to(x.dtype), x, gate, input_precision="ieee")
            up = tl.dot(columns(ups, up_factors, j, BN, PTX).to(x.dtype), x, up, input_precision="ieee")
    return gate, up


@triton.jit
def gate_up(
    x, ids, experts, rows, w, scales, hidden, x_stride, ids_stride, beta, linear_beta,
    TOP_K: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr,
    SITU: tl.constexpr, PTX: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`hidden[choice] = act(w13 x)`, BN of the INNER columns of a tile's choices; hidden [T k, INNER]."""
    BLOCKS: tl.constexpr = (INNER + BN - 1) // BN
    tile = tl.program_id(0) // BLOCKS
    expert, choice = _tile(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    inputs = x + (tl.where(live, choice, 0) // TOP_K).to(tl.int64)[None, :] * x_stride
    column = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
    n = tl.minimum(column, INNER - 1) if INNER % BN != 0 else column
    gate = tl.zeros([BN, BT], tl.float32)
    up = tl.zeros([BN, BT], tl.float32)
    if PACKED:
        DEPTH: tl.constexpr = (K + 127) // 128
        own = w + expert.to(tl.int64) * (INNER // 8 * DEPTH * 256)
        own_scales = scales + expert.to(tl.int64) * (INNER // 8 * DEPTH * 16)
        gate, up = _packed_dots(gate, up, own, own_scales, n, INNER, inputs, live, K, BN, PTX)
        gate, up = gate * RESCALE, up * RESCALE
    else:
        own = w + expert.to(tl.int64) * (2 * INNER * K)
        gate, up = _plain_dots(gate, up, own, n, INNER, inputs, live, K, BK)
    out = situ_mul(gate, up, beta, linear_beta) if SITU else silu_mul(gate, up)
    place = hidden + tl.where(live, choice, 0).to(tl.int64)[None, :] * INNER + column[:, None]
    tl.store(place, out.to(hidden.dtype.element_ty), live[None, :] & (column < INNER)[:, None])


@triton.jit
def down(
    hidden, ids, experts, rows, weights, w, scales, out, ids_stride, weights_stride,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, DIRECT: tl.constexpr,
    PTX: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`out[choice] = weight * w2 hidden[choice]` in fp32, BN of the WIDTH columns of a tile's choices."""
    BLOCKS: tl.constexpr = (WIDTH + BN - 1) // BN
    tile = tl.program_id(0) // BLOCKS
    expert, choice = _tile(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0)
    inputs = hidden + safe.to(tl.int64)[None, :] * K
    column = tl.program_id(0) % BLOCKS * BN + tl.arange(0, BN)
    n = tl.minimum(column, WIDTH - 1) if WIDTH % BN != 0 else column
    total = tl.zeros([BN, BT], tl.float32)
    if PACKED:
        DEPTH: tl.constexpr = (K + 127) // 128
        own = w + expert.to(tl.int64) * (WIDTH // 16 * DEPTH * 256)
        own_scales = scales + expert.to(tl.int64) * (WIDTH // 16 * DEPTH * 16)
        total = _packed_dot(total, own, own_scales, n, inputs, live, K, BN, PTX) * RESCALE
    else:
        total = _plain_dot(total, w + expert.to(tl.int64) * (WIDTH * K), n, inputs, live, K, BK)
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
