"""Routed experts with MXFP4 weights and activations rounded to MXFP8 (A8W4)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._experts import BENCH_ROUTINGS, ROUTINGS, routed_cost, routing_samples, sum_of_experts
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded
from k3hal.dispatch.ops.moe_experts_mxfp4 import mxfp4_weights
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize


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
    """`moe_experts_mxfp4` with x and the activation between the products rounded to MXFP8, `[T, D]`.

    Both are rounded as `mxfp8_rounded` says, in groups of 32 columns, the activation from fp32. What is multiplied
    then is exact in bfloat16; fp32 accumulation, router weight after w2, fp32 combine, one cast. Shapes, negative ids
    and padding rows as in `moe_experts_mxfp4`. Nothing mutated. A runtime's choice: no checkpoint asks for it.
    Source: k3_architecture.md §6; OCP Microscaling formats 1.0 §6.3.
    """

    def expert(e: int) -> tuple[Tensor, Tensor]:
        return (
            mx_dequantize(w13[e], w13_scale[e], torch.float32),
            mx_dequantize(w2[e], w2_scale[e], torch.float32),
        )

    return sum_of_experts(x, ids, weights, expert, activation, beta, linear_beta, mxfp8_rounded)


_LARGE = ("k3_tp8_prefill", "k3_ep8")


def samples() -> Iterator[Sample]:
    """The routings of `_experts`; of those for a device the smallest: `moe_experts_mxfp4` has the same products."""
    judged = [routing for routing in ROUTINGS if routing.name not in _LARGE]
    return routing_samples(mxfp4_weights, (*judged, *BENCH_ROUTINGS))


def cost(
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
) -> Cost:
    """See `routed_cost`."""
    stored = sum(t.nbytes for t in (w13, w13_scale, w2, w2_scale))
    return routed_cost(x, ids, 2 * w2.shape[2], stored / w13.shape[0])


OPERATOR = Operator(
    reference=moe_experts_a8w4,
    family="moe",
    outputs={"out": "mxfp8"},
    samples=samples,
    cost=cost,
    weights=("w13", "w13_scale", "w2", "w2_scale"),
    invariants=("batch_composition", "padding_rows", "choice_order"),
)
