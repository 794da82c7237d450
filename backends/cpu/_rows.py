"""Row-wise helpers: work in blocks that stay in cache, and the RMS scale without wide temporaries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

BLOCK_ELEMENTS = 1 << 18
"""Fresh memory is the dearest part of a large elementwise step; a block's temporaries are reused by the next one's."""


def row_blocks(rows: int, elements_per_row: int, elements: int | None = None) -> Iterator[slice]:
    """Slices that cover `rows`, each of about `elements` (BLOCK_ELEMENTS) elements."""
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, elements_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def normalise_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D] in fp32 with one cast, a new tensor; weight [D] of any float dtype."""
    if x.numel() <= BLOCK_ELEMENTS and weight.dtype == x.dtype:
        return rms_norm(x, weight.shape, weight, eps)
    weight, out, dim = weight.float(), torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    rows, results = x.reshape(-1, dim), out.view(-1, dim)
    for block in row_blocks(rows.shape[0], dim):
        wide = rows[block].float()
        results[block] = (wide * rms_scale(wide, eps)).mul_(weight)
    return out


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """`rsqrt(mean x^2 + eps)` over the last axis of an fp32 tensor, kept as an axis of one."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
