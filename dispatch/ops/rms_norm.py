"""Root-mean-square normalisation, with the residual addition in front of it where one is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn, spread


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`x * rsqrt(mean x^2 + eps) * weight` over the last axis.

    x [..., D], rows may be strided; weight [D]; both in the activation dtype (weight may be fp32). Computed in fp32 and
    multiplied by the weight before the one cast to x's dtype (k3_architecture §3: of the two orders, this one).
    residual [..., D] or None: mutated first, `residual += x` rounded to its dtype, and the sum is what is normalised.
    Rows are independent; a padding row gives whatever its values give. Returns a new tensor of x's shape and dtype.
    """
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def _cost(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Cost:
    moved = 2 * x.nbytes + weight.nbytes + (0 if residual is None else 2 * residual.nbytes)
    return Cost(flops=4.0 * x.numel(), bytes=moved)


def _make(
    gen: Generator,
    shape: tuple[int, ...],
    dtype: str,
    add: bool = False,
    strided: bool = False,
    scale: float = 1.0,
    weight_dtype: str | None = None,
    eps: float = 1e-5,
) -> dict[str, Any]:
    x = randn(gen, *shape, dtype=dtype, scale=scale)
    if strided:
        x = spread(x)
    residual = randn(gen, *shape, dtype=dtype, scale=scale) if add else None
    weight = 1 + randn(gen, shape[-1], dtype=weight_dtype or dtype, scale=0.2)
    return {"x": x, "weight": weight, "eps": eps, "residual": residual}


def _samples() -> Iterator[Sample]:
    edge, hard, big = frozenset({"edge"}), frozenset({"adversarial"}), frozenset({"k3", "device"})
    must = frozenset({"must"})
    cases: list[tuple[str, tuple[int, ...], dict[str, Any], frozenset[str]]] = [
        ("plain", (5, 48), {}, frozenset({"tiny"})),
        ("residual", (5, 48), {"add": True}, frozenset({"tiny", "must"})),
        ("no_rows", (0, 48), {"add": True}, edge | must),
        ("odd_width", (17, 127), {}, edge),
        ("fp32_weight", (5, 64), {"weight_dtype": "float32"}, edge),
        ("rank_3", (3, 5, 33), {}, edge),
        ("row_strided", (9, 64), {"strided": True, "add": True}, hard | must),
        ("below_eps", (4, 64), {"scale": 1e-4}, hard),
        ("faint", (4, 64), {"scale": 1e-3, "eps": 1e-6}, hard | must),
        ("large", (4, 64), {"scale": 1e4}, hard | must),
        *((f"k3_{d}", (t, d), {"add": d == 7168}, big) for d in (512, 1536, 3584, 7168) for t in (1, 65)),
    ]
    for name, shape, options, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(gen: Generator, s: Any = shape, o: Any = options, dtype: str = dtype) -> dict[str, Any]:
                return _make(gen, s, dtype, **o)

            yield Sample(f"{name}_{shape[0]}" if "k3" in name else name, make, {"dim": shape[-1]}, dtype, tags=tags)


OPERATOR = Operator(
    reference=rms_norm,
    family="norm",
    outputs={"out": "norm", "residual": "exact"},
    samples=_samples,
    cost=_cost,
    mutates=("residual",),
    weights=("weight",),
    invariants=("batch",),
)
