"""Per-head projections on CPU by PyTorch's library."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("head_linear", name="library")
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
