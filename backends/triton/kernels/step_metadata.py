"""Positions and cache rows of a step in one launch: programs share out each sequence, and the padding at the end."""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
MOST_PIECES = 16
_NUMBERS = (
    "context_stride", "new_stride", "table_stride", "entry_stride", "count", "num_tokens",
)  # fmt: skip
_launched: dict[tuple[int, int, int], Any] = {}
"""What was compiled, by device and constants: it serves every other argument. Triton's way to the same kernel looks at
each argument anew, which takes longer than all the rest of a call."""


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("context_lens", "new_lens", "page_table"))  # pyright: ignore[reportCallIssue, reportArgumentType]
def _step_metadata(
    context_lens, new_lens, page_table, positions, kv_rows, cu_seqlens, seq_lens, context_stride, new_stride,
    table_stride, entry_stride, count, num_tokens, PAGE_TOKENS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    others = tl.arange(0, COUNT)
    before = tl.sum(tl.load(new_lens + others * new_stride, others < tl.minimum(n, count), 0))
    if n < count:
        context = tl.load(context_lens + n * context_stride)
        new = tl.load(new_lens + n * new_stride)
        if piece == 0:
            tl.store(cu_seqlens + n, before)
            tl.store(seq_lens + n, context + new)
        for start in tl.range(piece * BLOCK, new, pieces * BLOCK):
            at = start + tl.arange(0, BLOCK)
            position = context + at
            entry = page_table + n.to(tl.int64) * table_stride + (position // PAGE_TOKENS) * entry_stride
            page = tl.load(entry, at < new, 0).to(tl.int64)
            tl.store(positions + before + at, position.to(tl.int64), at < new)
            tl.store(kv_rows + before + at, page * PAGE_TOKENS + position % PAGE_TOKENS, at < new)
    else:
        if piece == 0:
            tl.store(cu_seqlens + count, before)
        for start in tl.range(before + piece * BLOCK, num_tokens, pieces * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(positions + at, tl.zeros((BLOCK,), tl.int64), at < num_tokens)
            tl.store(kv_rows + at, tl.full((BLOCK,), -1, tl.int64), at < num_tokens)


def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator."""
    count, device = new_lens.shape[0], page_table.device
    positions, kv_rows = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    cu_seqlens, seq_lens = (torch.empty(n, dtype=torch.int32, device=device) for n in (count + 1, count))
    padded = 1 << max(count - 1, 15).bit_length()
    grid = (count + 1, min(max(-(-num_tokens // BLOCK), 1), MOST_PIECES), 1)
    arguments = (
        context_lens, new_lens, page_table, positions, kv_rows, cu_seqlens, seq_lens, context_lens.stride(0),
        new_lens.stride(0), *page_table.stride(), count, num_tokens, page_tokens, padded, BLOCK,
    )  # fmt: skip
    key = (page_table.get_device(), page_tokens, padded)
    made = _launched.get(key)
    if made is None:
        made = _step_metadata[grid](*arguments, num_warps=4)
        if made is not None and device.type == "cuda":  # It is None under the interpreter.
            _launched[key] = made
    else:
        made[grid](*arguments)
    return positions, kv_rows, cu_seqlens, seq_lens
