"""MLA prefill: keys and values of a window of positions expanded from the latents, then attended to.

Windows bound the scratch whatever the context. How many there are follows from shapes alone: one too many costs
launches whose programs end at once. The running softmax passes from one to the next in fp32, which changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels.programs import jit_for_any, shared_memory

LOG2_E = 1.4426950408889634
EXPAND_ROWS, EXPAND_DEPTH = 128, 64
EXPAND_SHARED = 96 << 10
"""What three stages of that take; gfx942 has 64 KiB, and two stages."""
LEAST_BATCH = 64
"""Bounds of sequences that the smallest kernel is made for: all smaller batches share it."""
EXACT = 64
"""Values of a sequence's first positions are kept in two parts of 16 bits. Queries that see few positions give the
largest outputs, which would be rounded twice: as values, and as the mean of hardly more than one."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """`queries` by `keys` is a tile of scores; `scratch` is how many bytes the expanded keys and values may take."""

    queries: int
    keys: int
    warps: int
    stages: int
    scratch: int


@jit_for_any("table_row")
def _expand(
    cache, table, cu_seqlens, context_lens, w_uk, w_uv, keys, values, ropes, rest,
    page_stride, table_row, uk_head, uk_row, uk_column, uv_head, uv_row, uv_column, begin, window, key_head, value_head,
    RANK: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, PAGE: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Keys and values `[h, n * window + i]` of cached row `begin + i` of sequence n, for some i and one h, and ropes.

    What rounding takes from the values of the first `EXACT` positions goes to `rest`.
    """
    h, n = tl.program_id(0).to(tl.int64), tl.program_id(2)
    new = tl.load(cu_seqlens + n + 1) - tl.load(cu_seqlens + n)
    length = tl.load(context_lens + n) + new
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    position = begin + within
    if (new > 0) & (begin + tl.program_id(1) * ROWS < length):
        live = (position < length) & (within < window)
        page = tl.load(table + n.to(tl.int64) * table_row + position // PAGE, live, 0).to(tl.int64)
        entry = cache + (page * page_stride + position % PAGE * (RANK + ROPE))[:, None]
        kind = keys.dtype.element_ty
        channels, ranks = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, DEPTH)
        value_channels = tl.arange(0, BLOCK_V)[None, :]
        from_uk = w_uk + h * uk_head + channels * uk_row
        from_uv = w_uv + h * uv_head + value_channels * uv_row
        key, value = tl.zeros([ROWS, BLOCK_D], tl.float32), tl.zeros([ROWS, BLOCK_V], tl.float32)
        for at in range(0, RANK, DEPTH):
            rank = at + ranks
            there = rank[:, None] < RANK
            latent = tl.load(entry + rank[None, :], live[:, None] & (rank[None, :] < RANK), 0.0).to(kind)
            up = tl.load(from_uk + rank[:, None] * uk_column, (channels < NOPE) & there, 0.0)
            key = tl.dot(latent, up, key, input_precision="ieee")
            up = tl.load(from_uv + rank[:, None] * uv_column, (value_channels < VALUE) & there, 0.0)
            value = tl.dot(latent, up, value, input_precision="ieee")
        row = (n.to(tl.int64) * window + within)[:, None]
        tl.store(keys + h * key_head + row * NOPE + channels, key.to(kind), live[:, None] & (channels < NOPE))
        rounded = value.to(kind)
        place = h * value_head + row * VALUE + value_channels
        tl.store(values + place, rounded, live[:, None] & (value_channels < VALUE))
        if begin + tl.program_id(1) * ROWS < EXACT:
            place = ((h * tl.num_programs(2) + n) * EXACT + position)[:, None] * VALUE + value_channels
            inside = (live & (position < EXACT))[:, None] & (value_channels < VALUE)
            tl.store(rest + place, (value - rounded.to(tl.float32)).to(kind), inside)
        if h == 0:
            rope_channels = tl.arange(0, BLOCK_P)[None, :]
            inside = live[:, None] & (rope_channels < ROPE)
            rope = tl.load(entry + RANK + rope_channels, inside)
            tl.store(ropes + row * ROPE + rope_channels, rope.to(kind), inside)


