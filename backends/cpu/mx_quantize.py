"""Numbers to MXFP4 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides
from k3hal.dispatch.ops.mx_dequantize import GROUP


@provides("mx_quantize", name="rounded")
def mx_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 inside: a scaled element is exact unless it is far too small to be anything but zero."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    finite = groups.isfinite().all(dim=-1, keepdim=True)
    groups = groups.where(finite, 0.0)
    amax = groups.abs().amax(dim=-1, keepdim=True)
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent - 3, -127).clamp_(-127, 127)
    # 2^-exponent would be subnormal at 127; two factors keep every product exact.
    half = exponent // 2
    scaled = torch.ldexp(torch.ldexp(groups, -half), half - exponent)
    y = scaled.abs()
    codes = torch.where(y < 2, (y + y).round_(), torch.where(y < 4, y.round() + 2, (y / 2).round_() + 4)).clamp_(max=7)
    pairs = (codes.to(torch.uint8) | scaled.signbit().to(torch.uint8) << 3).flatten(-2).unflatten(-1, (-1, 2))
    scales = torch.where(finite, exponent + 127, 255).squeeze(-1).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, scales
