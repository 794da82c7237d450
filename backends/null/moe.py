"""MoE and MXFP4 operators: zeros of the right shape; every token goes to experts 0 .. k - 1 with weight 0."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("moe_route", name="zeros", graph_safe=True)
def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    ids = torch.arange(top_k, dtype=torch.int32, device=logits.device).expand(logits.shape[0], top_k)
    return logits.new_zeros(logits.shape[0], top_k), ids.contiguous()


@provides("moe_experts", name="zeros", graph_safe=True)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    return x.new_zeros(x.shape)


@provides("moe_experts_mxfp4", name="zeros", graph_safe=True)
@provides("moe_experts_a8w4", name="zeros", graph_safe=True)
@provides("moe_experts_int4", name="zeros", graph_safe=True)
def moe_experts_packed(
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
    return x.new_zeros(x.shape)


@provides("latent_moe", name="zeros", graph_safe=True)
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
    return x.new_zeros(x.shape)


@provides("mx_quantize", name="zeros", graph_safe=True)
def mx_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    *rows, width = x.shape
    return x.new_zeros(*rows, width // 2, dtype=torch.uint8), x.new_zeros(*rows, width // 32, dtype=torch.uint8)


@provides("mx_dequantize", name="zeros", graph_safe=True)
def mx_dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_zeros(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype)
