"""Faults of the MXFP4 number format."""

from __future__ import annotations

from typing import Any

import torch

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

MX = Catalogue()
fault = MX.fault


@fault("mx_dequantize")
def nibbles_swapped(right: Right, args: Arguments) -> Any:
    """The high nibble comes first."""
    return right(args, packed=args["packed"] >> 4 | (args["packed"] & 15) << 4)


@fault("mx_dequantize")
def scale_of_the_next_group(right: Right, args: Arguments) -> Any:
    """Every group has its neighbour's scale."""
    return right(args, scales=args["scales"].roll(1, -1))


@fault("mx_dequantize")
def one_scale_doubled(right: Right, args: Arguments) -> Any:
    """One group has twice its scale."""
    scales = args["scales"].clone()
    if scales.numel():
        scales.view(-1)[-1] = scales.view(-1)[-1].clamp_max(253) + 1
    return right(args, scales=scales)


@fault("mx_dequantize")
def bias_of_128(right: Right, args: Arguments) -> Any:
    """The scale's bias is 128."""
    return right(args, scales=args["scales"].clamp_min(1) - 1)


@fault("mx_dequantize")
def largest_code_is_8(right: Right, args: Arguments) -> Any:
    """Code 7 is 8: the mantissa bit of the largest exponent is dropped."""
    out = right(args).clone()
    nibbles = torch.stack((args["packed"] & 15, args["packed"] >> 4), -1).flatten(-2)
    return torch.where(nibbles & 7 == 7, out / 6 * 8, out).to(out.dtype)


@fault("mx_dequantize", first="every_code")
def subnormals_flushed(right: Right, args: Arguments) -> Any:
    """What is below the smallest normal number is flushed to zero."""
    out = right(args)
    return torch.where(out.float().abs() < 2.0**-126, torch.zeros_like(out), out)


@fault("mx_dequantize", first="every_code")
def half_is_zero(right: Right, args: Arguments) -> Any:
    """Code 1, E2M1's only subnormal, is taken as zero."""
    nibbles = torch.stack((args["packed"] & 15, args["packed"] >> 4), -1).flatten(-2)
    out = right(args)
    return torch.where(nibbles & 7 == 1, torch.zeros_like(out), out)


@fault("mx_dequantize", first="every_code")
def scale_255_is_a_number(right: Right, args: Arguments) -> Any:
    """The scale that stands for NaN is taken for 2^128."""
    out = right(args)
    nan = (args["scales"] == 255).repeat_interleave(32, -1)
    return torch.where(nan, torch.inf, out.float()).to(out.dtype)


@fault("mx_dequantize")
def groups_of_16(right: Right, args: Arguments) -> Any:
    """Scales are applied to groups of 16, as in NVFP4."""
    spread = args["scales"].repeat_interleave(2, -1)[..., : args["scales"].shape[-1]]
    return right(args, scales=spread)


@fault("mx_dequantize")
def signs_dropped(right: Right, args: Arguments) -> Any:
    """The sign bit is not read."""
    return right(args, packed=args["packed"] & 0x77)


@fault("mx_quantize")
def high_nibble_first(right: Right, args: Arguments) -> Any:
    """Elements are packed high nibble first."""
    packed, scales = right(args)
    return packed >> 4 | (packed & 15) << 4, scales


@fault("mx_quantize")
def scale_rounded_up(right: Right, args: Arguments) -> Any:
    """The scale is the ceiling of log2, as of another recipe."""
    groups = args["x"].double().unflatten(-1, (-1, 32))
    top = groups.abs().amax(-1, keepdim=True)
    whole = torch.frexp(top).mantissa == 0.5
    lifted = torch.where((top > 0) & groups.isfinite().all(-1, keepdim=True) & ~whole, groups / 2, groups)
    packed, scales = right({"x": lifted.flatten(-2).to(args["x"].dtype)})
    return packed, torch.where((top > 0).squeeze(-1) & ~whole.squeeze(-1) & (scales < 254), scales + 1, scales)


@fault("mx_quantize", first="halves")
def halves_away_from_zero(right: Right, args: Arguments) -> Any:
    """Halves are rounded away from zero."""
    x = args["x"].float()
    return right(args, x=torch.where(x.isfinite(), x * (1 + 2**-20), x))


@fault("mx_quantize")
def truncated(right: Right, args: Arguments) -> Any:
    """Elements are truncated to the code below."""
    x = args["x"]
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    _, scales = right(args)
    unit = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    scaled = (x.double() / unit).clamp(-6, 6)
    below = steps[(torch.searchsorted(steps, scaled.abs().nan_to_num(0.0), right=True) - 1).clamp_min(0)]
    packed, _ = right({"x": torch.where(x.isfinite(), below * unit * x.double().sign(), x.double()).to(x.dtype)})
    return packed, scales


@fault("mx_quantize", first="zero_groups")
def sign_of_zero_lost(right: Right, args: Arguments) -> Any:
    """Negative zero becomes zero."""
    packed, scales = right(args)
    low, high = packed & 15, packed >> 4
    low, high = torch.where(low == 8, 0, low), torch.where(high == 8, 0, high)
    return low | high << 4, scales


@fault("mx_quantize", first="not_finite")
def infinity_saturates(right: Right, args: Arguments) -> Any:
    """A group with an infinity is quantised as if it held a large number."""
    return right(args, x=args["x"].nan_to_num(0.0))


@fault("mx_quantize", first="zero_groups")
def zero_group_scale_one(right: Right, args: Arguments) -> Any:
    """A group of zeros gets the scale 1."""
    packed, scales = right(args)
    zero = (args["x"].unflatten(-1, (-1, 32)) == 0).all(-1)
    return packed, torch.where(zero, 127, scales).to(torch.uint8)


@fault("mx_quantize", first="tiny_numbers")
def subnormal_scale_flushed(right: Right, args: Arguments) -> Any:
    """A group of subnormal numbers is taken as zero."""
    x = args["x"]
    return right(args, x=torch.where(x.abs() < 2.0**-126, torch.zeros_like(x), x))


@fault("mx_quantize")
def scale_of_the_whole_row(right: Right, args: Arguments) -> Any:
    """One scale a row."""
    packed, scales = right(args)
    return packed, scales.amax(-1, keepdim=True).expand_as(scales).contiguous() if scales.numel() else scales
