"""MLA prefill on the CPU: blocks of keys and tiles of queries, so memory stays bounded at any context."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from k3hal.backends.cpu._attention import Running
from k3hal.backends.cpu._cache_rows import CacheRows
from k3hal.dispatch import provides

# fp32 elements of one block of keys and values, and of one tile of scores.
BLOCK_ELEMENTS = 1 << 23
TILE_ELEMENTS = 1 << 22

# (first, last) positions to keys, transposed [G, Dk, L], and values [G, L, Dv].
Keys = Callable[[int, int], tuple[Tensor, Tensor]]


def _attend(q: Tensor, keys: Keys, width: int, per_token: int, context: int) -> Tensor:
    """Causal attention of scaled queries [G, M, Dk], `per_token` of them a token, to [G, M, Dv].

    `width` is Dk + Dv. Query i sees the first `context + i // per_token + 1` positions.
    """
    groups, queries, _ = q.shape
    length = context + queries // per_token
    block = min(4096, max(256, BLOCK_ELEMENTS // (groups * width)))
    tile = max(per_token, TILE_ELEMENTS // (groups * min(block, length)) // per_token * per_token)
    tiles = [(a, min(queries, a + tile)) for a in range(0, queries, tile)]
    running = [Running() for _ in tiles]
    for first in range(0, length, block):
        last = min(length, first + block)
        transposed, values = keys(first, last)
        for (a, b), state in zip(tiles, running, strict=True):
            end = min(last, context + b // per_token)
            if end <= first:
                continue
            scores = torch.bmm(q[:, a:b], transposed[..., : end - first])
            seen = context + torch.arange(a, b) // per_token + 1
            if int(seen[0]) < end:
                scores.masked_fill_(torch.arange(first, end) >= seen[:, None], -torch.inf)
            state.add(scores, values[:, : end - first])
    return torch.cat([state.result() for state in running], dim=1)


def _up_projected(q: Tensor, rows: CacheRows, n: int, length: int, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Keys and values per head: cheaper when there are many queries. q fp32 [T, H, Dn + Dr], scaled; [H, T, Dv]."""
    heads, nope, rank = w_uk.shape

    def keys(first: int, last: int) -> tuple[Tensor, Tensor]:
        entries = rows.read([n], [length], first, last)[0]
        latent = entries[:, :rank].contiguous()
        transposed = torch.empty(heads, q.shape[2], last - first)
        torch.bmm(w_uk, latent.t()[None].expand(heads, -1, -1), out=transposed[:, :nope])
        transposed[:, nope:] = entries[:, rank:].t()
        return transposed, torch.matmul(latent, w_uv.transpose(1, 2))

    width = q.shape[2] + w_uv.shape[1]
    return _attend(q.transpose(0, 1).contiguous(), keys, width, 1, length - q.shape[0])


def _absorbed(q: Tensor, rows: CacheRows, n: int, length: int, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Queries in latent space against the rows themselves: cheaper when there are few queries. As `_up_projected`."""
    tokens, heads, _ = q.shape
    nope, rank = w_uk.shape[1:]
    latent = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    queries = torch.cat([latent, q[..., nope:]], dim=-1).view(1, tokens * heads, -1)

    def keys(first: int, last: int) -> tuple[Tensor, Tensor]:
        entries = rows.read([n], [length], first, last)
        return entries.transpose(1, 2), entries[..., :rank]

    out = _attend(queries, keys, queries.shape[2] + rank, heads, length - tokens)
    return torch.bmm(out.view(tokens, heads, rank).transpose(0, 1), w_uv.transpose(1, 2))


def _prefers_absorbed(tokens: int, length: int, q_width: int, w_uk: Tensor, w_uv: Tensor) -> bool:
    """Multiplications a head: projecting the queries and wide scores, or projecting the rows and narrow ones."""
    nope, rank = w_uk.shape[1:]
    projection, pairs = rank * (nope + w_uv.shape[1]), tokens * length
    wide, narrow = 2 * rank + q_width - nope, q_width + w_uv.shape[1]
    return tokens * projection + pairs * wide < length * projection + pairs * narrow


@provides("mla_prefill", name="blockwise")
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
    """Sequence by sequence in fp32, by whichever of the two algebraically equal forms multiplies less."""
    out = q.new_zeros(*q.shape[:2], w_uv.shape[1])
    rows, offsets = CacheRows(kv_cache, page_table), cu_seqlens.tolist()
    up = (w_uk.float(), w_uv.float())
    for n, context in enumerate(context_lens.tolist()):
        first, last = offsets[n], offsets[n + 1]
        if first == last:
            continue
        length, chunk = context + last - first, q[first:last].float() * scale
        absorbed = _prefers_absorbed(last - first, length, q.shape[2], *up)
        form = _absorbed if absorbed else _up_projected
        out[first:last] = form(chunk, rows, n, length, *up).transpose(0, 1)
    return out
