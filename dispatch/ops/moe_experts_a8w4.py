"""Routed experts with MXFP4 weights and activations rounded to MXFP8 (A8W4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Outputs, Sample
from k3hal.dispatch.ops._experts import (
    BENCH_ROUTINGS,
    ROUTINGS,
    gated,
    routed_cost,
    routing_samples,
    sum_of_experts,
)
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded
from k3hal.dispatch.ops.moe_experts_mxfp4 import mxfp4_weights
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize


def moe_experts_a8w4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """`moe_experts_mxfp4` with x and the activation between the products rounded to MXFP8, `[T, D]`.

    Both are rounded as `mxfp8_rounded` says, in groups of 32 columns, the activation from fp32. What is multiplied
    then is exact in bfloat16; fp32 accumulation, router weight after w2, fp32 combine, one cast. Shapes, negative ids
    and padding rows as in `moe_experts_mxfp4`. Nothing mutated. A runtime's choice: no checkpoint asks for it.
    Source: k3_architecture.md §6; OCP Microscaling formats 1.0 §6.3.
    """

    def expert(e: int) -> tuple[Tensor, Tensor]:
        return (
            mx_dequantize(w13[e], w13_scale[e], torch.float32),
            mx_dequantize(w2[e], w2_scale[e], torch.float32),
        )

    return sum_of_experts(x, ids, weights, expert, activation, beta, linear_beta, mxfp8_rounded)


_NEAR = 2.0**-16
"""Of a value: how far from the middle between two numbers of E4M3 fp32's error may have taken it."""
_UNEXPLAINED = {torch.float32: 1e-5, torch.bfloat16: 0.005}
"""Of a row, in RMS: what is left of its error when steps of its activation have been taken off."""


def settle_ties(args: Mapping[str, Any], outputs: Outputs, golden: Outputs) -> Outputs:
    """The golden's row wherever an activation near the middle between two numbers of E4M3 explains a row's error.

    Any arithmetic of fp32 takes one side or the other there, an eighth of the value apart, and each is right.
    """
    out, wanted = outputs["out"].double(), golden["out"].double()
    error, limit = (out - wanted).square().mean(-1).sqrt(), _UNEXPLAINED[outputs["out"].dtype]
    odd = (error > limit * wanted.square().mean(-1).sqrt()).nonzero().flatten().tolist()
    settled = outputs["out"].clone()
    for row in odd:
        moves = _moves(args, row)
        if moves.shape[0]:
            taken = torch.linalg.lstsq(moves.T, (out - wanted)[row, :, None]).solution.round().clamp(-1, 1)
            rest = (out - wanted)[row] - (moves.T @ taken)[:, 0]
            if rest.square().mean().sqrt() <= limit * wanted[row].square().mean().sqrt():
                settled[row] = golden["out"][row].to(settled.dtype)
    return {"out": settled}


def _moves(args: Mapping[str, Any], row: int) -> Tensor:
    """What the result of a row moves by, fp64 [n, D], for a step of each of its activations that are near a middle."""
    x = mxfp8_rounded(args["x"][row].float()).double()
    found = [x.new_empty(0, x.shape[0])]
    for e, weight in zip(args["ids"][row].tolist(), args["weights"][row].tolist(), strict=True):
        if e < 0:
            continue
        w13, w2 = (mx_dequantize(args[n][e], args[f"{n}_scale"][e], torch.float32).double() for n in ("w13", "w2"))
        hidden = gated(w13 @ x, args["activation"], args["beta"], args["linear_beta"])
        below, above = (mxfp8_rounded((hidden * (1 + sign * _NEAR)).float()).double() for sign in (-1, 1))
        near = (below != above).nonzero().flatten()
        found.append((above - below)[near, None] * weight * w2[:, near].T)
    return torch.cat(found)


_LARGE = ("k3_tp8_prefill", "k3_ep8")


def samples() -> Iterator[Sample]:
    """The routings of `_experts`; of those for a device the smallest: `moe_experts_mxfp4` has the same products."""
    judged = [routing for routing in ROUTINGS if routing.name not in _LARGE]
    return routing_samples(mxfp4_weights, (*judged, *BENCH_ROUTINGS))


def cost(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Cost:
    """See `routed_cost`."""
    stored = sum(t.nbytes for t in (w13, w13_scale, w2, w2_scale))
    return routed_cost(x, ids, 2 * w2.shape[2], stored / w13.shape[0])


OPERATOR = Operator(
    reference=moe_experts_a8w4,
    family="moe",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    weights=("w13", "w13_scale", "w2", "w2_scale"),
    invariants=("batch_composition", "padding_rows", "choice_order"),
    settle_ties=settle_ties,
)
