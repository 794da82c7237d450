"""Stable LatentMoE: routed experts in a latent space beside a shared MLP, of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3hal.dispatch.beside import BESIDE, FEW_TOKENS
from k3hal.dispatch.call import DimValue
from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._experts import ROUTINGS, Routing, activation_arguments, gated, routed_cost, routed_inputs
from k3hal.dispatch.ops.moe_experts import dense_weights, moe_experts
from k3hal.dispatch.ops.moe_experts_int4 import int4_weights, moe_experts_int4
from k3hal.dispatch.ops.moe_experts_mxfp4 import moe_experts_mxfp4, mxfp4_weights

SHARED_EXPERTS = 2
FAINT = Routing("faint", 5, 8, 3, 64, 32, "float32", ("must", "edge", "adversarial"))
"""Experts whose sum is so small that the latent norm's epsilon decides."""


def latent_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    down_weight: Tensor,
    norm_weight: Tensor | None,
    up_weight: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    expert_format: str,
    activation: str,
    beta: float,
    linear_beta: float,
    eps: float,
) -> Tensor:
    """`up RMSNorm(experts(down x)) + shared(x)`, `[T, D]`.

    x [T, D], ids int32 [T, k] distinct within a row, weights fp32 [T, k], down_weight [L, D], norm_weight [L] or None
    for no norm, up_weight [D, L], shared_gate_up [2 J, D] rows [gate; up], shared_down [D, J] (all x dtype); w13, w2
    and their scales (None for "bf16", which is x dtype) as `moe_experts`, `moe_experts_mxfp4` or `moe_experts_int4`
    take them by expert_format "bf16", "mxfp4" or "int4", with D there = L. fp32 accumulation; down x, the experts' sum,
    the norm, up, the shared activation and the shared output are each rounded to x dtype, as is their sum.
    Nothing mutated. A negative id contributes nothing; rows are independent. Source: k3_architecture.md §5.2.
    """

    def matmul(a: Tensor, weight: Tensor) -> Tensor:
        return linear(a.float(), weight.float()).to(x.dtype)

    z, tail = matmul(x, down_weight), (activation, beta, linear_beta)
    if expert_format == "bf16":
        y = moe_experts(z, ids, weights, w13, w2, *tail)
    else:
        assert w13_scale is not None
        assert w2_scale is not None
        packed = {"mxfp4": moe_experts_mxfp4, "int4": moe_experts_int4}[expert_format]
        y = packed(z, ids, weights, w13, w13_scale, w2, w2_scale, *tail)
    if norm_weight is not None:
        norm = torch.rsqrt(y.float().square().mean(dim=-1, keepdim=True) + eps)
        y = (y.float() * norm * norm_weight.float()).to(x.dtype)
    hidden = gated(matmul(x, shared_gate_up).float(), *tail).to(x.dtype)
    return matmul(y, up_weight) + matmul(hidden, shared_down)


