"""Routed experts with plain weights on CPU by our own kernel: every chosen expert streamed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k3hal.backends.cpu.native.experts import compile_kernels, pack_experts, sum_of_experts
from k3hal.backends.cpu.native.library import supported
from k3hal.backends.cpu.native.packing import Packed
from k3hal.dispatch import provides


def packed(w13: Tensor, w2: Tensor) -> Mapping[str, Any]:
    """Both stacks in the kernel's layout."""
    compile_kernels()
    return {"w13": pack_experts(w13, None), "w2": pack_experts(w2, None)}


@provides("moe_experts", name="native", priority=60, supports=supported, prepare=packed)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Packed,
    w2: Packed,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator; w13 and w2 are `Packed`."""
    return sum_of_experts(x, ids, weights, w13, w2, activation, beta, linear_beta).to(x.dtype)
