"""A KDA layer over draft tokens, with what is needed to keep any prefix of them and without touching the state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import (
    VERIFY_CASES,
    KdaCase,
    cache_inputs,
    delta_step,
    kda_samples,
    projection_inputs,
    split_qkv,
    weight_inputs,
)
from k3hal.dispatch.ops.causal_conv1d import causal_conv1d
from k3hal.dispatch.ops.gated_rms_norm import gated_rms_norm
from k3hal.dispatch.ops.kda_gate import kda_gate


def kda_verify(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    width: int,
    lower_bound: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """kda_prefill over `width` tokens of each sequence that leaves both states alone (k3_architecture §10.1).

    qkv [N Q, C], raw_gate [N Q, H, K], beta_logits [N Q, H], out_gate [N Q, H, V], Q = width, sequence-major: the
    activation dtype, rows may be strided. Weights, conv_state [S, W - 1, C], state [S, H, V, K] and slots [N] as in
    kda_decode; nothing is mutated.
    Returns `out` [N Q, H V] in the activation dtype, as kda_prefill gives, and the records kda_commit takes: `u` fp32
    [N, Q, H, V], the correction of each token; `k` [N, Q, H, K], the convolved keys before the L2 norm, and `gate`
    [N, Q, H, K] and `conv_in` [N, Q, C], the raw inputs, in the activation dtype. `gate` and `conv_in` may be views of
    the inputs. Rows of slot 0 are zero in `out`, `u` and `k`, whatever they hold.
    """
    count, heads = slots.shape[0], A_log.shape[0]
    bounds = torch.arange(count + 1, dtype=torch.int32, device=slots.device) * width
    mixed = causal_conv1d(qkv, conv_weight, conv_state.clone(), slots, bounds, torch.ones_like(slots, dtype=torch.bool))
    q, k, v = split_qkv(mixed, heads)
    g, beta = kda_gate(raw_gate, beta_logits, A_log, dt_bias, lower_bound)
    read, u = (torch.zeros_like(v, dtype=torch.float32, memory_format=torch.contiguous_format) for _ in range(2))
    for n, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        current = state[slot]
        for t in range(n * width, (n + 1) * width):
            current, u[t], read[t] = delta_step(current, q[t], k[t], v[t], g[t], beta[t])
    out = gated_rms_norm(read, out_gate, norm_weight, eps).flatten(1).to(qkv.dtype)
    live = (slots != 0).repeat_interleave(width).unsqueeze(-1)
    out = torch.where(live, out, torch.zeros_like(out))
    each = (count, width)
    records = u.unflatten(0, each), k.contiguous().unflatten(0, each)
    return out, *records, raw_gate.unflatten(0, each), qkv.unflatten(0, each)


def _cost(qkv: Tensor, raw_gate: Tensor, state: Tensor, slots: Tensor, **_: Any) -> Cost:
    tokens, heads, dim = raw_gate.shape
    moved = 2 * qkv.nbytes + 5 * raw_gate.nbytes + 4 * raw_gate.numel() + slots.numel() * state[0].numel() * 4
    return Cost(flops=tokens * heads * dim * (7.0 * dim + 50), bytes=float(moved))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    return {
        **projection_inputs(gen, case, dtype),
        **weight_inputs(gen, case),
        **cache_inputs(gen, case, dtype),
        "width": case.lengths[0],
        "lower_bound": case.lower_bound,
        "eps": case.eps,
    }


def _samples() -> Iterator[Sample]:
    return kda_samples(VERIFY_CASES, _make, "verify")


OPERATOR = Operator(
    reference=kda_verify,
    family="kda",
    outputs={"out": "matmul", "u": "kda_layer_state", "k": "norm", "gate": "exact", "conv_in": "exact"},
    heads={"out": "norm_weight"},
    samples=_samples,
    cost=_cost,
    weights=("conv_weight", "A_log", "dt_bias", "norm_weight"),
    invariants=("batch", "pad"),
)
