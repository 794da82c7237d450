"""The decay and the write strength of KDA from their raw projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import PREFILL_CASES, KdaCase, kda_samples, projection_inputs, weight_inputs


def kda_gate(
    raw_gate: Tensor, beta_logits: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Log decay `g` and write strength `beta`, fp32 (k3_architecture §2.3).

    raw_gate [T, H, K] and beta_logits [T, H] in the activation dtype, rows may be strided; A_log fp32 [H] and dt_bias
    fp32 [H, K]. With f = raw_gate + dt_bias and a = exp(A_log): g = lower_bound * sigmoid(a f), or -a softplus(f)
    where lower_bound is None; beta = sigmoid(beta_logits). Elementwise: a padding row gives whatever its values give.
    Returns new tensors g fp32 [T, H, K] (natural log, <= 0) and beta fp32 [T, H].
    """
    rate = A_log.exp().unsqueeze(-1)
    shifted = raw_gate.float() + dt_bias
    g = -rate * softplus(shifted) if lower_bound is None else lower_bound * torch.sigmoid(rate * shifted)
    return g, torch.sigmoid(beta_logits.float())


def _cost(raw_gate: Tensor, beta_logits: Tensor, **_: Any) -> Cost:
    moved = raw_gate.nbytes + beta_logits.nbytes + 4 * (raw_gate.numel() + beta_logits.numel())
    return Cost(flops=7.0 * raw_gate.numel(), bytes=float(moved))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    rows, weights = projection_inputs(gen, case, dtype), weight_inputs(gen, case)
    return {
        "raw_gate": rows["raw_gate"],
        "beta_logits": rows["beta_logits"],
        "A_log": weights["A_log"],
        "dt_bias": weights["dt_bias"],
        "lower_bound": case.lower_bound,
    }


def _samples() -> Iterator[Sample]:
    return kda_samples(PREFILL_CASES, _make, "any")


OPERATOR = Operator(
    reference=kda_gate,
    family="kda",
    outputs={"g": "fp32", "beta": "fp32"},
    samples=_samples,
    cost=_cost,
    weights=("A_log", "dt_bias"),
    invariants=("batch",),
)
