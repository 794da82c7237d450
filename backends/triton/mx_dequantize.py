"""MXFP4 to plain numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("mx_dequantize", name="grouped", needs=NEEDS, supports=runs, graph_safe=True)
def mx_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See the operator."""
    return kernels("mx").mx_dequantize(packed, scales, dtype)
