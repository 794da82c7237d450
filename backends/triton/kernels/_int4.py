"""Packed int4 words (`backends/triton/_int4.py` defines the layout) to bfloat16, in registers, and their product.

Codes are multiplied as they are and each group's sum is scaled in fp32: a code times its scale has more bits than
bfloat16.
"""

# Triton types what it iterates over as an iterator without an end, and the result of inline assembly as a tuple.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int4_columns(words, J: tl.constexpr, PTX: tl.constexpr):
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
def int4_dot(
    w, scales, n, inputs, live, K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """w[n] @ inputs as fp32 [BM, BT]; inputs [BT] are pointers to rows."""
    BLOCKS: tl.constexpr = (K + 127) // 128
    at = tl.arange(0, 32)
    first = n // 16 * BLOCKS
    word = w + (first * 256 + n % 16 * 16)[:, None] + tl.arange(0, 16)[None, :]
    scale = scales + first * 64 + n % 16 * 4
    total = tl.zeros([BM, BT], tl.float32)
    for block in range(BLOCKS):
        words = tl.load(word + block * 256)
        for j in tl.static_range(4):
            k = block * 128 + 32 * j + at
            mask = live[None, :] & (k < K)[:, None] if K % 128 != 0 else live[None, :]
            x = tl.load(inputs[None, :] + k[:, None], mask, 0.0)
            weights = tl.reshape(int4_columns(words, j, PTX), [BM, 32]).to(x.dtype)
            factor = tl.load(scale + block * 64 + j).to(tl.float32)
            total += tl.dot(weights, x, input_precision="ieee") * factor[:, None]
    return total
