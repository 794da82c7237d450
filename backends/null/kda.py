"""KDA operators: zeros of the right shape; no state is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("causal_conv1d", name="zeros", graph_safe=True)
def causal_conv1d(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    return x.new_zeros(x.shape)


@provides("kda_gate", name="zeros", graph_safe=True)
def kda_gate(
    raw_gate: Tensor, beta_logits: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    gate = raw_gate.new_zeros(raw_gate.shape, dtype=torch.float32)
    return gate, beta_logits.new_zeros(beta_logits.shape, dtype=torch.float32)


@provides("kda_chunk", name="zeros", graph_safe=True)
def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
) -> Tensor:
    return v.new_zeros(v.shape)


@provides("kda_recurrent", name="zeros", graph_safe=True)
def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    return v.new_zeros(v.shape)


@provides("gated_rms_norm", name="zeros", graph_safe=True)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_zeros(x.shape)


@provides("kda_prefill", name="zeros", graph_safe=True)
def kda_prefill(
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
    cu_seqlens: Tensor,
    has_state: Tensor,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    return qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)


@provides("kda_decode", name="zeros", graph_safe=True)
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
    return qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)


@provides("kda_verify", name="zeros", graph_safe=True)
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
    rows, channels = qkv.shape
    heads, head_dim = raw_gate.shape[1:]
    each = (rows // width, width, heads, head_dim)
    return (
        qkv.new_zeros(rows, channels // 3),
        qkv.new_zeros(each, dtype=torch.float32),
        qkv.new_zeros(each),
        raw_gate.new_zeros(each),
        qkv.new_zeros(rows // width, width, channels),
    )


@provides("kda_commit", name="zeros", graph_safe=True)
def kda_commit(
    u: Tensor,
    k: Tensor,
    raw_gate: Tensor,
    conv_in: Tensor,
    accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: float | None,
) -> None:
    return None
