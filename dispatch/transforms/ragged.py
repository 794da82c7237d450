"""MLA prefill by kernels that take keys and values as packed rows: expanded from the paged latents, window by window,
and merged by the logarithms of the softmaxes' sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SCRATCH = 1 << 30
"""Bytes that the expanded keys and values of one window of context may take."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries `first` to `last` (packed rows) of a sequence, against its cached rows `start` to `stop`."""

    sequence: int
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed queries [T, H, Dk], keys [L, H, Dk] and values [L, H, Dv] of sequences that all have some of each, and
    where each begins and ends: `queries` and `keys` of it, as counts."""

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Sequence[int]
    keys: Sequence[int]

    def offsets(self, counts: Sequence[int]) -> Tensor:
        """int32 [N + 1] from 0, on the device."""
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        return torch.tensor(bounds, dtype=torch.int32, device=self.q.device)


Attend = Callable[[Batch, bool], tuple[Tensor, Tensor]]
"""Attention of a batch, causal (then with as many keys as queries each) or to every key: the result [T, H, Dv], and
fp32 [T, H], the base-2 logarithm of the sum under each softmax."""


def attention_over_cache(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    attend: Attend,
    scratch: int = SCRATCH,
) -> Tensor:
    """`mla_prefill`, arguments as there. Lengths are fetched to the host, which packs the batches.

    New rows are one causal batch, however many; context comes in windows of about `scratch` bytes. Keys, values and
    the result of each window are rounded to q's dtype; what windows give is merged in fp32.
    """
    starts, contexts = cu_seqlens.tolist(), context_lens.tolist()
    bounds = enumerate(pairwise(starts))
    new = [Piece(n, a, b, contexts[n], contexts[n] + b - a) for n, (a, b) in bounds if b > a]
    out = q.new_zeros(*q.shape[:2], w_uv.shape[1])
    if not new:
        return out

    def part(pieces: Sequence[Piece], rows: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = _expanded(kv_cache, page_table, pieces, w_uk, w_uv)
        queries, keys = [p.last - p.first for p in pieces], [p.stop - p.start for p in pieces]
        result, lse = attend(Batch(rows.contiguous(), k, v, queries, keys), causal)
        return result.float(), lse

    total = starts[-1]
    mixed, lse = part(new, q[:total], True)
    row_bytes = w_uk.shape[0] * (q.shape[2] + w_uv.shape[1]) * q.element_size()
    for pieces in _windows(new, max(1, scratch // row_bytes)):
        at = torch.cat([torch.arange(p.first, p.last, device=q.device) for p in pieces])
        seen, seen_lse = part(pieces, q[at], False)
        both = torch.logaddexp2(lse[at], seen_lse)
        mixed[at] = _share(mixed[at], lse[at] - both) + _share(seen, seen_lse - both)
        lse[at] = both
    out[:total] = mixed.to(q.dtype)
    return out


def _share(x: Tensor, log: Tensor) -> Tensor:
    return x * torch.exp2(log).unsqueeze(-1)


def _windows(new: Sequence[Piece], most_rows: int) -> Iterator[list[Piece]]:
    """Pieces over the context of those sequences that have one: as many rows of each at a time as fit."""
    left = [p for p in new if p.start]
    begin = 0
    while left:
        end = begin + max(1, most_rows // len(left))
        yield [Piece(p.sequence, p.first, p.last, begin, min(end, p.start)) for p in left]
        left, begin = [p for p in left if p.start > end], end


def _expanded(
    kv_cache: Tensor, page_table: Tensor, pieces: Sequence[Piece], w_uk: Tensor, w_uv: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys [L, H, Dn + Dr] and values [L, H, Dv] of the pieces' cached rows, in the weights' dtype."""
    page_tokens, heads, rank = kv_cache.shape[1], w_uk.shape[0], w_uk.shape[2]
    found = []
    for p in pieces:
        at = torch.arange(p.start, p.stop, device=kv_cache.device)
        pages = page_table[p.sequence].long()[at // page_tokens]
        found.append(kv_cache[pages, at % page_tokens])
    rows = torch.cat(found).to(w_uk.dtype)
    latent, k_pe = rows[:, :rank], rows[:, rank:]
    k_nope = torch.einsum("lr,hdr->lhd", latent, w_uk)
    k = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    return k, torch.einsum("lr,hdr->lhd", latent, w_uv).contiguous()
