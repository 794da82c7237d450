"""What the GEMMs of routed experts have in common, whatever their weights: which rows a program takes, and where its
results go."""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._activations import silu_mul, situ_mul


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
def turns(base, INNER: tl.constexpr, BM: tl.constexpr):
    """Rows [BM] of the weights for the BM / 2 columns from `base` on.

    Rows of gate and of up take turns by eight: in the layout of a tensor core's result both are one thread's.
    """
    row = tl.arange(0, BM)
    column = base + row // 16 * 8 + row % 8
    return (tl.minimum(column, INNER - 1) if INNER % (BM // 2) != 0 else column) + row % 16 // 8 * INNER


@triton.jit
def activated(total, beta, linear_beta, SITU: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr):
    """The activation of sums of `turns`: fp32 [BM / 16, 8, BT]."""
    gate, up = tl.split(tl.permute(tl.reshape(total, [BM // 16, 2, 8, BT]), [0, 2, 3, 1]))
    return situ_mul(gate, up, beta, linear_beta) if SITU else silu_mul(gate, up)


@triton.jit
def rows_of(base, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Rows [BM] of the weights from `base` on, the last again beyond them."""
    column = base + tl.arange(0, BM)
    return tl.minimum(column, WIDTH - 1) if WIDTH % BM != 0 else column


@triton.jit
def put_weighted(
    out, weights, total, safe, live, base, weights_stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Columns from `base` on of a tile's choices `safe` [BT] that are live, times the choices' weights."""
    column = base + tl.arange(0, BM)
    weight = tl.load(weights + (safe // TOP_K).to(tl.int64) * weights_stride + safe % TOP_K, live, 0.0)
    place = out + safe.to(tl.int64)[None, :] * WIDTH + column[:, None]
    tl.store(place, total * weight[None, :], live[None, :] & (column < WIDTH)[:, None])
