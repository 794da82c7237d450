"""Per-head RMSNorm with a sigmoid gate: the output stage of KDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn, spread


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm(x; weight, eps) * sigmoid(gate)` over the last axis (k3_architecture §2.5; the gate is not SiLU).

    x and gate [T, H, V] in the activation dtype, rows of either may be strided; weight fp32 [V], shared by the heads.
    fp32 inside, one cast. Rows are independent. Returns a new tensor [T, H, V] in x's dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return (normed * torch.sigmoid(gate.float())).to(x.dtype)


def _cost(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(flops=8.0 * x.numel(), bytes=float(2 * x.nbytes + gate.nbytes + weight.nbytes))


def _samples() -> Iterator[Sample]:
    edge, hard, big = frozenset({"edge"}), frozenset({"adversarial"}), frozenset({"k3", "device"})
    must = frozenset({"must"})
    cases = [
        ("plain", (5, 2, 32), False, 1.0, frozenset({"tiny"})),
        ("faint", (5, 2, 32), False, 1.0, hard | must),
        ("no_rows", (0, 2, 32), False, 1.0, edge),
        ("odd", (17, 3, 33), False, 1.0, edge),
        ("row_strided", (9, 2, 32), True, 1.0, hard | must),
        ("gate_saturated", (9, 2, 32), False, 60.0, hard),
        *((f"k3_heads_{h}", (65, h, 128), True, 1.0, big) for h in (6, 12, 96)),
    ]
    for name, shape, strided, gate_scale, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(
                gen: Generator,
                s: Any = shape,
                strided: bool = strided,
                scale: float = gate_scale,
                dtype: str = dtype,
                faint: bool = name == "faint",
            ) -> dict[str, Any]:
                x, gate = randn(gen, *s, dtype=dtype), randn(gen, *s, dtype=dtype, scale=scale)
                gate = spread(gate) if strided else gate
                weight = 1 + randn(gen, s[-1], scale=0.2)
                if faint:  # Where the epsilon, another than the usual one, decides.
                    return {"x": x * 1e-3, "gate": gate, "weight": weight, "eps": 1e-6}
                return {"x": x, "gate": gate, "weight": weight, "eps": 1e-5}

            yield Sample(name, make, {"dim": shape[-1]}, dtype, tags=tags)


OPERATOR = Operator(
    reference=gated_rms_norm,
    family="norm",
    outputs={"out": "norm"},
    samples=_samples,
    cost=_cost,
    weights=("weight",),
    invariants=("batch",),
)
