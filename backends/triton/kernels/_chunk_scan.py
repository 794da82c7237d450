"""The states of KDA from chunk to chunk, and what the chunks read of them."""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._chunk_products import dot_stored
from k3hal.backends.triton.kernels._kda import gated, move_history
from k3hal.backends.triton.kernels.programs import jit_for_any


@triton.jit
def _clear(out, first, end, heads, column, ROWS: tl.constexpr, DIM: tl.constexpr):
    for start in range(first, end, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        tile = out + rows[:, None] * heads * DIM + column[None, :]
        tl.store(tile, tl.zeros([ROWS, column.shape[0]], out.dtype.element_ty), (rows < end)[:, None])


@jit_for_any("count", "tokens")
def chunk_scan(
    w, u, q, n_, m, keep, state, slots, starts, known, qkv, conv_state, out_gate, norm, out,
    state_stride, qkv_stride, conv_stride, gate_stride, count, tokens, heads, eps,
    FUSED: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, READ: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """COLUMNS values of one head's state through one sequence; what comes after the last sequence is padding.

    The state is held as [K, V]. `FUSED` moves the history of the convolution on, `NORM` ends in the gated norm.
    """
    part, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at, column = tl.arange(0, DIM), part * COLUMNS + tl.arange(0, COLUMNS)
    if n == count:
        _clear(out, tl.load(starts + count), tokens, heads, h * DIM + column, CHUNK, DIM)
    else:
        start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
        if slot == 0:
            _clear(out, start, end, heads, h * DIM + column, CHUNK, DIM)
        elif start < end:
            has = tl.load(known + n).to(tl.int32)
            if FUSED:
                if part == 0:
                    history = conv_state + slot * conv_stride
                    move_history(qkv, qkv_stride, history, has, start, end, h, heads, WIDTH, WINDOW, DIM)
            own = state + slot * state_stride + h * DIM * DIM + column[None, :] * DIM + at[:, None]
            held = tl.load(own, (at < has * DIM)[:, None], 0.0)
            row, in_chunk = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
            place = (start // CHUNK + n).to(tl.int64)
            # Cast as a function: of arguments that are 1 the compiler makes constants, which have no methods.
            size = tl.cast(tokens // CHUNK + count, tl.int64) * heads * CHUNK
            for first in tl.range(start, end, CHUNK, num_stages=STAGES):
                base = (place * heads + h) * CHUNK
                tile = base * DIM + row * DIM + at[None, :]
                mine = base * DIM + row * DIM + column[None, :]
                pairs = base * CHUNK + row * CHUNK + in_chunk
                added = tl.load(u + mine) - dot_stored(w, size * DIM, tile, held, False, WIDE)
                read = dot_stored(q, 0, tile, held, False, READ) + dot_stored(m, 0, pairs, added, False, READ)
                read *= 1.0 / tl.sqrt_rn(DIM * 1.0)
                decay = tl.load(keep + base // CHUNK * DIM + at)
                held = held * decay[:, None] + dot_stored(n_, size * DIM, tile, added, True, WIDE)
                rows = (first + tl.arange(0, CHUNK)).to(tl.int64)
                live = (rows < end)[:, None]
                if NORM:
                    gate = tl.load(out_gate + rows[:, None] * gate_stride + h * DIM + column[None, :], live, 0.0)
                    square_sum = tl.sum(read * read, 1)[:, None]
                    read = gated(read, square_sum, tl.load(norm + column)[None, :], gate, eps, DIM)
                tl.store(
                    out + rows[:, None] * heads * DIM + h * DIM + column[None, :],
                    read.to(out.dtype.element_ty), live,
                )  # fmt: skip
                place += 1
            tl.store(own, held)


@jit_for_any("total")
def gated_norm(
    o, gate, norm, out, o_stride, gate_stride, total, heads, eps,
    LIVE_ONLY: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of the heads [T * H, V]. `LIVE_ONLY` keeps rows of zeros what they are, whatever their gates."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, PADDED)
    live = (rows < total)[:, None] & (at < DIM)[None, :]
    token, h = rows // heads, rows % heads
    x = tl.load(o + (token * o_stride + h * DIM)[:, None] + at[None, :], live, 0.0).to(tl.float32)
    z = tl.load(gate + (token * gate_stride + h * DIM)[:, None] + at[None, :], live, 0.0)
    square_sum = tl.sum(x * x, 1)[:, None]
    normed = gated(x, square_sum, tl.load(norm + at, at < DIM, 0.0)[None, :], z, eps, DIM)
    if LIVE_ONLY:
        normed = tl.where(square_sum == 0.0, 0.0, normed)
    tl.store(out + rows[:, None] * DIM + at[None, :], normed.to(out.dtype.element_ty), live)
