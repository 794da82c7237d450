"""RMSNorm with its residual addition: one program a row."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("rms_norm", name="fused", needs=NEEDS, supports=runs, graph_safe=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator."""
    return kernels("rms_norm").rms_norm(x, weight, eps, residual)
