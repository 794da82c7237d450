"""Routed experts with MXFP4 weights by our own Hopper kernels: codes are decoded on their way to tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k3hal.backends.nvidia.cuda.experts import Limits, sum_of_experts
from k3hal.backends.nvidia.cuda.library import compiles, library
from k3hal.backends.nvidia.cuda.packing import pack
from k3hal.dispatch import Needs, provides

NEEDS = Needs(arch=("sm_90",), dtypes=("bfloat16",))


def packed(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Any]:
    """Both stacks in units, codes apart from scales; as many bytes as before but for a K that is not in 128s."""
    library("experts")
    (first, first_scale), (second, second_scale) = pack(w13, w13_scale), pack(w2, w2_scale)
    return {"w13": first, "w13_scale": first_scale, "w2": second, "w2_scale": second_scale}


@provides(
    "moe_experts_mxfp4",
    name="hopper",
    needs=NEEDS,
    supports=compiles,
    prepare=packed,
    graph_safe=True,
    mxfp4="w4a16",
)
def moe_experts_mxfp4(
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
    """See the operator. Two things are rounded to bfloat16 that the operator keeps in fp32: the activation between the
    GEMMs, always, and each choice's weighted output before the fp32 sum, where there are more choices than `Limits`
    streams in fp32 (`Limits.half`) or experts have more than `Limits.few` of them. Products, weights and sums are exact
    or fp32."""
    betas = (beta, linear_beta) if activation == "situ" else (0.0, 0.0)
    return sum_of_experts(x, ids, weights, w13, w13_scale, w2, w2_scale, betas, Limits())
