"""The two GEMMs of routed experts with int4 weights, a scale for 32 of a row.

Weights are the left operand, in blocks of words and scales (`backends/triton/_int4.py`). Codes are multiplied as they
are and each group's sum is scaled in fp32: a code times its scale has more bits than bfloat16.
"""

# Triton types what it iterates over as an iterator without an end, and the result of inline assembly as a tuple.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._activations import silu_mul, situ_mul
from k3hal.backends.triton.kernels._expert_gemm import tile_of


@triton.jit
def columns(words, J: tl.constexpr, PTX: tl.constexpr):
    """Columns 32 J to 32 J + 31 of a block as bfloat16 [.., 16, 2], a code less 8; words [.., 16].

    Under PTX both halves of a word are subtracted by one instruction, which Triton does not find by itself.
    """
    # 0x4300 is 128 in bfloat16, whose last bit is a one there.
    pairs = words >> 4 * J & 0x000F000F | 0x43004300
    if PTX:
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b32 less; mov.b32 less, 0x43084308; sub.rn.bf16x2 $0, $1, less; }",
            "=r,r",
            [pairs],
            tl.int32,
            True,
            1,
        )
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if not PTX:
        low = (low.to(tl.float32) - 136.0).to(tl.bfloat16)
        high = (high.to(tl.float32) - 136.0).to(tl.bfloat16)
    return tl.join(low, high)


@triton.jit
def _dot(
    w, scales, expert, n, inputs, live, N: tl.constexpr, K: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Rows n of an expert's N, times inputs: fp32 [BM, BT]; inputs [BT] are pointers to rows."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    at = tl.arange(0, 32)
    first = expert.to(tl.int64) * (N // 16 * BLOCKS) + n // 16 * BLOCKS
    word = w + (first * 256 + n % 16 * 16)[:, None] + tl.arange(0, 16)[None, :]
    scale = scales + first * 64 + n % 16 * 4
    total = tl.zeros([BM, BT], tl.float32)
    for block in range(BLOCKS):
        words = tl.load(word + block * 256)
        for j in tl.static_range(4):
            k = block * 128 + 32 * j + at
            mask = live[None, :] & (k < K)[:, None] if K % 128 != 0 else live[None, :]
            x = tl.load(inputs[None, :] + k[:, None], mask, 0.0)
            weights = tl.reshape(columns(words, j, PTX), [BM, 32]).to(x.dtype)
            factor = tl.load(scale + block * 64 + j).to(tl.float32)
            total += tl.dot(weights, x, input_precision="ieee") * factor[:, None]
    return total


@triton.jit
def gate_up(
    x, ids, experts, rows, w, scales, hidden, x_stride, ids_stride, beta, linear_beta,
    TOP_K: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, DIRECT: tl.constexpr, SITU: tl.constexpr,
    PTX: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`hidden[choice] = act(w13 x)`, BM / 2 of the INNER columns of a tile's choices; hidden [T k, INNER].

    Rows of gate and of up take turns by eight: in the layout of a tensor core's result both are one thread's.
    """
    WIDE: tl.constexpr = BM // 2
    BLOCKS: tl.constexpr = (INNER + WIDE - 1) // WIDE
    tile, base = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * WIDE
    expert, choice = tile_of(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0).to(tl.int64)
    row = tl.arange(0, BM)
    column = base + row // 16 * 8 + row % 8
    n = (tl.minimum(column, INNER - 1) if INNER % WIDE != 0 else column) + row % 16 // 8 * INNER
    total = _dot(w, scales, expert, n, x + safe // TOP_K * x_stride, live, 2 * INNER, K, PTX, BM, BT)
    gate, up = tl.split(tl.permute(tl.reshape(total, [BM // 16, 2, 8, BT]), [0, 2, 3, 1]))
    out = situ_mul(gate, up, beta, linear_beta) if SITU else silu_mul(gate, up)
    value = tl.reshape(out, [WIDE, BT]).to(hidden.dtype.element_ty)
    column = base + tl.arange(0, WIDE)
    tl.store(hidden + safe[None, :] * INNER + column[:, None], value, live[None, :] & (column < INNER)[:, None])


@triton.jit
def down(
    hidden, ids, experts, rows, weights, w, scales, out, ids_stride, weights_stride,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, DIRECT: tl.constexpr, PTX: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`out[choice] = weight * w2 hidden[choice]` in fp32, BM of the WIDTH columns of a tile's choices."""
    BLOCKS: tl.constexpr = (WIDTH + BM - 1) // BM
    tile = tl.program_id(0) // BLOCKS
    expert, choice = tile_of(ids, experts, rows, ids_stride, tile, TOP_K, BT, DIRECT)
    if expert < 0:
        return
    live = choice >= 0
    safe = tl.where(live, choice, 0).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BM + tl.arange(0, BM)
    n = tl.minimum(column, WIDTH - 1) if WIDTH % BM != 0 else column
    total = _dot(w, scales, expert, n, hidden + safe * K, live, WIDTH, K, PTX, BM, BT)
    weight = tl.load(weights + safe // TOP_K * weights_stride + safe % TOP_K, live, 0.0)
    place = out + safe[None, :] * WIDTH + column[:, None]
    tl.store(place, total * weight[None, :], live[None, :] & (column < WIDTH)[:, None])
