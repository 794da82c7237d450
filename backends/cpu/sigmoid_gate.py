"""Sigmoid gate on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._rows import row_blocks
from k3hal.dispatch import provides


@provides("sigmoid_gate", name="rows")
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See the operator."""
    out = torch.empty(x.shape, dtype=x.dtype)
    for block in row_blocks(*x.shape):
        out[block] = torch.sigmoid(gate[block].float()).mul_(x[block])
    return out
