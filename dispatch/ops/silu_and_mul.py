"""SwiGLU activation: SiLU of the gate half times the up half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops.situ_and_mul import gate_up


def silu_and_mul(x: Tensor) -> Tensor:
    """`g sigmoid(g) u` of x = [g | u], `[T, I]`.

    x [T, 2 I] (x dtype, gate half first, rows may be strided). fp32 inside, one cast. Nothing mutated.
    Source: k3_architecture.md §1.6 (hidden_act silu of the 48B form).
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def _sample(name: str, tokens: int, inner: int, dtype: str, tags: set[str], spread: float = 2.0) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        return {"x": gate_up(g, tokens, inner, getattr(torch, dtype), spread, name == "strided")}

    return Sample(name, make, {"dim": inner}, dtype, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, no rows, odd widths, large inputs and the 48B dense layer."""
    yield _sample("tiny", 3, 8, "float32", {"tiny"})
    yield _sample("tiny", 3, 8, "bfloat16", {"tiny"})
    yield _sample("no_rows", 0, 8, "float32", {"edge", "adversarial"})
    yield _sample("odd", 17, 33, "bfloat16", {"edge"})
    yield _sample("strided", 5, 16, "float32", {"must", "edge"})
    yield _sample("large", 4, 64, "float32", {"edge", "adversarial"}, spread=1e3)
    yield _sample("kimi_linear_expert", 65, 1024, "bfloat16", {"k3"})
    yield _sample("kimi_linear_dense_few", 3, 9216, "bfloat16", {"k3"})
    yield _sample("kimi_linear_dense", 2048, 9216, "bfloat16", {"k3", "device"})


def cost(x: Tensor) -> Cost:
    """About 12 operations an output element; three elements moved for each."""
    return Cost(6.0 * x.numel(), 1.5 * x.nbytes)


OPERATOR = Operator(
    reference=silu_and_mul,
    family="moe",
    outputs={"out": "norm"},
    samples=samples,
    cost=cost,
    invariants=("batch_composition",),
)
