"""The steps of KDA each by itself: the gate, the convolution, one token of the recurrence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels._chunk_products import sequence_of
from k3hal.backends.triton.kernels._chunk_scan import gated_norm
from k3hal.backends.triton.kernels._kda import convolve_rows, log_decay
from k3hal.backends.triton.kernels.programs import jit_for_any

ROWS, CHANNELS, NORM_VALUES = 32, 128, 4096


@triton.jit
def _gate(
    raw_gate, beta_logits, rate, dt_bias, g, beta, raw_stride, beta_stride, heads, lower_bound,
    BOUNDED: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    live = at < DIM
    raw = tl.load(raw_gate + t * raw_stride + h * DIM + at, live, 0.0)
    bias = tl.load(dt_bias + h * DIM + at, live, 0.0)
    tl.store(g + (t * heads + h) * DIM + at, log_decay(raw, bias, tl.load(rate + h), lower_bound, BOUNDED), live)
    tl.store(beta + t * heads + h, tl.sigmoid(tl.load(beta_logits + t * beta_stride + h).to(tl.float32)))


def kda_gate(
    raw_gate: Tensor, beta_logits: Tensor, rate: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """See the operator. `rate` is prepared."""
    rows, heads, dim = raw_gate.shape
    g = torch.empty(raw_gate.shape, dtype=torch.float32, device=raw_gate.device)
    beta = torch.empty((rows, heads), dtype=torch.float32, device=raw_gate.device)
    if rows:
        _gate[(rows, heads)](
            raw_gate, beta_logits, rate, dt_bias, g, beta, raw_gate.stride(0), beta_logits.stride(0), heads,
            lower_bound or 0.0, lower_bound is not None, dim, triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return g, beta


@jit_for_any("count", "places", "tokens")
def _convolve(
    x, taps, history, slots, starts, known, out, x_stride, history_stride, count, places, tokens, channels,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS of one sequence, or of the padding after the last."""
    at, place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    if place >= places:
        rows = (tl.load(starts + count) + (place - places) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        tile = out + rows[:, None] * channels + at[None, :]
        tl.store(tile, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), (rows < tokens)[:, None])
    else:
        n = sequence_of(place, starts, count, ROWS)
        start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
        rows = (start + (place - start // ROWS - n) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        tile = out + rows[:, None] * channels + at[None, :]
        # A null slot's rows are none at all: its end is its start.
        used = tl.where(slot == 0, start, end)
        history += slot * history_stride
        has = tl.load(known + n).to(tl.int32)
        mixed = convolve_rows(x, x_stride, history, has, taps, at, rows, start, used, channels, WIDTH)
        tl.store(tile, mixed.to(out.dtype.element_ty), (rows < end)[:, None])


@triton.jit
def _move(
    x, history, slots, starts, known, x_stride, history_stride, channels,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Leave the last W - 1 raw inputs of BLOCK channels of one sequence in its slot, what it held included."""
    at, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :], tl.program_id(1)
    start, end, slot = tl.load(starts + n), tl.load(starts + n + 1), tl.load(slots + n).to(tl.int64)
    if (slot != 0) & (start < end):
        history += slot * history_stride
        has = tl.load(known + n).to(tl.int32)
        place = tl.arange(0, WINDOW)[:, None]
        t = (end - (WIDTH - 1) + place).to(tl.int64)
        live = (place < WIDTH - 1) & (at < channels)
        raw = tl.load(x + t * x_stride + at, live & (t >= start), 0.0)
        before = live & (t < start) & (t >= start - has * WIDTH)
        held = tl.load(history + (t - start + WIDTH - 1) * channels + at, before, 0.0)
        tl.debug_barrier()
        tl.store(history + place * channels + at, tl.where(t < start, held, raw), live)


def causal_conv1d(
    x: Tensor, taps: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """See the operator. `taps` [W, C] are the weights turned."""
    rows, channels = x.shape
    width, count, known = taps.shape[0], slots.shape[0], has_state.view(torch.uint8)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block, places = min(CHANNELS, channels & -channels), rows // ROWS + count
        _convolve[(channels // block, places + triton.cdiv(rows, ROWS))](
            x, taps, conv_state, slots, cu_seqlens, known, out, x.stride(0), conv_state.stride(0), count, places,
            rows, channels, width, ROWS, block, num_warps=4,
        )  # fmt: skip
        _move[(triton.cdiv(channels, CHANNELS), count)](
            x, conv_state, slots, cu_seqlens, known, x.stride(0), conv_state.stride(0), channels,
            width, triton.next_power_of_2(width - 1), CHANNELS, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _step(
    q, k, v, g, beta, state, slots, out, q_stride, k_stride, v_stride, g_stride, beta_stride, state_stride, heads,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of one head's state take one token in."""
    part, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    at, rows = h * DIM + tl.arange(0, DIM), part * ROWS + tl.arange(0, ROWS)
    out += (n * heads + h) * DIM + rows
    if slot == 0:
        tl.store(out, tl.zeros([ROWS], out.dtype.element_ty))
    else:
        tile = state + slot * state_stride + (h * DIM + rows)[:, None] * DIM + tl.arange(0, DIM)[None, :]
        old = tl.load(tile)
        ask = tl.load(q + n * q_stride + at).to(tl.float32)
        key = tl.load(k + n * k_stride + at).to(tl.float32)
        ask *= tl.rsqrt(tl.sum(ask * ask) + 1e-6) * (1.0 / tl.sqrt_rn(DIM * 1.0))
        key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
        decayed = old * tl.exp(tl.load(g + n * g_stride + at))[None, :]
        value = tl.load(v + n * v_stride + h * DIM + rows).to(tl.float32)
        u = tl.load(beta + n * beta_stride + h) * (value - tl.sum(decayed * key[None, :], 1))
        new = decayed + u[:, None] * key[None, :]
        tl.store(tile, new)
        tl.store(out, tl.sum(new * ask[None, :], 1).to(out.dtype.element_ty))


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, rows: int
) -> Tensor:
    """See the operator. A program takes `rows` rows of a state."""
    count, heads, dim = v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if count:
        rows = min(rows, dim)
        _step[(dim // rows, heads, count)](
            q, k, v, g, beta, state, slots, out, *(x.stride(0) for x in (q, k, v, g, beta, state)), heads, dim, rows,
            num_warps=min(4, rows * dim // 128),
        )  # fmt: skip
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the operator."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total, dim = x.shape[0] * x.shape[1], x.shape[2]
    if total:
        padded = triton.next_power_of_2(dim)
        rows = max(1, NORM_VALUES // padded)
        gated_norm[(triton.cdiv(total, rows),)](
            x, gate, weight, out, x.stride(0), gate.stride(0), total, x.shape[1], eps,
            False, dim, padded, rows, num_warps=4,
        )  # fmt: skip
    return out
