"""KDA's gates on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from k3hal.dispatch import provides


@provides("kda_gate", name="in_place")
def kda_gate(
    raw_gate: Tensor, beta_logits: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """See the operator."""
    return log_decay(raw_gate, A_log, dt_bias, lower_bound), torch.sigmoid(beta_logits.float())


def log_decay(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """g [T, H, K] fp32, a new tensor."""
    shifted, rate = raw_gate.float() + dt_bias, A_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return softplus(shifted).mul_(-rate)
    return shifted.mul_(rate).sigmoid_().mul_(lower_bound)
