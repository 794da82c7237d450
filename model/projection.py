"""A weight with the operator that multiplies by it."""

from __future__ import annotations

from torch import Tensor

from k3hal.model.context import Build


class Projection:
    """x [T, K] to `x weight^T` [T, N], in x dtype. `weight` is laid out as the chosen provider wants it."""

    def __init__(self, build: Build, weight: Tensor) -> None:
        self.op = build.ops.fn("linear")
        self.weight = build.ops.prepare("linear", weight=weight)["weight"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight)
