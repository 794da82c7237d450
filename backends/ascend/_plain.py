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


def zeroed(keep: Tensor, x: Tensor) -> Tensor:
    """x where `keep` [T, ...] is true in its row, else zeros, whatever x holds there."""
    return torch.where(keep.view(*keep.shape, *[1] * (x.ndim - keep.ndim)), x, torch.zeros_like(x))


def live_rows(cu_seqlens: Tensor, slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which packed rows belong to a sequence with a slot, bool [rows], and to which, int64 [rows]; a row of padding is
    given to the last one."""
    every = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = (every.unsqueeze(1) >= cu_seqlens[1:]).sum(1).clamp_max(slots.numel() - 1)
    return (every < cu_seqlens[-1]) & (slots != 0).index_select(0, sequence), sequence
