"""Absorbed MLA decoding by torch, over blocks of pages with a running maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY, SCRATCH_BYTES, blocks
from k3hal.dispatch import provides
from k3hal.dispatch.transforms import zeros_elsewhere

LOWEST = -1e30
"""In place of -inf, whose differences are NaN where a sequence has no row in a block."""


@provides("mla_decode", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator. Every entry of the page table's width is gathered, whatever the lengths: shapes depend on no
    value, and what a sequence has not is replaced before it is multiplied."""
    count, heads, page_tokens = q.shape[0], q.shape[1], kv_cache.shape[1]
    queries = zeros_elsewhere(seq_lens > 0, q).float() * scale
    top = torch.full((count, heads, 1), LOWEST, dtype=torch.float32, device=q.device)
    total, mixed = torch.zeros_like(top), top.new_zeros(count, heads, kv_lora)
    pages = max(1, SCRATCH_BYTES // max(1, count * page_tokens * q.shape[2] * 4))
    for block in blocks(page_table.shape[1], pages):
        start = block.start * page_tokens
        rows, valid = rows_of_pages(kv_cache, page_table[:, block], seq_lens, start)
        scores = torch.bmm(queries, rows.transpose(1, 2)).masked_fill(~valid.unsqueeze(1), LOWEST)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher) * valid.unsqueeze(1)
        shrink = torch.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed, top = mixed * shrink + torch.bmm(weights, rows[..., :kv_lora]), higher
    return zeros_elsewhere(seq_lens > 0, mixed / total).to(q.dtype)


def rows_of_pages(kv_cache: Tensor, pages: Tensor, seq_lens: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Rows of `pages` [N, W] as fp32 [N, W page, E], whose first is each sequence's row `start`, and which of them it
    has; those it has not are zero, and the pages of entries that it does not need are not looked at."""
    page_tokens = kv_cache.shape[1]
    at = start + torch.arange(pages.shape[1] * page_tokens, device=pages.device)
    valid = at < seq_lens.unsqueeze(1)
    needed = torch.where(valid[:, ::page_tokens], pages, 0)
    found = kv_cache.index_select(0, needed.flatten()) if kv_cache.element_size() > 1 else _bytes(kv_cache, needed)
    return zeros_elsewhere(valid, found.view(*valid.shape, -1).float()), valid


def _bytes(kv_cache: Tensor, pages: Tensor) -> Tensor:
    """Pages of a cache in fp8, which is gathered as bytes."""
    return kv_cache.view(torch.uint8).index_select(0, pages.flatten()).view(kv_cache.dtype)
