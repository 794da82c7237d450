"""Norms, embedding, head, attention residuals and gates: zeros of the right shape."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("rms_norm", name="zeros", graph_safe=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    return x.new_zeros(x.shape)


@provides("embed", name="zeros", graph_safe=True)
def embed(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_zeros(*ids.shape, weight.shape[1])


@provides("linear_fp32", name="zeros", graph_safe=True)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)


@provides("attn_res_mix", name="zeros", graph_safe=True)
def attn_res_mix(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    num_blocks: int,
    reset: bool,
    store: bool,
    key_weight: Tensor,
    out_weight: Tensor | None,
    eps: float,
    out_eps: float,
) -> Tensor:
    return prefix.new_zeros(prefix.shape)


@provides("sigmoid_gate", name="zeros", graph_safe=True)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_zeros(x.shape)


@provides("situ_and_mul", name="zeros", graph_safe=True)
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    return x.new_zeros(x.shape[0], x.shape[1] // 2)


@provides("silu_and_mul", name="zeros", graph_safe=True)
def silu_and_mul(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], x.shape[1] // 2)


@provides("linear", name="zeros", graph_safe=True)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], weight.shape[0])


@provides("head_linear", name="zeros", graph_safe=True)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:2], weight.shape[1])
