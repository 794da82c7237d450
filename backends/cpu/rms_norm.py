"""RMSNorm on CPU: two passes over rows in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._rows import rms_scale, row_blocks
from k3hal.dispatch import provides


@provides("rms_norm", name="rows")
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator."""
    if residual is not None:
        x = residual.add_(x)
    weight = weight.float()
    rows, out = x.flatten(0, -2), torch.empty(x.shape, dtype=x.dtype)
    flat = out.flatten(0, -2)
    for block in row_blocks(rows.shape[0], x.shape[-1]):
        wide = rows[block].float()
        flat[block] = (wide * rms_scale(wide, eps)).mul_(weight)
    return out
