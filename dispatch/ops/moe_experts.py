"""Routed experts with plain weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._experts import ROUTINGS, Routing, routed_cost, routing_samples, sum_of_experts


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """`sum_j weights[t, j] * w2_e act(w13_e x_t)` over each token's experts e = ids[t, j], `[T, D]`.

    x [T, D] (x dtype), ids int32 [T, k] distinct within a row, weights fp32 [T, k], w13 [E, 2 I, D] rows [gate; up],
    w2 [E, D, I] (x dtype), activation "situ" or "silu" (betas unused). fp32 throughout, router weight after w2, fp32
    combine, one cast. Nothing mutated. A negative id contributes nothing; x and weights of a row whose every id is
    negative are garbage and its output is zero. Source: k3_architecture.md §5.2.
    """
    return sum_of_experts(x, ids, weights, lambda e: (w13[e].float(), w2[e].float()), activation, beta, linear_beta)


def dense_weights(g: torch.Generator, r: Routing) -> dict[str, Any]:
    """Experts whose outputs have about unit size."""
    w13 = torch.randn(r.experts, 2 * r.inner, r.hidden, generator=g, dtype=r.torch_dtype)
    w2 = torch.randn(r.experts, r.hidden, r.inner, generator=g, dtype=r.torch_dtype)
    return {"w13": w13.mul_(r.hidden**-0.5), "w2": w2.mul_(r.inner**-0.5)}


def samples() -> Iterator[Sample]:
    """All routings of `_experts.ROUTINGS`; of those a device is for with a quarter of the experts.

    All of K3's are 7 GB in bf16, which it does not come in, and every check copies them several times.
    """
    return routing_samples(dense_weights, (_fewer(r) if "device" in r.tags else r for r in ROUTINGS))


def _fewer(r: Routing) -> Routing:
    return replace(r, experts=r.experts // 4)


def cost(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Cost:
    """See `routed_cost`."""
    return routed_cost(x, ids, w2.shape[2], (w13.nbytes + w2.nbytes) / w13.shape[0])


OPERATOR = Operator(
    reference=moe_experts,
    family="moe",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    weights=("w13", "w2"),
    invariants=("batch_composition", "padding_rows", "choice_order"),
)
