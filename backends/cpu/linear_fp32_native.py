"""Products with an fp32 result on CPU by our own kernel."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.cpu.linear_native import packed, product
from k3hal.backends.cpu.native.library import supported
from k3hal.backends.cpu.native.packing import Packed
from k3hal.dispatch import provides


@provides("linear_fp32", name="native", priority=60, supports=supported, prepare=packed)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator; `weight` is `Packed`."""
    assert isinstance(weight, Packed)
    return product(x, weight)
