"""A matrix product with weights that stay: every projection of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn, spread


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T`, `[T, R]` in x's dtype.

    x [T, D] in the activation dtype, rows may be strided; weight [R, D] in the activation dtype. fp32 accumulation, one
    cast. Rows are independent of one another.
    """
    return (x.float() @ weight.float().T).to(x.dtype)


def _cost(x: Tensor, weight: Tensor) -> Cost:
    rows = x.shape[0]
    moved = x.nbytes + weight.nbytes + rows * weight.shape[0] * x.element_size()
    return Cost(flops=2.0 * rows * weight.numel(), bytes=float(moved))


def _samples() -> Iterator[Sample]:
    cases = [
        ("one_row", (1, 48, 70), False, frozenset({"tiny"})),
        ("rows", (5, 64, 96), False, frozenset({"tiny"})),
        ("square", (6, 64, 64), False, frozenset({"edge", "must"})),
        ("no_rows", (0, 48, 70), False, frozenset({"edge", "must"})),
        ("one_output", (3, 64, 1), False, frozenset({"edge"})),
        *((f"rows_{n}", (n, 33, 65), False, frozenset({"edge"})) for n in (7, 8, 9, 11, 12, 13, 16, 17, 25)),
        ("odd", (17, 127, 129), False, frozenset({"edge"})),
        ("row_strided", (9, 64, 100), True, frozenset({"adversarial"})),
        ("k3_depth", (16, 7168, 96), False, frozenset({"k3"})),
        ("k3_tp8", (4, 7168, 6288), False, frozenset({"k3", "device"})),
    ]
    for name, (rows, dim, outputs), strided, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(
                gen: Generator, s: Any = (rows, dim, outputs), strided: bool = strided, dtype: str = dtype
            ) -> dict[str, Any]:
                x, weight = randn(gen, s[0], s[1], dtype=dtype), randn(gen, s[2], s[1], dtype=dtype, scale=s[1] ** -0.5)
                return {"x": spread(x) if strided else x, "weight": weight}

            yield Sample(name, make, {"dim": dim}, dtype, tags=tags)


OPERATOR = Operator(
    reference=linear,
    family="linear",
    outputs={"out": "matmul"},
    samples=_samples,
    cost=_cost,
    weights=("weight",),
    invariants=("batch",),
)
