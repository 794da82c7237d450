"""Paged latent caches: how a sequence's rows are found, and samples that hide garbage wherever nothing may look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3hal.dispatch.call import DimValue
from k3hal.dispatch.sampling_inputs import repeated

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
GARBAGE_PAGE = 1 << 30


@dataclass(frozen=True, slots=True)
class MlaShape:
    """The static facts of an MLA sample; `dims()` names them as the operators' contracts do."""

    heads: int = 3
    kv_lora: int = 64
    rope: int = 16
    nope: int = 32
    v: int = 32
    page_tokens: int = 4
    kv_dtype: str = "float32"

    @property
    def entry(self) -> int:
        return self.kv_lora + self.rope

    def dims(self) -> Mapping[str, DimValue]:
        return {
            "heads": self.heads,
            "kv_lora": self.kv_lora,
            "rope_dim": self.rope,
            "nope_dim": self.nope,
            "v_dim": self.v,
            "kv_dtype": self.kv_dtype,
            "page_tokens": self.page_tokens,
        }


K3_TP8 = MlaShape(12, 512, 64, 128, 128, 64, "bfloat16")


def cached_rows(kv_cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` cached rows of one sequence, fp32 [length, R + Dr]; `pages` int32 [maxpages]."""
    page_tokens = kv_cache.shape[1]
    needed = -(-length // page_tokens)
    return kv_cache[pages[:needed].long()].float().flatten(0, 1)[:length]


def paged_cache(
    g: torch.Generator, shape: MlaShape, lengths: Sequence[int], *, strided: bool = False, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """A cache `[P, page, R + Dr]` holding `lengths` rows per sequence, and its page table int32 `[N, maxpages]`.

    Pages are shuffled unless `in_order`. Rows that belong to no sequence are NaN, page-table entries beyond need are
    far out of range, and page 0 is nobody's. `strided` puts a gap between pages, as an arena of several layers does.
    """
    counts = [-(-length // shape.page_tokens) for length in lengths]
    total = 1 + sum(counts) + 2
    order = torch.arange(1, total) if in_order else 1 + torch.randperm(total - 1, generator=g)
    values = torch.full((total, shape.page_tokens, shape.entry), torch.nan)
    table = torch.full((len(lengths), max([*counts, 1]) + 1), GARBAGE_PAGE, dtype=torch.int32)
    taken = 0
    for n, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[taken : taken + count]
        table[n, :count] = pages.int()
        rows = torch.full((count * shape.page_tokens, shape.entry), torch.nan)
        rows[:length] = torch.randn(length, shape.entry, generator=g)
        values[pages] = rows.view(count, shape.page_tokens, shape.entry)
        taken += count
    return into_pages(values, DTYPES[shape.kv_dtype], strided), table


def large_paged_cache(g: torch.Generator, shape: MlaShape, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """As `paged_cache`, for caches of gigabytes: pages repeat, each times a factor of its own."""
    counts = [-(-length // shape.page_tokens) for length in lengths]
    total = 1 + sum(counts)
    drawn = torch.randn(min(total, 512), shape.page_tokens, shape.entry, generator=g)
    values = repeated(g, drawn.to(DTYPES[shape.kv_dtype]), total)
    table = torch.full((len(lengths), max(counts) + 1), GARBAGE_PAGE, dtype=torch.int32)
    order = 1 + torch.randperm(total - 1, generator=g)
    for n, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages, order = order[:count], order[count:]
        table[n, :count] = pages.int()
        if rest := length % shape.page_tokens:
            values[pages[-1], rest:] = torch.nan
    return values, table


def into_pages(values: Tensor, dtype: torch.dtype, strided: bool) -> Tensor:
    """`values` as a cache of `dtype`; `strided` makes it a view of a wider arena."""
    if not strided:
        return values.to(dtype)
    arena = torch.zeros(values.shape[0], values[0].numel() + 3 * values.shape[2] + 8, dtype=dtype)
    view = arena[:, : values[0].numel()].view(values.shape)
    view.copy_(values.to(dtype))
    return view
