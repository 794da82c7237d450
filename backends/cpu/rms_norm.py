"""RMSNorm on CPU."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.cpu._rows import normalise_rows
from k3hal.dispatch import provides


@provides("rms_norm", name="rows")
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator."""
    return normalise_rows(x if residual is None else residual.add_(x), weight, eps)
