"""Writes new MLA entries into the paged cache, on Acme's chips."""

import torch
from torch import Tensor

from k3hal.dispatch import provides


@provides("mla_cache_insert", name="paged")
def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
    """See the operator."""
    entries = torch.cat([latent, k_pe], dim=-1).to(kv_cache.dtype)
    kept, page_tokens = rows >= 0, kv_cache.shape[1]
    kv_cache[rows[kept] // page_tokens, rows[kept] % page_tokens] = entries[kept]
