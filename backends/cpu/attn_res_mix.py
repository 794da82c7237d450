"""Attention-residual mix on CPU: each block of rows is read once and mixed while in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._rows import BLOCK_ELEMENTS, normalise_rows, rms_scale, row_blocks
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
    mix = _mix(prefix, blocks[:num_blocks], key_weight, eps) if num_blocks else prefix
    if store:
        blocks[num_blocks] = prefix
    if out_weight is not None:
        return normalise_rows(mix, out_weight, out_eps)
    return mix if num_blocks else prefix.clone()


def _mix(prefix: Tensor, blocks: Tensor, key_weight: Tensor, eps: float) -> Tensor:
    last, per_row = prefix.unsqueeze(0), (blocks.shape[0] + 1) * prefix.shape[1]
    if prefix.shape[0] * per_row <= BLOCK_ELEMENTS:
        return _mix_rows(torch.cat((blocks, last)), key_weight, eps)
    out = torch.empty_like(prefix)
    for rows in row_blocks(prefix.shape[0], per_row):
        out[rows] = _mix_rows(torch.cat((blocks[:, rows], last[:, rows])), key_weight, eps)
    return out


def _mix_rows(sources: Tensor, key_weight: Tensor, eps: float) -> Tensor:
    """[J, t, D], a scratch tensor, to the mix [t, D]. The keys are never formed: their scale commutes with the dot."""
    wide = sources.float()
    scores = torch.matmul(wide, key_weight).unsqueeze(-1).mul_(rms_scale(wide, eps))
    return wide.mul_(scores.softmax(0)).sum(0).to(sources.dtype)
