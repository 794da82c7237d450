"""MXFP4 codes and scales from numbers and back, a block of whole groups a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels.mxfp8 import power
from k3hal.dispatch.ops.mx_dequantize import GROUP

GROUPS = 32
"""Groups a program."""


@triton.jit
def _dequantize(packed, scales, out, groups, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    live = group < groups
    scale = tl.load(scales + group, live, 0).to(tl.int32)
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    byte = tl.load(packed + at, live[:, None], 0).to(tl.int32)
    code = tl.reshape(tl.join(byte & 15, byte >> 4), [GROUPS, 32])
    # The sign, and an exponent of 0 to 3 with one bit of mantissa, are fp32 bits of 2^-126 of the value.
    value = ((code & 8) << 28 | (code & 7) << 22).to(tl.float32, bitcast=True) * power(126)
    factor = tl.where(scale == 255, float("nan"), power(scale - 127))
    number = value * factor[:, None]
    tl.store(out + group[:, None] * 32 + tl.arange(0, 32)[None, :], number.to(out.dtype.element_ty), live[:, None])


@triton.jit
def _quantize(x, packed, scales, groups, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    live = group < groups
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = tl.load(x + at, live[:, None], 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    # Magnitudes in the order of their bits; everything from infinity on is not finite.
    largest = tl.max(bits & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    exponent = tl.maximum((largest >> 23) - 129, -127)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * power(-exponent)[:, None]
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32) + tl.where(bits < 0, 8, 0)
    code = tl.where(finite[:, None], code, 0)
    low, high = tl.split(tl.reshape(code, [GROUPS, 16, 2]))
    place = packed + group[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(place, (low | high << 4).to(tl.uint8), live[:, None])
    tl.store(scales + group, tl.where(finite, exponent + 127, 255).to(tl.uint8), live)


def mx_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See the operator."""
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    if groups := scales.numel():
        _dequantize[(triton.cdiv(groups, GROUPS),)](packed.contiguous(), scales.contiguous(), out, groups, GROUPS)
    return out


def mx_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the operator."""
    lead, width = x.shape[:-1], x.shape[-1]
    packed = torch.empty(*lead, width // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*lead, width // GROUP, dtype=torch.uint8, device=x.device)
    if groups := scales.numel():
        _quantize[(triton.cdiv(groups, GROUPS),)](x.contiguous(), packed, scales, groups, GROUPS)
    return packed, scales
