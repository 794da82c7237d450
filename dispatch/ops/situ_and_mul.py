"""SiTU gated activation: a soft-capped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The formula on tensors already in the compute dtype; the sigmoid sees the uncapped gate."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`[beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)]` of x = [g | u], `[T, I]`.

    x [T, 2 I] (x dtype, gate half first, rows may be strided); both betas are positive. fp32 inside, one cast. Nothing
    mutated. Source: k3_architecture.md §5.3 (K3: beta 4, linear_beta 25).
    """
    gate, up = x.float().chunk(2, dim=-1)
    return situ(gate, up, beta, linear_beta).to(x.dtype)


def gate_up(g: torch.Generator, tokens: int, inner: int, dtype: torch.dtype, spread: float, strided: bool) -> Tensor:
    """A [tokens, 2 inner] input, optionally as columns of something wider."""
    wide = (torch.randn(tokens, 2 * inner + 8 * strided, generator=g) * spread).to(dtype)
    return wide[:, : 2 * inner]


def _sample(
    name: str,
    tokens: int,
    inner: int,
    dtype: str,
    tags: set[str],
    spread: float = 2.0,
    betas: tuple[float, float] = (4.0, 25.0),
) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        x = gate_up(g, tokens, inner, getattr(torch, dtype), spread, name == "strided")
        return {"x": x, "beta": betas[0], "linear_beta": betas[1]}

    return Sample(name, make, {"dim": inner}, dtype, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, no rows, odd widths, saturated inputs and the K3 dense layer."""
    yield _sample("tiny", 3, 8, "float32", {"tiny"})
    yield _sample("tiny", 3, 8, "bfloat16", {"tiny"})
    yield _sample("no_rows", 0, 8, "bfloat16", {"edge", "adversarial"})
    yield _sample("odd", 17, 33, "bfloat16", {"edge"})
    yield _sample("strided", 5, 16, "float32", {"must", "edge"})
    yield _sample("saturated", 4, 64, "float32", {"edge", "adversarial"}, spread=1e3)
    yield _sample("other_betas", 3, 16, "float32", {"must", "edge", "adversarial"}, spread=8.0, betas=(3.0, 9.0))
    yield _sample("k3_expert_tp8", 65, 384, "bfloat16", {"k3"})
    yield _sample("k3_dense_few", 3, 33_792, "bfloat16", {"k3"})
    yield _sample("k3_dense", 2048, 33_792, "bfloat16", {"k3", "device"})


def cost(x: Tensor, beta: float, linear_beta: float) -> Cost:
    """About 30 operations an output element; three elements moved for each."""
    return Cost(15.0 * x.numel(), 1.5 * x.nbytes)


OPERATOR = Operator(
    reference=situ_and_mul,
    family="moe",
    outputs={"out": "norm"},
    samples=samples,
    cost=cost,
    invariants=("batch_composition",),
)
