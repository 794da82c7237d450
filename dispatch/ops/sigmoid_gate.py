"""Sigmoid output gate, as MLA uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn, spread


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` (k3_architecture §3, step 5).

    x and gate [T, D] in the activation dtype, rows of either may be strided. fp32 inside, one cast. Elementwise.
    Returns a new tensor [T, D] in x's dtype.
    """
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def _cost(x: Tensor, gate: Tensor) -> Cost:
    return Cost(flops=5.0 * x.numel(), bytes=float(2 * x.nbytes + gate.nbytes))


def _samples() -> Iterator[Sample]:
    cases = [
        ("plain", (5, 48), False, 1.0, frozenset({"tiny"})),
        ("no_rows", (0, 48), False, 1.0, frozenset({"edge"})),
        ("odd", (17, 127), False, 1.0, frozenset({"edge"})),
        ("row_strided", (9, 64), True, 1.0, frozenset({"adversarial", "must"})),
        ("saturated", (9, 64), False, 60.0, frozenset({"adversarial", "must"})),
        *((f"k3_heads_{h}", (65, h * 128), True, 1.0, frozenset({"k3", "device"})) for h in (6, 12, 96)),
    ]
    for name, shape, strided, scale, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(
                gen: Generator, s: Any = shape, strided: bool = strided, scale: float = scale, dtype: str = dtype
            ) -> dict[str, Any]:
                x, gate = randn(gen, *s, dtype=dtype), randn(gen, *s, dtype=dtype, scale=scale)
                return {"x": x, "gate": spread(gate) if strided else gate}

            yield Sample(name, make, {"dim": shape[-1]}, dtype, tags=tags)


OPERATOR = Operator(
    reference=sigmoid_gate,
    family="norm",
    outputs={"out": "norm"},
    samples=_samples,
    cost=_cost,
    invariants=("batch",),
)
