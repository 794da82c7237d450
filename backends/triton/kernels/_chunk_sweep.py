"""The states of KDA from chunk to chunk over the operands of `_chunk_operands`, a whole head's state a program.

A state is held as it lies in its slot, [V, K]: its rows are independent of each other, so that of a product's two
operands the left one never leaves its warp. Long sequences are cut into segments: `chunk_sweep` without `READ` finds
what each segment adds to a state and what it makes of one (`carry`), `join_segments` the states they begin with.

Half precision holds a state times a power of two, chosen for all of a segment: a token moves a state by at most the
size of its correction, and decay and correction together never make it larger.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3hal.backends.triton.kernels._chunk_operands import READ_SCALE, binade
from k3hal.backends.triton.kernels._chunk_products import sequence_of
from k3hal.backends.triton.kernels._chunk_scan import _clear
from k3hal.backends.triton.kernels._kda import gated, move_history
from k3hal.backends.triton.kernels.programs import jit_for_any


@triton.jit
def _scale(held, sizes, first, last, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """The power of two that takes a state, and all that chunks [first, last) make of it, below 2^15."""
    total = 0.0
    for some in range(first, last, 128):
        at = some + tl.arange(0, 128)
        total += tl.sum(tl.load(sizes + at, at < last, 0.0))
    peak = tl.max(tl.max(tl.abs(held), 1), 0)
    # A column's norm is at most root DIM times its largest; a correction is below twice its size.
    return 16384.0 / binade(DIM * peak + 2 * CHUNK * total)


@jit_for_any("count", "tokens", "segments")
def chunk_sweep(
    w, u, q, n_, m, keep, sizes, state, slots, starts, known, begins, carry, qkv, conv_state, out_gate, norm, out,
    state_stride, qkv_stride, conv_stride, gate_stride, count, tokens, heads, segments, length, places, eps,
    READ: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One segment of one head; `length` tokens a segment, the whole sequence where not `SPLIT`. With `READ` from its
    first state to the results, and to the slot at the sequence's end; what comes after the last sequence is padding.
    Else from zero, and (program 1 of axis 2) from the unit matrix without any corrections, to `carry`."""
    h, segment, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if segment == segments:
        if READ:
            _clear(out, tl.load(starts + count), tokens, heads, h * DIM + tl.arange(0, DIM), CHUNK, DIM)
    else:
        n = segment
        if SPLIT:
            n = sequence_of(segment, starts, count, length)
        start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
        begin, until = start, end
        if SPLIT:
            begin = start + (segment - start // length - n) * length
            until = tl.minimum(begin + length, end)
        wanted = begin < until
        if not READ:
            wanted = wanted & (until < end)
        if wanted & (slot == 0):
            if READ:
                _clear(out, begin, until, heads, h * DIM + tl.arange(0, DIM), CHUNK, DIM)
        elif wanted:
            has = tl.load(known + n).to(tl.int32)
            value, at = tl.arange(0, DIM)[:, None], tl.arange(0, DIM)[None, :]
            square = value * DIM + at
            own = state + slot * state_stride + h * DIM * DIM + square
            mine = (segment.to(tl.int64) * heads + h) * DIM * DIM
            if READ:
                if until == end:
                    history = conv_state + slot * conv_stride
                    move_history(qkv, qkv_stride, history, has, start, end, h, heads, WIDTH, WINDOW, DIM)
                held = tl.load(own, value < has * DIM, 0.0)
                if SPLIT:
                    if end - start > length:
                        held = tl.load(begins + mine + square)
            else:
                held = tl.where((value == at) & (part == 1), 1.0, 0.0)
            chunk, in_chunk = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
            place = (start // CHUNK + n + (begin - start) // CHUNK).to(tl.int64)
            sizes += h * places
            scale = _scale(held, sizes, place, place + tl.cdiv(until - begin, CHUNK), CHUNK, DIM)
            added_scale = scale / READ_SCALE
            if not READ:
                added_scale = tl.where(part == 1, 0.0, added_scale)
            held *= scale
            read_scale = 1.0 / (tl.sqrt_rn(DIM * 1.0) * READ_SCALE * scale)
            for first in tl.range(begin, until, CHUNK, num_stages=STAGES):
                base = (place * heads + h) * CHUNK
                half = held.to(tl.float16)
                more = tl.load(u + base * DIM + value * CHUNK + in_chunk).to(tl.float32)
                keys = tl.load(w + base * DIM + chunk * DIM + at)
                added = (more * (tl.load(sizes + place) * added_scale) - tl.dot(half, tl.trans(keys))).to(tl.float16)
                kept = tl.load(keep + base // CHUNK * DIM + at)
                held = tl.dot(added, tl.load(n_ + base * DIM + chunk * DIM + at), held * kept)
                if READ:
                    asks = tl.load(q + base * DIM + chunk * DIM + at)
                    pairs = tl.load(m + base * CHUNK + chunk * CHUNK + in_chunk)
                    read = tl.trans(tl.dot(added, tl.trans(pairs), tl.dot(half, tl.trans(asks)))) * read_scale
                    rows = (first + tl.arange(0, CHUNK)).to(tl.int64)
                    live = (rows < until)[:, None]
                    gate = tl.load(out_gate + rows[:, None] * gate_stride + h * DIM + at, live, 0.0)
                    square_sum = tl.sum(read * read, 1)[:, None]
                    normed = gated(read, square_sum, tl.load(norm + at), gate, eps, DIM)
                    to = out + rows[:, None] * heads * DIM + h * DIM + at
                    tl.store(to, normed.to(out.dtype.element_ty), live)
                place += 1
            held *= 1.0 / scale
            if not READ:
                tl.store(carry + 2 * mine + part * DIM * DIM + square, held)
            elif until == end:
                tl.store(own, held)


@jit_for_any("count")
def join_segments(
    state, slots, starts, known, carry, begins, state_stride, count, heads, length,
    DIM: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """ROWS of the state one head of one sequence has at the start of each segment, where there is more than one."""
    part, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
    if (slot != 0) & (end - start > length):
        value, key = part * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[:, None]
        at = tl.arange(0, DIM)[None, :]
        has = tl.load(known + n).to(tl.int32)
        held = tl.load(state + slot * state_stride + (h * DIM + value) * DIM + at, value < has * DIM, 0.0)
        segment = (start // length + n).to(tl.int64)
        for begin in range(start, end, length):
            mine = (segment * heads + h) * DIM * DIM
            tl.store(begins + mine + value * DIM + at, held)
            if begin + length < end:
                turned = tl.load(carry + 2 * mine + DIM * DIM + key * DIM + at)
                held = tl.dot(held, turned, tl.load(carry + 2 * mine + value * DIM + at), input_precision=EXACT)
            segment += 1
