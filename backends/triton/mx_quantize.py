"""Plain numbers to MXFP4."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("mx_quantize", name="grouped", needs=NEEDS, supports=runs, graph_safe=True)
def mx_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the operator."""
    return kernels("mx").mx_quantize(x)
