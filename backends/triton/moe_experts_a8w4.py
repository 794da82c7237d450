"""Routed experts with MXFP4 weights and activations rounded to MXFP8, multiplied as bfloat16, which holds both exactly:
for machines without tensor cores for the formats."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._experts import PACKED
from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.backends.triton.moe_experts_mxfp4 import fitting, packed
from k3hal.dispatch import provides


@provides(
    "moe_experts_a8w4", name="rounded", needs=NEEDS, supports=runs, prepare=packed, graph_safe=True, mxfp4="w4a16"
)
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
    return kernels("experts").sum_of_experts(
        kernels("mxfp8").round_rows(x), ids, weights, w13, w13_scale, w2, w2_scale, activation, (beta, linear_beta),
        fitting(PACKED, x.device), format="mxfp4", rounded=True,
    )  # fmt: skip
