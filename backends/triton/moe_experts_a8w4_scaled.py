"""Routed experts with MXFP4 weights and activations rounded to MXFP8, where tensor cores multiply these formats."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._experts import Cut, Shape
from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides
from k3hal.dispatch.call import Answer, Call, No

ARCHES = ("gfx950", "sm_100", "sm_103")
"""Where Triton multiplies two formats by one instruction; for sm_12x, which could, it widens both (3.7.1, 3.9)."""
# Of fewer rows than 128 Blackwell's instruction multiplies none: Triton widens both formats then.
CUT = Cut(
    few=(Shape(128, 128, 4, 2), Shape(128, 128, 4, 2)),
    some=(Shape(128, 128, 4, 2), Shape(128, 128, 4, 2)),
    many=(Shape(128, 128, 8, 2), Shape(128, 128, 8, 2)),
    tallest=64,
)


def _supports(call: Call) -> Answer:
    # An emulated chip is interpreted too, but answers as the chip itself would.
    if call.device.arch not in ARCHES and call.device.vendor != "cpu":
        return No(f"Triton multiplies MXFP4 by MXFP8 on {', '.join(ARCHES)}, this is {call.device.arch}")
    return runs(call)


@provides(
    "moe_experts_a8w4", name="scaled", needs=NEEDS, supports=_supports, graph_safe=True, mxfp4="native", priority=50
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
    """See the operator. Weights stay as a checkpoint has them."""
    return kernels("scaled_experts").sum_of_experts(
        x, ids, weights, w13, w13_scale, w2, w2_scale, activation, (beta, linear_beta), CUT
    )
