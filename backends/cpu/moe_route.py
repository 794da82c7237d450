"""Routing on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("moe_route", name="topk")
def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """A partial sort, which leaves the order of ties open; a full stable one where there are any."""
    scores = torch.sigmoid(logits)
    biased = scores + bias
    best = biased.topk(min(top_k + 1, biased.shape[1]), dim=-1)
    ids = best.indices[:, :top_k]
    values = best.values.numpy()
    if (values[:, 1:] == values[:, :-1]).any():
        ids = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights.div_(weights.sum(dim=-1, keepdim=True).add_(1e-20))
    return weights if scale == 1.0 else weights.mul_(scale), ids.int()
