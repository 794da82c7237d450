"""Routed experts with MXFP4 weights on CPU by our own kernel: codes are decoded in registers, as they stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k3hal.backends.cpu.native.experts import compile_kernels, pack_experts, sum_of_experts
from k3hal.backends.cpu.native.library import supported
from k3hal.backends.cpu.native.packing import Packed
from k3hal.dispatch import provides


def packed(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Any]:
    """Both stacks in the kernel's layout, each with its scales inside."""
    compile_kernels()
    first, second = pack_experts(w13, w13_scale), pack_experts(w2, w2_scale)
    return {"w13": first, "w13_scale": None, "w2": second, "w2_scale": None}


@provides("moe_experts_mxfp4", name="native", priority=60, supports=supported, prepare=packed, mxfp4="w4a16")
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Packed,
    w13_scale: None,
    w2: Packed,
    w2_scale: None,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator; w13 and w2 are `Packed` and carry their scales."""
    del w13_scale, w2_scale
    return sum_of_experts(x, ids, weights, w13, w2, activation, beta, linear_beta).to(x.dtype)
