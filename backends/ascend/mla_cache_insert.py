"""Writing to the paged MLA cache, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.dispatch import provides

FP8_MAX = 448.0


@provides("mla_cache_insert", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
    """See the operator.

    How many rows are written is known on the device alone, so every row is: a padding row repeats the first that is
    not, and where all are padding the cache's first row is written as it was.
    """
    if not rows.numel():
        return
    entries = torch.cat((latent, k_pe), dim=-1)
    if kv_cache.dtype is torch.float8_e4m3fn:
        entries = entries.float().clamp(-FP8_MAX, FP8_MAX).to(kv_cache.dtype)
        kv_cache, entries = kv_cache.view(torch.uint8), entries.view(torch.uint8)
    live = rows >= 0
    first = live.int().argmax().view(1)
    some = live.index_select(0, first)
    target = torch.where(live, rows, torch.where(some, rows.index_select(0, first), 0))
    stand_in = torch.where(some.unsqueeze(1), entries.index_select(0, first), kv_cache[0, :1])
    page_tokens = kv_cache.shape[1]
    page = torch.div(target, page_tokens, rounding_mode="floor")
    kv_cache.index_put_((page, target - page * page_tokens), torch.where(live.unsqueeze(1), entries, stand_in))