def compose(parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """latent_moe from finer operators; `parts` holds those that `_needed` names.

    The shared experts need nothing of the routed ones: of few tokens they run beside them.
    """
    project, beside = parts["linear"], parts.get(BESIDE)

    def latent_moe(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        down_weight: Tensor,
        norm_weight: Tensor | None,
        up_weight: Tensor,
        shared_gate_up: Tensor,
        shared_down: Tensor,
        w13: Tensor,
        w13_scale: Tensor | None,
        w2: Tensor,
        w2_scale: Tensor | None,
        expert_format: str,
        activation: str,
        beta: float,
        linear_beta: float,
        eps: float,
    ) -> Tensor:
        tail = (activation, beta, linear_beta)

        def shared() -> Tensor:
            hidden = project(x, shared_gate_up)
            if activation == "situ":
                hidden = parts["situ_and_mul"](hidden, beta, linear_beta)
            else:
                hidden = parts["silu_and_mul"](hidden)
            return project(hidden, shared_down)

        join = beside(shared) if beside and x.shape[0] <= FEW_TOKENS else shared
        z, experts = project(x, down_weight), parts[EXPERTS[expert_format]]
        if expert_format == "bf16":
            y = experts(z, ids, weights, w13, w2, *tail)
        else:
            y = experts(z, ids, weights, w13, w13_scale, w2, w2_scale, *tail)
        if norm_weight is not None:
            y = parts["rms_norm"](y, norm_weight, eps)
        return project(y, up_weight) + join()

    return latent_moe


EXPERTS = {"bf16": "moe_experts", "mxfp4": "moe_experts_mxfp4", "int4": "moe_experts_int4"}


def _needed(dims: Mapping[str, DimValue]) -> dict[str, dict[str, DimValue]]:
    """The finer operators of one expert format and activation, the experts at latent width."""
    latent, activation = dims["latent"], dims["activation"]
    shared = {name: value for name, value in dims.items() if name not in ("latent", "expert_format")}
    return {
        EXPERTS[str(dims["expert_format"])]: {**shared, "hidden": latent},
        "situ_and_mul" if activation == "situ" else "silu_and_mul": {},
        "rms_norm": {"dim": latent},
        "linear": {},
    }


EXPERT_WEIGHTS = {"bf16": dense_weights, "mxfp4": mxfp4_weights, "int4": int4_weights}


def _inputs(g: torch.Generator, r: Routing, expert_format: str, width: int, norm: bool) -> dict[str, Any]:
    latent, shared = r.hidden, SHARED_EXPERTS * r.inner

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(r.torch_dtype)

    routed = routed_inputs(g, replace(r, hidden=width))
    routed["x"] = routed["x"].nan_to_num(1.0)
    if r.name == "faint":
        routed["weights"] = routed["weights"] * 2e-3
    return {
        **routed,
        "down_weight": weight(latent, width),
        "norm_weight": (torch.rand(latent, generator=g) + 0.5).to(r.torch_dtype) if norm else None,
        "up_weight": weight(width, latent),
        "shared_gate_up": weight(2 * shared, width),
        "shared_down": weight(width, shared),
        "w13_scale": None,
        "w2_scale": None,
        **EXPERT_WEIGHTS[expert_format](g, r),
        "expert_format": expert_format,
        **activation_arguments(r),
        "eps": 1e-6 if r.name == "faint" else 1e-5,
    }


def _sample(r: Routing, expert_format: str, width: int, norm: bool = True) -> Sample:
    dims: dict[str, DimValue] = {**r.dims(), "hidden": width, "latent": r.hidden, "expert_format": expert_format}
    name = f"{r.name}_{expert_format}" + ("" if norm else "_no_norm")
    return Sample(name, lambda g: _inputs(g, r, expert_format, width, norm), dims, r.dtype, tags=frozenset(r.tags))


def samples() -> Iterator[Sample]:
    """Each expert format on tiny, loud and faint routings, all to one, padding; without the norm; K3 of one rank."""
    by_name = {r.name: r for r in (*ROUTINGS, FAINT)}
    for expert_format in EXPERT_WEIGHTS:
        yield _sample(by_name["one_token"], expert_format, 64)
        yield _sample(by_name["tiny"], expert_format, 128)
        yield _sample(by_name["silu"], expert_format, 96)
        yield _sample(by_name["loud"], expert_format, 96)
        yield _sample(by_name["all_to_one"], expert_format, 128)
        yield _sample(by_name["padding"], expert_format, 128)
        yield _sample(by_name["faint"], expert_format, 96)
    yield _sample(by_name["tiny"], "mxfp4", 128, norm=False)
    yield _sample(by_name["no_rows"], "mxfp4", 64)
    yield _sample(by_name["small_batch"], "mxfp4", 256)
    yield _sample(by_name["k3_tp8"], "mxfp4", 7168)


def cost(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    down_weight: Tensor,
    norm_weight: Tensor | None,
    up_weight: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    expert_format: str,
    activation: str,
    beta: float,
    linear_beta: float,
    eps: float,
) -> Cost:
    """The experts' cost at latent width plus four plain GEMMs."""
    stored = sum(t.nbytes for t in (w13, w13_scale, w2, w2_scale) if t is not None)
    inner, plain = w13.shape[1] // 2, (down_weight, up_weight, shared_gate_up, shared_down)
    latent = x.new_empty(x.shape[0], down_weight.shape[0])
    routed = routed_cost(latent, ids, inner, stored / w13.shape[0])
    flops = 2.0 * x.shape[0] * sum(w.numel() for w in plain)
    return Cost(routed.flops + flops, routed.bytes + sum(w.nbytes for w in plain) + 2.0 * x.nbytes)


OPERATOR = Operator(
    reference=latent_moe,
    family="moe",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    weights=(
        "down_weight",
        "norm_weight",
        "up_weight",
        "shared_gate_up",
        "shared_down",
        "w13",
        "w13_scale",
        "w2",
        "w2_scale",
    ),
    invariants=("batch_composition", "lowering_equals_reference"),
    lowers_to=(*EXPERTS.values(), "situ_and_mul", "silu_and_mul", "rms_norm", "linear"),
    lowering=compose,
    parts=_needed,
)
