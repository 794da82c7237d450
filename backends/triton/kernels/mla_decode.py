"""Absorbed MLA decoding: each sequence in chunks of cached rows (split KV), then a merge of what the chunks gave.

For few heads a tile is turned on its side, rows by heads: every cached row is read once for all heads of a block, 64
rows fill a warp group's matrix instruction however few heads there are, and scores and values take the tile from one
place. Many heads fill it themselves: blocks of 64 by rows, which multiply wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels.programs import jit_for_any, resident

LOG2_E = 1.4426950408889634
MERGED_AT_ONCE = 16
UPRIGHT = 64
"""Heads of a block from which on it is not turned."""
LEAST_BATCH = 16
"""Sequences that the smallest kernel is made for: all smaller batches share it."""
_OF_THE_BATCH = ("table_row", "count", "max_splits")


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut.

    A sequence is cut into chunks of at least `chunk` rows, and into at most `splits` of them: by its own length alone,
    so that its result is the same in every batch. `rows` is a tile's, `per_sm` the programs that share a processor.
    `twice` has values loaded apart from scores, the second time from the L2 cache: where a tile is converted on its way
    to two products, Triton reads ahead on Hopper only if each has a load of its own. `heads` are a block's; those of
    64 are not turned.
    """

    rows: int
    warps: int
    stages: int
    chunk: int
    splits: int
    per_sm: int
    twice: bool
    heads: int


