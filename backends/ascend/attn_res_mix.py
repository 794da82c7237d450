"""Attention-residual mix by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY, rms_normed
from k3hal.dispatch import provides


@provides("attn_res_mix", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
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
    """See the operator."""
    if delta is not None:
        prefix.copy_(delta) if reset else prefix.add_(delta)
    mix = _mix(torch.cat((blocks[:num_blocks], prefix.unsqueeze(0))), key_weight, eps) if num_blocks else prefix
    if store:
        blocks[num_blocks].copy_(prefix)
    if out_weight is not None:
        return rms_normed(mix, out_weight, out_eps).to(prefix.dtype)
    return mix if num_blocks else prefix.clone()


def _mix(sources: Tensor, key_weight: Tensor, eps: float) -> Tensor:
    """[J, T, D] to [T, D]. The scale of a key commutes with its product, so that no key is written out."""
    wide = sources.float()
    scores = (wide * key_weight).sum(-1, keepdim=True) * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scores.softmax(0) * wide).sum(0).to(sources.dtype)
