"""SiTU gated activation in one pass."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


@provides("situ_and_mul", name="fused", needs=NEEDS, supports=runs, graph_safe=True)
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See the operator."""
    return kernels("activations").gated(x, True, beta, linear_beta)
