"""Routed experts with MXFP4 weights and activations rounded to MXFP8.

No CPU is faster for the rounding: this is what machines that multiply in the format are held against.
"""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.cpu._expert_sum import sum_of_experts
from k3hal.backends.cpu.moe_experts_mxfp4 import matrices
from k3hal.dispatch import provides
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded


@provides("moe_experts_a8w4", name="rounded", mxfp4="dequantised")
def moe_experts_a8w4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator."""
    first, second = matrices(w13, w13_scale), matrices(w2, w2_scale)
    return sum_of_experts(x, ids, weights, first, second, (activation, beta, linear_beta), mxfp8_rounded)
