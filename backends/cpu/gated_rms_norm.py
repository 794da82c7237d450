"""KDA's gated output norm on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._rows import rms_scale, row_blocks
from k3hal.dispatch import provides


@provides("gated_rms_norm", name="rows")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the operator."""
    out = torch.empty(x.shape, dtype=x.dtype)
    for block in row_blocks(x.shape[0], x.shape[1] * x.shape[2]):
        wide = x[block].float()
        scaled = (wide * rms_scale(wide, eps)).mul_(weight)
        out[block] = scaled.mul_(torch.sigmoid(gate[block].float()))
    return out
