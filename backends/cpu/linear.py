"""Projections on CPU by PyTorch's library."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from k3hal.dispatch import provides


@provides("linear", name="library")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return functional.linear(x, weight)
