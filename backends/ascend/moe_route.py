"""Routing by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.dispatch import provides


@provides("moe_route", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See the operator. A stable sort: what topk does with equal scores is nowhere promised."""
    scores = torch.sigmoid(logits)
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.int()
