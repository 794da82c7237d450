"""A projection: rows times a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn, spread


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` [T, N].

    x [T, K] (rows may be strided) and weight [N, K], contiguous, in x dtype. fp32 accumulation, one cast to x dtype.
    Nothing mutated; rows are independent, and no rows give no rows.
    """
    return (x.float() @ weight.float().T).to(x.dtype)


def _cost(x: Tensor, weight: Tensor) -> Cost:
    rows, out = x.shape[0], weight.shape[0]
    return Cost(flops=2.0 * rows * weight.numel(), bytes=float(x.nbytes + weight.nbytes + rows * out * x.itemsize))


def _samples() -> Iterator[Sample]:
    cases = [
        ("one_row", (1, 64, 48), False, frozenset({"tiny"})),
        ("one_row_odd", (1, 127, 129), False, frozenset({"edge"})),
        ("one_row_strided", (1, 64, 48), True, frozenset({"adversarial"})),
        ("few_rows", (3, 64, 48), False, frozenset({"tiny"})),
        ("few_rows_strided", (4, 96, 160), True, frozenset({"adversarial"})),
        ("rows", (17, 127, 129), False, frozenset({"edge"})),
        ("row_strided", (9, 64, 100), True, frozenset({"adversarial"})),
        ("one_output", (2, 64, 1), False, frozenset({"edge"})),
        ("no_rows", (0, 64, 48), False, frozenset({"edge"})),
        ("k3_tp8", (2, 7168, 4608), False, frozenset({"k3", "device"})),
    ]
    for name, (rows, width, out), strided, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(
                gen: Generator, s: Any = (rows, width, out), strided: bool = strided, dtype: str = dtype
            ) -> dict[str, Any]:
                x = randn(gen, s[0], s[1], dtype=dtype)
                weight = randn(gen, s[2], s[1], dtype=dtype, scale=s[1] ** -0.5)
                return {"x": spread(x) if strided else x, "weight": weight}

            yield Sample(name, make, {}, dtype, tags=tags)


OPERATOR = Operator(
    reference=linear,
    family="projection",
    outputs={"out": "matmul"},
    samples=_samples,
    cost=_cost,
    weights=("weight",),
    invariants=("batch",),
)
