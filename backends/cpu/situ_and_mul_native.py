"""SiTU on CPU by our own kernel."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.cpu.native.experts import gated
from k3hal.backends.cpu.native.library import supported
from k3hal.dispatch import provides


@provides("situ_and_mul", name="native", priority=60, supports=supported)
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See the operator."""
    return gated(x, "situ", beta, linear_beta).to(x.dtype)
