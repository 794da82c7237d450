"""Pages of a paged cache in the sizes that vendors' kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.dispatch.errors import UnsupportedError


def in_pages_up_to(most: int, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """The cache [P, page, D] seen in pages of at most `most` tokens, and the table of those that are needed.

    A larger page is several in a row, and as many of that size lie between it and the next one, which other layers
    have. Raises `UnsupportedError` where that is not a whole number.
    """
    page, width = kv_cache.shape[1:]
    if page <= most:
        return kv_cache, needed_pages(page_table, seq_lens, page)
    apart, rest = divmod(kv_cache.stride(0), most * width)
    if rest or page % most or kv_cache.stride()[1:] != (width, 1):
        raise UnsupportedError(
            f"pages of {page} rows of {width}, one {kv_cache.stride(0)} elements after another, are no whole number of "
            f"pages of {most}",
            hint="choose another provider of mla_decode with --ops",
        )
    parts = page // most
    count = (kv_cache.shape[0] - 1) * apart + parts
    small = kv_cache.as_strided((count, most, width), (most * width, width, 1))
    within = torch.arange(parts, dtype=page_table.dtype, device=page_table.device)
    table = (page_table.unsqueeze(-1) * apart + within).flatten(1)
    return small, needed_pages(table, seq_lens, most)


def needed_pages(page_table: Tensor, seq_lens: Tensor, page_tokens: int) -> Tensor:
    """The page table with page 0 where no row is needed: the library may fetch ahead, and entries there are garbage."""
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_tokens
    return torch.where(first < seq_lens.unsqueeze(-1), page_table, 0)
