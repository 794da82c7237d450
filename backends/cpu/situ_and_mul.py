"""SiTU on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("situ_and_mul", name="in_place")
def situ_and_mul(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The reference's arithmetic with two temporaries."""
    gate, up = x.float().chunk(2, dim=-1)
    out = (gate / beta).tanh_().mul_(torch.sigmoid(gate))
    return out.mul_((up / linear_beta).tanh_()).mul_(beta * linear_beta).to(x.dtype)
