"""MXFP4 to numbers on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._mxfp4 import dequantize
from k3hal.dispatch import provides


@provides("mx_dequantize", name="table")
def mx_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact in fp32, and the cast to bf16 is exact too."""
    return dequantize(packed, scales, keep=True).to(dtype)
