"""Routed experts with plain weights on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from k3hal.backends.cpu._expert_sum import Load, sum_of_experts
from k3hal.dispatch import provides


def _matrices(stack: Tensor) -> Load:
    def load(experts: list[int]) -> Iterator[Tensor]:
        return (stack[e : e + 1].float() for e in experts)

    return load


@provides("moe_experts", name="sorted")
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
    """fp32 weights are used where they lie; bf16 ones are converted expert by expert."""
    return sum_of_experts(x, ids, weights, _matrices(w13), _matrices(w2), (activation, beta, linear_beta))
