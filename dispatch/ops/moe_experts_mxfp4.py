"""Routed experts with MXFP4 weights and activations in x dtype (A16W4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._experts import (
    BENCH_ROUTINGS,
    ROUTINGS,
    Routing,
    routed_cost,
    routing_samples,
    sum_of_experts,
)
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize, random_codes


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
    """`moe_experts` with weights `mx_dequantize`d exactly, `[T, D]`.

    x [T, D] (x dtype), ids int32 [T, k] distinct within a row, weights fp32 [T, k], w13 u8 [E, 2 I, D / 2] rows
    [gate; up], w13_scale u8 [E, 2 I, D / 32], w2 u8 [E, D, I / 2], w2_scale u8 [E, D, I / 32] in the layout of
    `mx_dequantize`, activation "situ" or "silu". Activations are never quantised; fp32 accumulation, router weight
    after w2, fp32 combine, one cast. Nothing mutated. Negative ids and padding rows as in `moe_experts`.
    Source: k3_architecture.md §5.2, §6.
    """

    def expert(e: int) -> tuple[Tensor, Tensor]:
        return (
            mx_dequantize(w13[e], w13_scale[e], torch.float32),
            mx_dequantize(w2[e], w2_scale[e], torch.float32),
        )

    return sum_of_experts(x, ids, weights, expert, activation, beta, linear_beta)


def mxfp4_weights(g: torch.Generator, r: Routing) -> dict[str, Any]:
    """Random codes under scales of a few binades, about as large as dense weights would be."""
    w13, w13_scale = random_codes(g, r.experts, 2 * r.inner, r.hidden, low=119, high=123)
    w2, w2_scale = random_codes(g, r.experts, r.hidden, r.inner, low=119, high=123)
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}


def samples() -> Iterator[Sample]:
    """All routings of `_experts`."""
    return routing_samples(mxfp4_weights, ROUTINGS + BENCH_ROUTINGS)


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
    reference=moe_experts_mxfp4,
    family="moe",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    weights=("w13", "w13_scale", "w2", "w2_scale"),
    invariants=("batch_composition", "padding_rows", "choice_order"),
)
