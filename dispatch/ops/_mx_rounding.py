"""Numbers rounded to OCP MXFP8 and back: what products of that format make of activations."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch.ops.mx_dequantize import GROUP

LARGEST_EXPONENT, LARGEST = 8, 448.0
"""Of E4M3."""


def mxfp8_rounded(x: Tensor) -> Tensor:
    """x [.., D], D a multiple of 32, in fp32 after rounding to MXFP8.

    A group of 32 has the scale 2^(floor(log2 amax) - 8), clamped to 2^-127 .. 2^127 (a zero group takes the smallest);
    elements are x / scale rounded to E4M3, halves to even, saturating at 448. A group with a non-finite element is all
    NaN. Source: OCP Microscaling formats 1.0 §6.3, k3_architecture.md §6.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent, -127))
    codes = (groups / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.where(largest.isfinite(), codes.float() * scale, torch.nan).flatten(-2)
