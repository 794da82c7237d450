"""The inside of a KDA layer for one token a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._kda import (
    DECODE_BENCH,
    DECODE_CASES,
    KdaCase,
    cache_inputs,
    in_fp32,
    kda_samples,
    projection_inputs,
    split_qkv,
    weight_inputs,
)
from k3hal.dispatch.ops.causal_conv1d import causal_conv1d
from k3hal.dispatch.ops.gated_rms_norm import gated_rms_norm
from k3hal.dispatch.ops.kda_gate import kda_gate
from k3hal.dispatch.ops.kda_recurrent import kda_recurrent


def kda_decode(
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
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """Everything between a KDA layer's projections and its output projection, one token a row (k3_architecture §2).

    qkv [N, C = 3 H K] rows q | k | v, each head-major; raw_gate [N, H, K]; beta_logits [N, H]; out_gate [N, H, V = K]:
    the activation dtype, rows may be strided (views of one fused projection). conv_weight fp32 [C, W], A_log fp32 [H],
    dt_bias fp32 [H, K], norm_weight fp32 [V]. conv_state [S, W - 1, C] in the activation dtype and state fp32
    [S, H, V, K], K contiguous, slot strides arbitrary (both mutated). slots int32 [N], distinct but for 0, each
    holding a valid state.
    causal_conv1d, kda_gate, kda_recurrent and gated_rms_norm in that order, by their contracts; the convolution's
    result is rounded to the activation dtype, what lies between the later steps may stay in fp32.
    Rows of slot 0 are zero in the result, whatever they hold, and slot 0 stays as it was. Returns a new tensor
    [N, H V] in the activation dtype.
    """
    return _compose(causal_conv1d, kda_gate, in_fp32(kda_recurrent), gated_rms_norm)(
        qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
        conv_state, state, slots, lower_bound, eps,
    )  # fmt: skip


def _lower(parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Tensor]:
    return _compose(*(parts[name] for name in OPERATOR.lowers_to))


def _compose(
    conv: Callable[..., Tensor],
    gate: Callable[..., tuple[Tensor, Tensor]],
    recurrent: Callable[..., Tensor],
    norm: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    def composed(
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
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        one_each = torch.arange(slots.shape[0] + 1, dtype=torch.int32, device=slots.device)
        valid = torch.ones_like(slots, dtype=torch.bool)
        q, k, v = split_qkv(conv(qkv, conv_weight, conv_state, slots, one_each, valid), A_log.shape[0])
        g, beta = gate(raw_gate, beta_logits, A_log, dt_bias, lower_bound)
        out = norm(recurrent(q, k, v, g, beta, state, slots), out_gate, norm_weight, eps).flatten(1).to(qkv.dtype)
        return torch.where((slots != 0).unsqueeze(-1), out, torch.zeros_like(out))

    return composed


def _cost(qkv: Tensor, raw_gate: Tensor, state: Tensor, conv_state: Tensor, slots: Tensor, **_: Any) -> Cost:
    rows, heads, dim = raw_gate.shape
    caches = 2 * rows * (state[0].numel() * 4 + conv_state[0].numel() * conv_state.element_size())
    flops = rows * heads * dim * (7.0 * dim + 50)
    return Cost(flops=flops, bytes=float(qkv.nbytes + 3 * raw_gate.nbytes + caches))


def _make(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    return {
        **projection_inputs(gen, case, dtype),
        **weight_inputs(gen, case),
        **cache_inputs(gen, case, dtype),
        "lower_bound": case.lower_bound,
        "eps": case.eps,
    }


def _samples() -> Iterator[Sample]:
    return kda_samples(DECODE_CASES + DECODE_BENCH, _make, "decode")


OPERATOR = Operator(
    reference=kda_decode,
    family="kda",
    outputs={"out": "matmul", "conv_state": "exact", "state": "kda_layer_state"},
    heads={"out": "norm_weight"},
    samples=_samples,
    cost=_cost,
    mutates=("conv_state", "state"),
    weights=("conv_weight", "A_log", "dt_bias", "norm_weight"),
    invariants=("batch", "pad", "far"),
    lowers_to=("causal_conv1d", "kda_gate", "kda_recurrent", "gated_rms_norm"),
    lowering=_lower,
    wide_parts=("kda_recurrent", "gated_rms_norm"),
)
