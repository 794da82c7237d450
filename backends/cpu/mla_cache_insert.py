"""MLA cache insertion on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("mla_cache_insert", name="indexed")
def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
    """One indexed write of whole rows; fp8 saturates in the cast."""
    entries = torch.cat([latent, k_pe], dim=-1)
    if (rows.numpy() < 0).any():
        kept = (rows >= 0).nonzero()[:, 0]
        rows, entries = rows.index_select(0, kept), entries.index_select(0, kept)
    entries, target = entries.to(kv_cache.dtype), kv_cache
    if kv_cache.dtype == torch.float8_e4m3fn:
        entries, target = entries.view(torch.uint8), kv_cache.view(torch.uint8)
    pages, page_tokens, width = kv_cache.shape
    if kv_cache.is_contiguous():
        target.view(pages * page_tokens, width).index_copy_(0, rows, entries)
    else:
        target.index_put_((rows // page_tokens, rows % page_tokens), entries)
