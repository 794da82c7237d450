"""A matrix product of each head with weights of its own: MLA's way into latent space and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x[:, h] weight[h]^T` for every head h, [N, H, B].

    x [N, H, A] in the activation dtype, dense along A, rows and heads of any stride; weight [H, B, A] in the activation
    dtype, of any strides. fp32 accumulation, one cast. Rows are independent of one another. Source: k3_architecture §3,
    absorbed decode.
    """
    return torch.einsum("nha,hba->nhb", x.float(), weight.float()).to(x.dtype)


def _cost(x: Tensor, weight: Tensor) -> Cost:
    rows, heads, outputs = x.shape[0], weight.shape[0], weight.shape[1]
    moved = x.nbytes + weight.nbytes + rows * heads * outputs * x.element_size()
    return Cost(flops=2.0 * rows * weight.numel(), bytes=float(moved))


def _samples() -> Iterator[Sample]:
    cases = [
        ("one_row", (1, 2, 16, 48), False, frozenset({"tiny"})),
        ("rows", (5, 3, 48, 33), False, frozenset({"tiny"})),
        ("no_rows", (0, 2, 16, 48), False, frozenset({"edge"})),
        ("one_head", (13, 1, 65, 31), False, frozenset({"edge"})),
        ("strided", (9, 4, 32, 64), True, frozenset({"adversarial"})),
        ("k3_depth", (5, 2, 512, 33), False, frozenset({"k3"})),
        ("k3_tp8_in", (64, 12, 128, 512), False, frozenset({"k3", "device"})),
        ("k3_tp8_out", (64, 12, 512, 128), False, frozenset({"k3", "device"})),
    ]
    for name, (rows, heads, depth, outputs), strided, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(
                gen: Generator, s: Any = (rows, heads, depth, outputs), strided: bool = strided, dtype: str = dtype
            ) -> dict[str, Any]:
                n, h, a, b = s
                if strided:  # As decode has them: channels of a wider query, and a transposed slice of one weight.
                    x = randn(gen, n, h, a + 8, dtype=dtype)[..., :a]
                    return {"x": x, "weight": randn(gen, h, a, b + 8, dtype=dtype, scale=a**-0.5)[..., :b].mT}
                return {
                    "x": randn(gen, n, h, a, dtype=dtype),
                    "weight": randn(gen, h, b, a, dtype=dtype, scale=a**-0.5),
                }

            yield Sample(name, make, {"heads": heads}, dtype, tags=tags)


OPERATOR = Operator(
    reference=head_linear,
    family="linear",
    outputs={"out": "matmul"},
    samples=_samples,
    cost=_cost,
    weights=("weight",),
    invariants=("batch",),
)
