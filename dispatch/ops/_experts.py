"""What the routed-expert operators share: the sum over chosen experts, and routings worth testing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.call import DimValue
from k3hal.dispatch.operator import Cost, Sample
from k3hal.dispatch.ops.situ_and_mul import situ

ExpertWeights = Callable[[int], tuple[Tensor, Tensor]]


def gated(x: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """The gated activation of x = [gate | up] in x's own dtype."""
    gate, up = x.chunk(2, dim=-1)
    return situ(gate, up, beta, linear_beta) if activation == "situ" else gate * torch.sigmoid(gate) * up


def as_it_is(x: Tensor) -> Tensor:
    """x: what products without rounding make of a factor."""
    return x


def sum_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert: ExpertWeights,
    activation: str,
    beta: float,
    linear_beta: float,
    rounded: Callable[[Tensor], Tensor] = as_it_is,
) -> Tensor:
    """The definition of all formats, given `expert(e)` as fp32 (w13 [2 I, D], w2 [D, I]); `rounded` is what both
    products make of their left factor."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in ids.unique().tolist():
        if e < 0:
            continue
        w13, w2 = expert(e)
        token, choice = (ids == e).nonzero(as_tuple=True)
        hidden = rounded(gated(rounded(x[token].float()) @ w13.T, activation, beta, linear_beta))
        out.index_add_(0, token, hidden @ w2.T * weights[token, choice, None])
    return out.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Routing:
    """One sample of a routed-expert operator, whatever the weights' format. `kind` says how ids are drawn; a `loud` one
    reaches the activation's caps, which are others than usual."""

    name: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: str
    tags: tuple[str, ...]
    activation: str = "situ"
    kind: str = "spread"
    loud: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def dims(self) -> Mapping[str, DimValue]:
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "intermediate": self.inner,
            "activation": self.activation,
        }


ROUTINGS = (
    Routing("one_token", 1, 4, 2, 32, 32, "float32", ("tiny",)),
    Routing(
        "tiny",
        5,
        8,
        3,
        64,
        32,
        "bfloat16",
        (
            "must",
            "tiny",
        ),
    ),
    Routing("silu", 5, 8, 3, 64, 32, "float32", ("tiny",), "silu"),
    Routing("loud", 5, 8, 3, 64, 32, "float32", ("must", "edge", "adversarial"), loud=True),
    Routing("many_choices", 4, 32, 16, 64, 32, "bfloat16", ("edge",)),
    Routing("no_rows", 0, 4, 2, 32, 32, "float32", ("edge", "adversarial")),
    Routing("all_to_one", 33, 8, 1, 64, 32, "float32", ("must", "edge", "adversarial"), kind="one"),
    Routing("same_k", 17, 8, 3, 64, 32, "bfloat16", ("edge", "adversarial"), kind="one"),
    Routing("negative", 9, 8, 3, 64, 32, "float32", ("edge", "adversarial"), kind="negative"),
    Routing("negative_one", 1, 8, 3, 64, 32, "bfloat16", ("edge", "adversarial"), kind="negative"),
    Routing("padding", 6, 8, 3, 64, 32, "float32", ("must", "edge", "adversarial"), kind="padding"),
    Routing("padding_one", 1, 8, 3, 64, 32, "float32", ("edge", "adversarial"), kind="all_padding"),
    Routing("every_expert", 3, 4, 4, 32, 96, "float32", ("edge",), "silu"),
    Routing("tile_edge", 65, 8, 2, 96, 160, "bfloat16", ("edge",)),
    Routing("small_batch", 16, 32, 8, 128, 64, "float32", ("edge",), "silu"),
    Routing("large_batch", 300, 32, 8, 64, 64, "float32", ("edge",)),
    Routing("k3_tp8_20_experts", 2, 20, 16, 3584, 384, "bfloat16", ("k3",)),
    Routing("k3_tp16_32_experts", 2, 32, 16, 3584, 192, "bfloat16", ("k3",)),
    Routing("k3_tp8", 64, 896, 16, 3584, 384, "bfloat16", ("k3", "device")),
    Routing("k3_tp8_prefill", 4096, 896, 16, 3584, 384, "bfloat16", ("k3", "device")),
    Routing("k3_ep8", 129, 112, 16, 3584, 3072, "bfloat16", ("k3", "device"), kind="negative"),
)

BENCH_ROUTINGS = (
    *(Routing(f"bench_tp8_{t}", t, 896, 16, 3584, 384, "bfloat16", ("device", "bench")) for t in (1, 8, 64, 512, 4096)),
    *(Routing(f"bench_ep8_{t}", t, 112, 16, 3584, 3072, "bfloat16", ("device", "bench")) for t in (8, 64, 4096)),
)
"""Kimi K3 on a rank of eight: a slice of each expert, and an eighth of the experts, whose tokens choose among them."""


def routed_inputs(g: torch.Generator, r: Routing) -> dict[str, Any]:
    """x, ids and weights of a sample. A row whose every id is negative is padding: its x and weights are NaN."""
    x = torch.randn(r.tokens, r.hidden, generator=g) * (8.0 if r.loud else 1.0)
    ids = torch.rand(r.tokens, r.experts, generator=g).argsort(dim=-1)[:, : r.top_k]
    weights = torch.rand(r.tokens, r.top_k, generator=g) + 0.1
    if r.kind == "one":
        ids = ids[:1].expand(r.tokens, -1).clone()
    elif r.kind == "negative":
        ids[torch.rand(ids.shape, generator=g) < 0.5] = -1
    elif r.kind in ("padding", "all_padding"):
        ids[-2:] = -1
    unused = (ids < 0).all(dim=-1)
    x[unused], weights[unused] = torch.nan, torch.nan
    return {"x": x.to(r.torch_dtype), "ids": ids.int(), "weights": weights}


def activation_arguments(r: Routing) -> dict[str, Any]:
    """The trailing arguments every format takes."""
    return {"activation": r.activation, "beta": 3.0 if r.loud else 4.0, "linear_beta": 9.0 if r.loud else 25.0}


def routing_samples(
    weights: Callable[[torch.Generator, Routing], dict[str, Any]], routings: Iterable[Routing] = ROUTINGS
) -> Iterator[Sample]:
    """Every routing, with the weights one format makes for it."""

    def maker(r: Routing) -> Callable[[torch.Generator], dict[str, Any]]:
        return lambda g: routed_inputs(g, r) | weights(g, r) | activation_arguments(r)

    for r in routings:
        yield Sample(r.name, maker(r), r.dims(), r.dtype, tags=frozenset(r.tags))


def routed_cost(x: Tensor, ids: Tensor, inner: int, expert_bytes: float) -> Cost:
    """Each expert that is chosen at all read once; two GEMMs of its rows."""
    flops = 2.0 * float((ids >= 0).sum()) * 3 * inner * x.shape[1]
    used = ids[ids >= 0].unique().numel()
    return Cost(flops, used * expert_bytes + 2.0 * x.nbytes + 8.0 * ids.numel())
