"""MLA operators: zeros of the right shape; the cache is not touched."""

from __future__ import annotations

from torch import Tensor

from k3hal.dispatch import provides


@provides("mla_cache_insert", name="zeros", graph_safe=True)
def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
    return None


@provides("mla_prefill", name="zeros", graph_safe=True)
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
    return q.new_zeros(*q.shape[:2], w_uv.shape[1])


@provides("mla_decode", name="zeros", graph_safe=True)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    return q.new_zeros(*q.shape[:2], kv_lora)
