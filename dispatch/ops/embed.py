"""Token embedding lookup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, randn


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of the table by id.

    ids int64 [T], each below V; a negative id (a padding row, or an id another rank holds) gives a zero row. weight
    [V, D] in the activation dtype. Returns [T, D] in weight's dtype, bit-equal copies.
    """
    rows = weight[ids.clamp_min(0)]
    return torch.where((ids < 0).unsqueeze(-1), torch.zeros((), dtype=rows.dtype, device=rows.device), rows)


def _cost(ids: Tensor, weight: Tensor) -> Cost:
    row = weight.shape[1] * weight.element_size()
    return Cost(flops=0.0, bytes=ids.nbytes + 2.0 * ids.numel() * row)


def _samples() -> Iterator[Sample]:
    cases = [
        ("repeats", (3, 0, 3, 9), 10, 24, frozenset({"tiny"})),
        ("no_rows", (), 10, 24, frozenset({"edge"})),
        ("negative_ids", (-1, 9, -1, 0, -7), 10, 24, frozenset({"adversarial"})),
        ("all_negative", (-1, -1), 10, 24, frozenset({"adversarial"})),
        ("k3_tp8", (0, 20479, 20467, -1), 20480, 7168, frozenset({"k3", "device"})),
    ]
    for name, ids, vocab, dim, tags in cases:
        for dtype in ACTIVATION_DTYPES:

            def make(gen: Generator, i: Any = ids, v: int = vocab, d: int = dim, dtype: str = dtype) -> dict[str, Any]:
                return {"ids": torch.tensor(i, dtype=torch.int64), "weight": randn(gen, v, d, dtype=dtype)}

            yield Sample(name, make, {"dim": dim}, dtype, tags=tags)


OPERATOR = Operator(
    reference=embed,
    family="norm",
    outputs={"out": "exact"},
    samples=_samples,
    cost=_cost,
    weights=("weight",),
    invariants=("batch",),
)
