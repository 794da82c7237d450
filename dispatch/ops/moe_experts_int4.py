"""Routed experts with group-32 symmetric int4 weights and activations in x dtype."""

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
from k3hal.dispatch.ops.mx_dequantize import GROUP


def int4_dequantize(packed: Tensor, scales: Tensor) -> Tensor:
    """`(nibble - 8) * scale` in fp32 [.., D], low nibble first."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return ((nibbles.float() - 8).unflatten(-1, (-1, GROUP)) * scales.float()[..., None]).flatten(-2)


def moe_experts_int4(
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
    """`moe_experts` with weights (nibble - 8) * scale, `[T, D]`.

    x [T, D] (x dtype), ids int32 [T, k] distinct within a row, weights fp32 [T, k], w13 u8 [E, 2 I, D / 2] rows
    [gate; up], w13_scale (x dtype) [E, 2 I, D / 32], w2 u8 [E, D, I / 2], w2_scale (x dtype) [E, D, I / 32]; low nibble
    first. Activations are never quantised; fp32 accumulation, router weight after w2, fp32 combine, one cast. Nothing
    mutated. Negative ids and padding rows as in `moe_experts`. Source: k3_architecture.md §5.2; the number format is
    compressed-tensors' pack-quantized int4.
    """

    def expert(e: int) -> tuple[Tensor, Tensor]:
        return int4_dequantize(w13[e], w13_scale[e]), int4_dequantize(w2[e], w2_scale[e])

    return sum_of_experts(x, ids, weights, expert, activation, beta, linear_beta)


def _codes(g: torch.Generator, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
    scales = (torch.rand(*shape[:-1], shape[-1] // GROUP, generator=g) + 0.5) * shape[-1] ** -0.5 / 4.6
    return packed, scales.to(dtype)


def int4_weights(g: torch.Generator, r: Routing) -> dict[str, Any]:
    """Random codes; outputs have about unit size."""
    w13, w13_scale = _codes(g, r.experts, 2 * r.inner, r.hidden, dtype=r.torch_dtype)
    w2, w2_scale = _codes(g, r.experts, r.hidden, r.inner, dtype=r.torch_dtype)
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}


def samples() -> Iterator[Sample]:
    """The routings of `_experts`."""
    return routing_samples(int4_weights, ROUTINGS + BENCH_ROUTINGS)


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
    reference=moe_experts_int4,
    family="moe",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    weights=("w13", "w13_scale", "w2", "w2_scale"),
    invariants=("batch_composition", "padding_rows", "choice_order"),
)
