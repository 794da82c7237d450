"""Attention-residual mix on CPU: each block of rows is read once and mixed while in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._rows import rms_scale, row_blocks
from k3hal.dispatch import provides


@provides("attn_res_mix", name="rows")
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
    out, stored = torch.empty_like(prefix), blocks[:num_blocks]
    weight = None if out_weight is None else out_weight.float()
    for rows in row_blocks(prefix.shape[0], (num_blocks + 1) * prefix.shape[1]):
        mix = _mix(torch.cat((stored[:, rows], prefix[rows].unsqueeze(0))).float(), key_weight, eps)
        if weight is not None:
            mix = mix.to(out.dtype).float()
            mix = (mix * rms_scale(mix, out_eps)).mul_(weight)
        out[rows] = mix
    if store:
        blocks[num_blocks] = prefix
    return out


def _mix(sources: Tensor, key_weight: Tensor, eps: float) -> Tensor:
    """[J, t, D] fp32 to the mix [t, D]. The keys are never formed: their scale commutes with the dot product."""
    scores = torch.matmul(sources, key_weight).mul_(rms_scale(sources, eps).squeeze(-1))
    weights = scores.softmax(0).t().unsqueeze(1)
    return torch.bmm(weights, sources.transpose(0, 1)).squeeze(1)
