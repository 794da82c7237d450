"""What the providers made of torch's own operators share. They run on any device of torch's; torch_npu gives it one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3hal.dispatch import Needs

PRIORITY = 20
"""Behind every fused kernel."""
NEEDS = Needs(packages={"torch-npu": ">=2.7"})
SCRATCH_BYTES = 1 << 28
"""About what a provider makes at a time of weights or cached rows that it gathers."""


def blocks(count: int, each: int) -> Iterator[slice]:
    """0..count in slices of at most `each`, at least one long."""
    step = max(1, each)
    return (slice(first, min(count, first + step)) for first in range(0, count, step))


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean x^2 + eps) * weight`, fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
