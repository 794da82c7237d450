"""Row-wise helpers: work in blocks that stay in cache, and the RMS scale without wide temporaries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
"""Fresh memory is the dearest part of a large elementwise step; a block's temporaries are reused by the next one's."""


def row_blocks(rows: int, elements_per_row: int) -> Iterator[slice]:
    """Slices that cover `rows`, each of about BLOCK_ELEMENTS elements; one slice where all fits."""
    step = max(1, BLOCK_ELEMENTS // max(1, elements_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """`rsqrt(mean x^2 + eps)` over the last axis of an fp32 tensor, kept as an axis of one."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