@triton.jit
def _chunk_of(length, CHUNK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    return tl.maximum((length + SPLITS * ROWS - 1) // (SPLITS * ROWS) * ROWS, CHUNK)


@triton.jit
def _shares(seq_lens, count, BLOCK_BATCH: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Of every sequence how many chunks it has, and how many there are up to its last."""
    batch = tl.arange(0, BLOCK_BATCH)
    lengths = tl.load(seq_lens + batch, batch < count, 0)
    chunks = _chunk_of(lengths, CHUNK, SPLITS, ROWS)
    # An empty sequence is one empty chunk, which writes its zeros.
    splits = tl.where(batch < count, tl.maximum((lengths + chunks - 1) // chunks, 1), 0)
    return splits, tl.cumsum(splits, 0)


@triton.jit
def _share(unit, splits, ends, BLOCK_BATCH: tl.constexpr):
    """The sequence and the chunk of it that are chunk `unit` of all."""
    n = tl.sum((ends <= unit).to(tl.int32), 0)
    return n, unit - tl.sum(tl.where(tl.arange(0, BLOCK_BATCH) < n, splits, 0), 0)


@jit_for_any(*_OF_THE_BATCH)
def _attend_upright(
    q, cache, table, seq_lens, out, partial, lse,
    q_row, q_head, page_stride, table_row, count, scale, max_splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_attend` for blocks of many heads."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    ENTRY: tl.constexpr = RANK + ROPE
    kind = q.dtype.element_ty
    splits, ends = _shares(seq_lens, count, BLOCK_BATCH, CHUNK, SPLITS, ROWS)
    ranks, ropes, rows = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :], tl.arange(0, ROWS)
    for item in range(tl.program_id(0), tl.sum(splits, 0) * HEAD_BLOCKS, tl.num_programs(0)):
        n, split = _share(item // HEAD_BLOCKS, splits, ends, BLOCK_BATCH)
        length = tl.load(seq_lens + n)
        chunk = _chunk_of(length, CHUNK, SPLITS, ROWS)
        first = split * chunk
        last = tl.minimum(first + chunk, length)
        heads = (item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        mine = heads < tl.where(length > 0, HEADS, 0)
        query = q + n.to(tl.int64) * q_row + heads * q_head
        q_latent = tl.load(query + ranks, mine & (ranks < RANK), 0.0)
        q_rope = tl.load(query + RANK + ropes, mine & (ropes < ROPE), 0.0)
        pages = table + n.to(tl.int64) * table_row
        top = tl.full([BLOCK_H], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
        page = tl.load(pages + first // PAGE, first < last, 0)
        for at in tl.range(first, last, ROWS, num_stages=STAGES):
            live = at + rows < last
            if PAGE % ROWS == 0:
                entry = cache + page.to(tl.int64) * page_stride + at % PAGE * ENTRY + rows[:, None] * ENTRY
                page = tl.load(pages + (at + ROWS) // PAGE, at + ROWS < last, 0)
            else:
                position = at + rows
                page_of = tl.load(pages + position // PAGE, live, 0).to(tl.int64)
                entry = cache + (page_of * page_stride + position % PAGE * ENTRY)[:, None]
            latent = tl.load(entry + ranks, live[:, None] & (ranks < RANK), 0.0).to(kind)
            rope = tl.load(entry + RANK + ropes, live[:, None] & (ropes < ROPE), 0.0).to(kind)
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
            scores = tl.where(live[None, :], scores * scale, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(kind), latent, acc * fade[:, None], input_precision="ieee")
            top = higher
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        inside = (heads < HEADS) & (ranks < RANK)
        if length <= chunk:
            place = n.to(tl.int64) * HEADS * RANK + heads * RANK + ranks
            tl.store(out + place, acc.to(out.dtype.element_ty), inside)
        else:
            part = (n.to(tl.int64) * max_splits + split) * HEADS
            tl.store(partial + (part + heads) * RANK + ranks, acc, inside)
            of_block = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
            tl.store(lse + part + of_block, top + tl.log2(total), of_block < HEADS)


@jit_for_any(*_OF_THE_BATCH)
def _attend(
    q, cache, table, seq_lens, out, partial, lse,
    q_row, q_head, page_stride, table_row, count, scale, max_splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_BATCH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Every program takes every so manieth (sequence, chunk, block of heads): idle programs cost nothing."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    ENTRY: tl.constexpr = RANK + ROPE
    kind = q.dtype.element_ty
    splits, ends = _shares(seq_lens, count, BLOCK_BATCH, CHUNK, SPLITS, ROWS)
    ranks, ropes, rows = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P), tl.arange(0, ROWS)
    for item in range(tl.program_id(0), tl.sum(splits, 0) * HEAD_BLOCKS, tl.num_programs(0)):
        n, split = _share(item // HEAD_BLOCKS, splits, ends, BLOCK_BATCH)
        length = tl.load(seq_lens + n)
        chunk = _chunk_of(length, CHUNK, SPLITS, ROWS)
        first = split * chunk
        last = tl.minimum(first + chunk, length)
        heads = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        mine = heads < tl.where(length > 0, HEADS, 0)
        query = q + n.to(tl.int64) * q_row + heads[None, :] * q_head
        q_latent = tl.load(query + ranks[:, None], mine[None, :] & (ranks[:, None] < RANK), 0.0)
        q_rope = tl.load(query + RANK + ropes[:, None], mine[None, :] & (ropes[:, None] < ROPE), 0.0)
        pages = table + n.to(tl.int64) * table_row
        top = tl.full([BLOCK_H], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
        # A tile's page is looked up while the tile before it is worked on.
        page = tl.load(pages + first // PAGE, first < last, 0)
        for at in tl.range(first, last, ROWS, num_stages=STAGES):
            live = at + rows < last
            if PAGE % ROWS == 0:
                entry = cache + page.to(tl.int64) * page_stride + at % PAGE * ENTRY + rows[:, None] * ENTRY
                page = tl.load(pages + (at + ROWS) // PAGE, at + ROWS < last, 0)
            else:
                position = at + rows
                page_of = tl.load(pages + position // PAGE, live, 0).to(tl.int64)
                entry = cache + (page_of * page_stride + position % PAGE * ENTRY)[:, None]
            latent = tl.load(entry + ranks[None, :], live[:, None] & (ranks[None, :] < RANK), 0.0).to(kind)
            rope = tl.load(entry + RANK + ropes[None, :], live[:, None] & (ropes[None, :] < ROPE), 0.0).to(kind)
            scores = tl.dot(latent, q_latent, input_precision="ieee")
            scores = tl.dot(rope, q_rope, scores, input_precision="ieee")
            scores = tl.where(live[:, None], scores * scale, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            weights = tl.exp2(scores - higher[None, :])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(weights, 0)
            if TWICE:
                turned = tl.load(tl.trans(entry) + ranks[:, None], live[None, :] & (ranks[:, None] < RANK), 0.0).to(
                    kind
                )
            else:
                turned = tl.trans(latent)
            acc = tl.dot(turned, weights.to(kind), acc * fade[None, :], input_precision="ieee")
            top = higher
        acc = acc / tl.where(total > 0, total, 1.0)[None, :]
        inside = (heads[None, :] < HEADS) & (ranks[:, None] < RANK)
        if length <= chunk:
            place = n.to(tl.int64) * HEADS * RANK + heads[None, :] * RANK + ranks[:, None]
            tl.store(out + place, acc.to(out.dtype.element_ty), inside)
        else:
            part = (n.to(tl.int64) * max_splits + split) * HEADS + heads
            tl.store(partial + part[None, :] * RANK + ranks[:, None], acc, inside)
            tl.store(lse + part, top + tl.log2(total), heads < HEADS)


@triton.jit
def _merge(
    partial, lse, seq_lens, out, max_splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Some channels of one head of one sequence: its chunks' results weighted by their sums of exponentials."""
    n, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    length = tl.load(seq_lens + n)
    chunk = _chunk_of(length, CHUNK, SPLITS, ROWS)
    if length > chunk:
        count = (length + chunk - 1) // chunk
        every, some = tl.arange(0, BLOCK_SPLITS), tl.arange(0, AT_ONCE)
        channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        first = n * max_splits * HEADS + h
        top = tl.max(tl.load(lse + first + every * HEADS, every < count, -float("inf")), 0)
        acc = tl.zeros([BLOCK_C], tl.float32)
        total = 0.0
        for at in range(0, count, AT_ONCE):
            part = first + (at + some) * HEADS
            there = at + some < count
            weights = tl.exp2(tl.load(lse + part, there, -float("inf")) - top)
            inside = there[:, None] & (channels[None, :] < RANK)
            values = tl.load(partial + part[:, None] * RANK + channels[None, :], inside, 0.0)
            total += tl.sum(weights, 0)
            acc += tl.sum(weights[:, None] * values, 0)
        place = (n * HEADS + h) * RANK + channels
        tl.store(out + place, (acc / total).to(out.dtype.element_ty), channels < RANK)


def mla_decode(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int, tiling: Tiling
) -> Tensor:
    """See the operator. The grid and the scratch follow from shapes alone."""
    count, heads, entry = q.shape
    out = torch.empty((count, heads, kv_lora), dtype=q.dtype, device=q.device)
    if not count:
        return out
    page, block_h = kv_cache.shape[1], tiling.heads
    max_splits = min(tiling.splits, triton.cdiv(page_table.shape[1] * page, tiling.chunk))
    partial, lse = out, out
    if max_splits > 1:
        partial = torch.empty((count, max_splits, heads, kv_lora), dtype=torch.float32, device=q.device)
        lse = torch.empty((count, max_splits, heads), dtype=torch.float32, device=q.device)
    block_r = max(triton.next_power_of_2(kv_lora), 16)
    items = count * max_splits * triton.cdiv(heads, block_h)
    upright, block_batch = block_h >= UPRIGHT, max(triton.next_power_of_2(count), LEAST_BATCH)
    shapes = (tiling.rows, tiling.chunk, tiling.splits, tiling.stages)
    (_attend_upright if upright else _attend)[(min(items, resident(q.device, tiling.per_sm)),)](
        q, kv_cache, page_table, seq_lens, out, partial, lse,
        q.stride(0), q.stride(1), kv_cache.stride(0), page_table.stride(0), count, scale * LOG2_E, max_splits,
        heads, kv_lora, entry - kv_lora, page,
        block_batch, block_h, block_r, max(triton.next_power_of_2(entry - kv_lora), 16),
        *(shapes if upright else (*shapes, tiling.twice)),
        num_warps=tiling.warps,
    )  # fmt: skip
    if max_splits > 1:
        block_c = min(block_r, 64)
        _merge[(count * heads, triton.cdiv(kv_lora, block_c))](
            partial, lse, seq_lens, out, max_splits,
            heads, kv_lora, block_c, triton.next_power_of_2(max_splits),
            MERGED_AT_ONCE, tiling.rows, tiling.chunk, tiling.splits,
            num_warps=2,
        )  # fmt: skip
    return out
