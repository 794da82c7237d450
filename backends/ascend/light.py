"""Operators over single rows, by torch: embedding, norms, gates and activations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, softplus

from k3hal.backends.ascend._plain import NEEDS, PRIORITY, rms_normed
from k3hal.dispatch import provides
from k3hal.dispatch.ops.situ_and_mul import situ
from k3hal.dispatch.transforms import zeros_elsewhere


@provides("embed", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return zeros_elsewhere(ids >= 0, embedding(ids.clamp_min(0), weight))


@provides("rms_norm", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator."""
    if residual is not None:
        residual.add_(x)
    return rms_normed(x if residual is None else residual, weight, eps).to(x.dtype)


@provides("sigmoid_gate", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See the operator."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


@provides("situ_and_mul", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See the operator."""
    gate, up = x.float().chunk(2, dim=-1)
    return situ(gate, up, beta, linear_beta).to(x.dtype)


@provides("silu_and_mul", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def silu_and_mul(x: Tensor) -> Tensor:
    """See the operator."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


@provides("gated_rms_norm", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the operator."""
    return (rms_normed(x, weight, eps) * torch.sigmoid(gate.float())).to(x.dtype)


@provides("kda_gate", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def kda_gate(
    raw_gate: Tensor, beta_logits: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """See the operator."""
    rate, shifted = A_log.exp().unsqueeze(-1), raw_gate.float() + dt_bias
    g = -rate * softplus(shifted) if lower_bound is None else lower_bound * torch.sigmoid(rate * shifted)
    return g, torch.sigmoid(beta_logits.float())
