"""Products with an fp32 result on CPU, from weights kept in fp32."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import linear

from k3hal.dispatch import provides


def _widen(weight: Tensor) -> Mapping[str, Tensor]:
    """fp32 weights: PyTorch has no bf16 product with an fp32 result on CPU, and converting each step costs more."""
    return {"weight": weight.float()}


@provides("linear_fp32", name="fp32", prepare=_widen)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator; `weight` is fp32."""
    return linear(x.float(), weight)