@triton.jit
def _tiles(
    acc, total, top, query, query_rope, keys, ropes, values, first, last, begin, sees, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The running softmax of a block of queries over positions [first, last), by tiles of KEYS."""
    columns, channels = tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    rope_channels, value_channels = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    for at in tl.range(first, last, KEYS, num_stages=STAGES):
        row = (at - begin + columns)[:, None]
        key_mask, rope_mask = channels[None, :] < NOPE, rope_channels[None, :] < ROPE
        value_mask = value_channels[None, :] < VALUE
        if MASKED:
            there = (at + columns < last)[:, None]
            key_mask, rope_mask, value_mask = key_mask & there, rope_mask & there, value_mask & there
        key = tl.load(keys + row * NOPE + channels[None, :], key_mask, 0.0)
        rope = tl.load(ropes + row * ROPE + rope_channels[None, :], rope_mask, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.dot(query_rope, tl.trans(rope), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where((at + columns)[None, :] < sees[:, None], scores, -float("inf"))
        # Scaled once the maximum is known: a multiplication and the subtraction are one instruction.
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        value = tl.load(values + row * VALUE + value_channels[None, :], value_mask, 0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@triton.jit
def _add_rest(
    acc, top, query, query_rope, keys, ropes, rest, last, sees, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds what rounding took from the values of the first positions."""
    row, channels = tl.arange(0, EXACT), tl.arange(0, BLOCK_D)
    rope_channels, value_channels = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    there = (row < last)[:, None]
    key = tl.load(keys + row[:, None] * NOPE + channels[None, :], there & (channels[None, :] < NOPE), 0.0)
    inside = there & (rope_channels[None, :] < ROPE)
    rope = tl.load(ropes + row[:, None] * ROPE + rope_channels[None, :], inside, 0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = tl.dot(query_rope, tl.trans(rope), scores, input_precision="ieee") * scale
    weights = tl.exp2(tl.where(row[None, :] < sees[:, None], scores, -float("inf")) - top[:, None])
    inside = there & (value_channels[None, :] < VALUE)
    value = tl.load(rest + row[:, None] * VALUE + value_channels[None, :], inside, 0.0)
    return tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")


@jit_for_any("count", "tokens")
def _attend(
    q, keys, ropes, values, rest, cu_seqlens, context_lens, out, state, state_total, state_top,
    q_row, q_head, key_head, value_head, count, tokens, begin, window, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, FIRST: tl.constexpr,
    EXACT: tl.constexpr, BLOCK_BATCH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head of a block of one sequence's queries over the window [begin, begin + window) of its positions."""
    batch, h = tl.arange(0, BLOCK_BATCH), tl.program_id(1)
    # Rows of padding are one more sequence, which sees nothing and so gets its zeros.
    starts = tl.load(cu_seqlens + batch, batch <= count, 0)
    stops = tl.where(batch < count, tl.load(cu_seqlens + batch + 1, batch < count, 0), tokens)
    blocks = tl.where(batch <= count, (stops - starts + QUERIES - 1) // QUERIES, 0)
    ends = tl.cumsum(blocks, 0)
    # The blocks that see most come first, so that none of them is left over for the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if block < tl.sum(blocks, 0):
        n = tl.sum((ends <= block).to(tl.int32), 0)
        start = tl.load(cu_seqlens + n)
        stop = tokens
        context = 0
        if n < count:
            stop = tl.load(cu_seqlens + n + 1)
            context = tl.load(context_lens + n)
        index = (block - tl.sum(tl.where(batch < n, blocks, 0), 0)) * QUERIES
        i = index + tl.arange(0, QUERIES)
        live, token = start + i < stop, (start + i).to(tl.int64)
        real = start + i < tl.where(n < count, stop, 0)
        sees = tl.where(real, context + i + 1, 0)
        limit = tl.max(sees, 0)
        if FIRST or limit > begin:
            channels, rope_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
            value_channels = tl.arange(0, BLOCK_V)
            from_q = q + token[:, None] * q_row + h * q_head
            query = tl.load(from_q + channels[None, :], real[:, None] & (channels[None, :] < NOPE), 0.0)
            inside = real[:, None] & (rope_channels[None, :] < ROPE)
            query_rope = tl.load(from_q + NOPE + rope_channels[None, :], inside, 0.0)
            inside = live[:, None] & (value_channels[None, :] < VALUE)
            place = (token * HEADS + h)[:, None] * VALUE + value_channels[None, :]
            if FIRST:
                acc = tl.zeros([QUERIES, BLOCK_V], tl.float32)
                total = tl.zeros([QUERIES], tl.float32)
                # A row without any position keeps its zeros: no difference of infinities.
                top = tl.where(real, -float("inf"), 0.0)
            else:
                acc = tl.load(state + place, inside, 0.0)
                total = tl.load(state_total + token * HEADS + h, live, 0.0)
                top = tl.load(state_top + token * HEADS + h, live, 0.0)
            row = n.to(tl.int64) * window
            keys += h.to(tl.int64) * key_head + row * NOPE
            values += h.to(tl.int64) * value_head + row * VALUE
            ropes += row * ROPE
            last = tl.minimum(limit, begin + window)
            # Whole tiles that the first query of the block sees need no mask.
            whole = tl.minimum(tl.where(limit > 0, context + index + 1, 0), last) // KEYS * KEYS
            whole = tl.maximum(whole, begin)
            acc, total, top = _tiles(
                acc, total, top, query, query_rope, keys, ropes, values, begin, whole, begin, sees, scale,
                NOPE, ROPE, VALUE, False, BLOCK_D, BLOCK_P, BLOCK_V, KEYS, STAGES,
            )  # fmt: skip
            acc, total, top = _tiles(
                acc, total, top, query, query_rope, keys, ropes, values, whole, last, begin, sees, scale,
                NOPE, ROPE, VALUE, True, BLOCK_D, BLOCK_P, BLOCK_V, KEYS, STAGES,
            )  # fmt: skip
            if FIRST and EXACT > 0:
                if (n < count) & (context + index < EXACT):
                    rest += (h.to(tl.int64) * count + n) * (EXACT * VALUE)
                    acc = _add_rest(
                        acc, top, query, query_rope, keys, ropes, rest, last, sees, scale,
                        NOPE, ROPE, VALUE, EXACT, BLOCK_D, BLOCK_P, BLOCK_V,
                    )  # fmt: skip
            if limit <= begin + window:
                acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                tl.store(out + place, acc.to(out.dtype.element_ty), inside)
            else:
                tl.store(state + place, acc, inside)
                tl.store(state_total + token * HEADS + h, total, live)
                tl.store(state_top + token * HEADS + h, top, live)


def _block(size: int) -> int:
    return max(triton.next_power_of_2(size), 16)


def window_rows(positions: int, row_bytes: int, scratch: int) -> int:
    """Positions of every sequence that are expanded at once: all, or as many whole blocks as `scratch` bytes take."""
    rows = max(scratch // row_bytes // EXPAND_ROWS, 1) * EXPAND_ROWS
    return min(triton.cdiv(positions, EXPAND_ROWS) * EXPAND_ROWS, rows)


def mla_prefill(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, cu_seqlens: Tensor, context_lens: Tensor,
    w_uk: Tensor, w_uv: Tensor, scale: float, tiling: Tiling,
) -> Tensor:  # fmt: skip
    """See the operator. Grids, windows and scratch follow from shapes alone."""
    (tokens, heads, width), (nope, rank), value = q.shape, w_uk.shape[1:], w_uv.shape[1]
    count, rope, page = context_lens.shape[0], width - nope, kv_cache.shape[1]
    out = torch.empty((tokens, heads, value), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    positions = page_table.shape[1] * page
    row_bytes = max(count, 1) * (heads * (nope + value) + rope) * q.element_size()
    window = window_rows(positions, row_bytes, tiling.scratch)
    rows = count * window
    keys, values, ropes = (
        torch.empty(heads * rows * nope, dtype=q.dtype, device=q.device),
        torch.empty(heads * rows * value, dtype=q.dtype, device=q.device),
        torch.empty(rows * rope, dtype=q.dtype, device=q.device),
    )
    exact = 0 if q.dtype == torch.float32 else EXACT
    rest = torch.empty(heads * count * exact * value, dtype=q.dtype, device=q.device) if exact else values
    state, total, top = out, out, out
    if positions > window:
        state = torch.empty(out.shape, dtype=torch.float32, device=q.device)
        total, top = torch.empty((2, tokens, heads), dtype=torch.float32, device=q.device)
    narrow = q.dtype == torch.float32
    expand_rows = 16 if narrow else EXPAND_ROWS
    expand_stages = 3 if shared_memory(q.device) >= EXPAND_SHARED else 2
    expand_grid = (heads, triton.cdiv(window, expand_rows), count)
    for begin in range(0, positions, window):
        _expand[expand_grid](
            kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, keys, values, ropes, rest,
            kv_cache.stride(0), page_table.stride(0), *w_uk.stride(), *w_uv.stride(), begin, window,
            rows * nope, rows * value, rank, rope, nope, value, page, exact,
            _block(nope), _block(rope), _block(value), expand_rows, 16 if narrow else EXPAND_DEPTH,
            num_warps=4 if narrow else 8, num_stages=1 if narrow else expand_stages,
        )  # fmt: skip
        _attend[(tokens // tiling.queries + count + 1, heads)](
            q, keys, ropes, values, rest, cu_seqlens, context_lens, out, state, total, top,
            q.stride(0), q.stride(1), rows * nope, rows * value, count, tokens, begin, window, scale * LOG2_E,
            heads, nope, rope, value, begin == 0, exact,
            max(triton.next_power_of_2(count + 1), LEAST_BATCH), _block(nope), _block(rope), _block(value),
            tiling.queries, tiling.keys, tiling.stages,
            num_warps=tiling.warps,
        )  # fmt: skip
    return out
