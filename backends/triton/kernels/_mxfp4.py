"""Packed MXFP4 words (`backends/triton/_mxfp4.py` defines the layout) to bfloat16, in registers."""

# Triton types the result of inline assembly as what may be a tuple.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fields(words, J: tl.constexpr):
    """Code J of each half of the words as bfloat16 bits: sign in bit 15, the rest in bits 8 to 6."""
    if J == 0:
        pairs = words & -0x7E3F7E40
    elif J == 1:
        pairs = (words << 5 & -0x7FFF8000) | (words << 3 & 0x01C001C0)
    elif J == 2:
        pairs = words << 6 & -0x7E3F7E40
    else:
        pairs = (words << 1 & -0x7FFF8000) | (words >> 5 & 0x01C001C0)
    return pairs


@triton.jit
def columns(words, factors, J: tl.constexpr, PTX: tl.constexpr):
    """Columns 32 J to 32 J + 31 of a block as bfloat16 [.., 16, 2], times 2^-16; words [.., 16], factors [..].

    Under PTX both halves of a word are multiplied by one instruction, which Triton does not find by itself.
    """
    # As bfloat16 these are subnormals: an exponent of 0 to 3 and one bit of mantissa is what E2M1 is.
    pairs = fields(words, J)
    exponent = tl.expand_dims(factors >> 8 * J & 255, -1)
    if PTX:
        both = exponent * 0x00800080
        pairs = tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, both], tl.int32, True, 1)
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if not PTX:
        factor = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = low * factor, high * factor
    return tl.join(low, high)
