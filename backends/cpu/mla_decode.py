"""Absorbed MLA decoding on the CPU: sequences of similar length share one batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu._attention import Running
from k3hal.backends.cpu._cache_rows import CacheRows
from k3hal.dispatch import provides

# Rows gathered at a time, 5 MB of 576 fp32: more misses the cache between the two products, fewer pays for calls.
BLOCK_ROWS = 2048
# A batch costs about as much before its first row as this many rows do.
BATCH_ROWS = 256


def _batches(lengths: list[int]) -> list[list[int]]:
    """Sequences in batches that pad at most a fifth of their rows, or fewer rows than another batch would cost."""
    out: list[list[int]] = []
    rows = 0
    for n in sorted((n for n, length in enumerate(lengths) if length), key=lengths.__getitem__):
        length, size = lengths[n], len(out[-1]) + 1 if out else 1
        padded = size * length
        if out and padded <= BLOCK_ROWS and padded - rows - length <= max(rows // 5, BATCH_ROWS):
            out[-1].append(n)
            rows += length
        else:
            out.append([n])
            rows = length
    return out


def _attend(q: Tensor, rows: CacheRows, members: list[int], lengths: list[int], rank: int) -> Tensor:
    """q fp32 [B, H, E], scaled, to fp32 [B, H, R]."""
    last, running = max(lengths), Running()
    for a in range(0, last, BLOCK_ROWS):
        b = min(last, a + BLOCK_ROWS)
        entries = rows.read(members, lengths, a, b)
        scores = torch.bmm(q, entries.transpose(1, 2))
        if min(lengths) < b:
            beyond = torch.arange(a, b) >= torch.tensor(lengths)[:, None]
            scores.masked_fill_(beyond[:, None], -torch.inf)
        if last <= BLOCK_ROWS:
            return torch.bmm(scores.softmax(dim=-1), entries[..., :rank])
        running.add(scores, entries[..., :rank])
    return running.result()


@provides("mla_decode", name="batched")
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """Rows are gathered as fp32 in blocks; a batch of several sequences always fits one block."""
    lengths, rows = seq_lens.tolist(), CacheRows(kv_cache, page_table)
    batches = _batches(lengths)
    if len(batches) == 1 and len(batches[0]) == len(lengths) == 1:
        return _attend(q.float() * scale, rows, [0], lengths, kv_lora).to(q.dtype)
    out = q.new_zeros(*q.shape[:2], kv_lora)
    for members in batches:
        index = torch.tensor(members)
        batch = q.index_select(0, index).float() * scale
        mine = [lengths[n] for n in members]
        out.index_copy_(0, index, _attend(batch, rows, members, mine, kv_lora).to(q.dtype))
    return out
