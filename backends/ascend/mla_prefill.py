"""MLA prefill by torch: a sequence at a time, over blocks of its cached rows."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY, SCRATCH_BYTES, blocks
from k3hal.backends.ascend.mla_decode import rows_of_pages
from k3hal.dispatch import provides


# Lengths are fetched to the host.
@provides("mla_prefill", name="torch", needs=NEEDS, priority=PRIORITY)
def mla_prefill(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """See the operator."""
    out, offsets = q.new_zeros(*q.shape[:2], w_uv.shape[1]), cu_seqlens.tolist()
    for n, context in enumerate(context_lens.tolist()):
        first, last = offsets[n], offsets[n + 1]
        if last > first:
            chunk = q[first:last].transpose(0, 1).float() * scale
            out[first:last] = _attend(chunk, kv_cache, page_table[n], context, w_uk, w_uv).transpose(0, 1).to(q.dtype)
    return out


def _attend(q: Tensor, kv_cache: Tensor, pages: Tensor, context: int, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Queries fp32 [H, T, Dn + Dr], scaled, of the rows after `context`; fp32 [H, T, Dv]."""
    heads, tokens, page_tokens = q.shape[0], q.shape[1], kv_cache.shape[1]
    length, rank = context + tokens, w_uk.shape[2]
    seen = context + 1 + torch.arange(tokens, device=q.device)
    top = q.new_full((heads, tokens, 1), -torch.inf)
    total, mixed = torch.zeros_like(top), q.new_zeros(heads, tokens, w_uv.shape[1])
    per_row = heads * 4 * (q.shape[2] + w_uv.shape[1] + 2 * tokens)
    for block in blocks(-(-length // page_tokens), SCRATCH_BYTES // (per_row * page_tokens)):
        start = block.start * page_tokens
        rows, _ = rows_of_pages(kv_cache, pages[block].unsqueeze(0), seen[-1:], start)
        latent, k_pe = rows[0, :, :rank], rows[0, :, rank:]
        k_nope = torch.matmul(latent, w_uk.float().transpose(1, 2))
        keys = torch.cat((k_nope, k_pe.expand(heads, -1, -1)), dim=-1)
        at = start + torch.arange(rows.shape[1], device=q.device)
        scores = torch.bmm(q, keys.transpose(1, 2)).masked_fill(at >= seen.unsqueeze(1), -torch.inf)
        # The first block has row 0, which every query sees: from then on the maximum is a number.
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + torch.bmm(weights, torch.matmul(latent, w_uv.float().transpose(1, 2)))
        top = higher
    return mixed / total
