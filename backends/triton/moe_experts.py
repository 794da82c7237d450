"""Routed experts with plain weights: grouped GEMMs over choices sorted by expert."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._experts import PLAIN, Cut, other_cuts
from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides


def _cut(cut: Cut) -> Callable[..., Tensor]:
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
        """See the operator. The activation is rounded to x dtype between the GEMMs."""
        return kernels("experts").sum_of_experts(
            x, ids, weights, w13, None, w2, None, activation, (beta, linear_beta), cut, format="plain"
        )

    return moe_experts


moe_experts = provides(
    "moe_experts",
    name="grouped",
    needs=NEEDS,
    supports=runs,
    graph_safe=True,
    tactics={name: _cut(cut) for name, cut in other_cuts(PLAIN).items()},
)(_cut(PLAIN))
