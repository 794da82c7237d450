"""A matrix product with an fp32 result: router scores and logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn, spread


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` as fp32, [T, R].

    x [T, D] (rows may be strided) and weight [R, D] in the activation dtype. fp32 accumulation and a result that is
    never rounded to bf16 on the way: at bf16's spacing near-tied experts swap, and the best tokens of a large
    vocabulary tie. Source: k3_architecture §4.4, §5.1.
    """
    return x.float() @ weight.float().T


def _cost(x: Tensor, weight: Tensor) -> Cost:
    rows, vocab = x.shape[0], weight.shape[0]
    return Cost(flops=2.0 * rows * weight.numel(), bytes=float(x.nbytes + weight.nbytes + 4 * rows * vocab))


def _samples() -> Iterator[Sample]:
    cases = [
        ("one_row", (1, 48, 70), False, frozenset({"tiny"})),
        ("rows", (5, 64, 625), False, frozenset({"tiny"})),
        ("no_rows", (0, 48, 70), False, frozenset({"edge"})),
        ("odd", (17, 127, 129), False, frozenset({"edge"})),
        ("row_strided", (9, 64, 100), True, frozenset({"adversarial"})),
        ("k3_depth", (16, 7168, 96), False, frozenset({"k3"})),
        ("k3_tp8", (2, 7168, 20480), False, frozenset({"k3", "device"})),
    ]
    for name, (rows, dim, vocab), strided, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(
                gen: Generator, s: Any = (rows, dim, vocab), strided: bool = strided, dtype: str = dtype
            ) -> dict[str, Any]:
                x = randn(gen, s[0], s[1], dtype=dtype)
                weight = randn(gen, s[2], s[1], dtype=dtype, scale=s[1] ** -0.5)
                return {"x": spread(x) if strided else x, "weight": weight}

            yield Sample(name, make, {"dim": dim}, dtype, tags=tags)


OPERATOR = Operator(
    reference=linear_fp32,
    family="linear",
    outputs={"out": "fp32"},
    samples=_samples,
    cost=_cost,
    weights=("weight",),
    invariants=("batch",),
)
