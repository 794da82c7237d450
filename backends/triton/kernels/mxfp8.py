"""Numbers rounded to MXFP8, whole groups of 32 at a time: as values, or as codes with their scales."""

# Triton types a maximum as what may be a tuple.
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.dispatch.ops.mx_dequantize import GROUP

GROUPS = 32
"""Groups a program."""


@triton.jit
def power(exponent):
    """2^exponent as fp32, for exponents from -127 to 127."""
    bits = tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def group_exponent(largest):
    """The scale's exponent of groups whose largest magnitude has these fp32 bits: 8 below it, from -127 on."""
    return tl.maximum((largest >> 23) - 135, -127)


@triton.jit
def e4m3(size):
    """fp32 magnitudes below 512 rounded to E4M3's, halves to even, saturating at 448."""
    binade = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121)
    # A sum with 1.5 times 2^23 steps keeps no bit below a step, of which a binade has eight.
    steps = ((binade + 20) << 23 | 0x00400000).to(tl.float32, bitcast=True)
    return tl.minimum((size + steps) - steps, 448.0)


@triton.jit
def rounded(values, AXIS: tl.constexpr):
    """fp32 values over the power of two of their group, which AXIS runs over, and that power's exponent.

    A group with a value that is not finite is all NaN.
    """
    bits = values.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, AXIS)
    exponent = group_exponent(largest)
    factor = tl.where(largest < 0x7F800000, power(-exponent), float("nan"))
    size = e4m3(tl.abs(values) * tl.expand_dims(factor, AXIS))
    size = tl.where(tl.expand_dims(largest < 0x7F800000, AXIS), size, float("nan"))
    return tl.where(bits < 0, -size, size), exponent


@triton.jit
def _round(x, out, scales, groups, GROUPS: tl.constexpr, CODES: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    live = group < groups
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    number, exponent = rounded(tl.load(x + at, live[:, None], 0.0).to(tl.float32), 1)
    if CODES:
        tl.store(scales + group, (exponent + 127).to(tl.uint8), live)
    else:
        number *= power(exponent)[:, None]
    tl.store(out + at, number.to(out.dtype.element_ty), live[:, None])


def round_rows(x: Tensor) -> Tensor:
    """x [.., D] rounded, in its own dtype, which holds the result exactly."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if groups := x.numel() // GROUP:
        _round[(triton.cdiv(groups, GROUPS),)](x.contiguous(), out, out, groups, GROUPS, False)
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [.., D] and scales u8 [.., D / 32]; a group that is not finite is codes of NaN."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // GROUP, dtype=torch.uint8, device=x.device)
    if groups := scales.numel():
        _round[(triton.cdiv(groups, GROUPS),)](x.contiguous(), codes, scales, groups, GROUPS, True)
    return codes, scales
