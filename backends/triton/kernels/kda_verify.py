"""Draft tokens of KDA: read from a state that stays as it was, then the accepted ones put into it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels._kda import at_most, gated, head_channels, log_decay, sigmoid

ROWS = 32


@triton.jit
def _mixed(x, x_stride, history, taps, at, t, limit, channels, WIDTH: tl.constexpr):
    """The convolution of channels `at` of draft token `t`, with SiLU, rounded to the activation dtype."""
    mixed = tl.zeros(at.shape, tl.float32)
    for j in tl.static_range(WIDTH):
        place = t + j
        drafted = place >= WIDTH - 1
        raw = tl.load(x + (place - (WIDTH - 1)) * x_stride + at, at < tl.where(drafted, channels, 0), 0.0)
        held = tl.load(history + place * channels + at, at < tl.where(drafted, 0, limit), 0.0)
        mixed += (raw.to(tl.float32) + held.to(tl.float32)) * tl.load(taps + j * channels + at)
    return (mixed * sigmoid(mixed)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _verify(
    qkv, raw_gate, beta_logits, out_gate, taps, rate, dt_bias, norm, conv_state, state, slots, out, u_out, k_out,
    qkv_stride, raw_gate_stride, beta_stride, out_gate_stride, conv_stride, state_stride, heads, drafts,
    lower_bound, eps, BOUNDED: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, token by token."""
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    at, value = tl.arange(0, DIM), tl.arange(0, DIM)[:, None]
    channels = 3 * heads * DIM
    limit = tl.where(slot == 0, 0, channels)
    tile = state + slot * state_stride + h * DIM * DIM + value * DIM + at[None, :]
    held = tl.load(tile, value < limit, 0.0)
    live = at < limit
    first = n * drafts
    qkv += first * qkv_stride
    history = conv_state + slot * conv_stride
    scale, bias, weight = tl.load(rate + h), tl.load(dt_bias + h * DIM + at), tl.load(norm + at)
    for t in range(drafts):
        row = first + t
        q = _mixed(qkv, qkv_stride, history, taps, h * DIM + at, t, limit, channels, WIDTH)
        k = _mixed(qkv, qkv_stride, history, taps, (heads + h) * DIM + at, t, limit, channels, WIDTH)
        v = _mixed(qkv, qkv_stride, history, taps, (2 * heads + h) * DIM + at, t, limit, channels, WIDTH)
        to = (row * heads + h) * DIM + at
        tl.store(k_out + to, tl.where(live, k, 0.0).to(k_out.dtype.element_ty))
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (1.0 / tl.sqrt_rn(DIM * 1.0))
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        raw = tl.load(raw_gate + row * raw_gate_stride + h * DIM + at)
        held *= tl.exp(log_decay(raw, bias, scale, lower_bound, BOUNDED))[None, :]
        beta = tl.sigmoid(tl.load(beta_logits + row * beta_stride + h).to(tl.float32))
        u = beta * (v - tl.sum(held * k[None, :], 1))
        tl.store(u_out + to, tl.where(live, u, 0.0))
        held += u[:, None] * k[None, :]
        read = tl.sum(held * q[None, :], 1)
        gate = tl.load(out_gate + row * out_gate_stride + h * DIM + at)
        normed = gated(read, tl.sum(read * read), weight, gate, eps, DIM)
        tl.store(out + to, tl.where(live, normed, 0.0).to(out.dtype.element_ty))


def kda_verify(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    taps: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    drafts: int,
    lower_bound: float | None,
    eps: float,
    warps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the operator. `taps` [W, C] and `rate` are prepared; `drafts` is its `width`."""
    rows, heads, dim = raw_gate.shape
    count, device = slots.shape[0], qkv.device
    each = (count, drafts)
    out = torch.empty((rows, heads * dim), dtype=qkv.dtype, device=device)
    u = torch.empty((*each, heads, dim), dtype=torch.float32, device=device)
    k = torch.empty((*each, heads, dim), dtype=qkv.dtype, device=device)
    if rows:
        _verify[(heads, count)](
            qkv, raw_gate, beta_logits, out_gate, taps, rate, dt_bias, norm_weight, conv_state, state, slots,
            out, u, k,
            qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0), out_gate.stride(0), conv_state.stride(0),
            state.stride(0), heads, drafts, lower_bound or 0.0, eps,
            lower_bound is not None, taps.shape[0], dim,
            num_warps=min(warps, dim * dim // 128), **at_most(255, device),
        )  # fmt: skip
    return out, u, k, raw_gate.unflatten(0, each), qkv.unflatten(0, each)


@triton.jit
def _commit(
    u, k, raw_gate, conv_in, accepted, rate, dt_bias, conv_state, state, slots,
    gate_step, gate_stride, conv_in_step, conv_in_stride, conv_stride, state_stride, heads, drafts, lower_bound,
    BOUNDED: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of one head's state take the accepted tokens in; the first of these programs moves the history on. A step
    is from sequence to sequence, a stride from token to token."""
    part, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, count = tl.load(slots + n).to(tl.int64), tl.load(accepted + n)
    if (slot != 0) & (count > 0):
        at, value = tl.arange(0, DIM), part * ROWS + tl.arange(0, ROWS)
        tile = state + slot * state_stride + (h * DIM + value)[:, None] * DIM + at[None, :]
        held = tl.load(tile)
        scale, bias = tl.load(rate + h), tl.load(dt_bias + h * DIM + at)
        raw_gate += n * gate_step + h * DIM
        for t in range(count):
            row = ((n * drafts + t) * heads + h) * DIM
            key = tl.load(k + row + at).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
            decay = tl.exp(log_decay(tl.load(raw_gate + t * gate_stride + at), bias, scale, lower_bound, BOUNDED))
            held = held * decay[None, :] + tl.load(u + row + value)[:, None] * key[None, :]
        tl.store(tile, held)
        if part == 0:
            channels = 3 * heads * DIM
            mine = head_channels(h, heads, DIM)[None, :, :]
            place = tl.arange(0, WINDOW)[:, None, None]
            history = conv_state + slot * conv_stride
            # Of the history followed by what was accepted, the last W - 1.
            old = place + count
            there = (place < WIDTH - 1) & (mine < channels)
            kept = tl.load(history + old * channels + mine, there & (old < WIDTH - 1), 0.0)
            new = conv_in + n * conv_in_step + (old - (WIDTH - 1)) * conv_in_stride + mine
            added = tl.load(new, there & (old >= WIDTH - 1), 0.0)
            # Several threads may read the same channel.
            tl.debug_barrier()
            tl.store(history + place * channels + mine, tl.where(old < WIDTH - 1, kept, added), there)


def kda_commit(
    u: Tensor,
    k: Tensor,
    raw_gate: Tensor,
    conv_in: Tensor,
    accepted: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: float | None,
) -> None:
    """See the operator. `rate` is prepared."""
    count, drafts, heads, dim = k.shape
    width, rows = conv_state.shape[1] + 1, min(ROWS, dim)
    if count:
        _commit[(dim // rows, heads, count)](
            u, k, raw_gate, conv_in, accepted, rate, dt_bias, conv_state, state, slots,
            raw_gate.stride(0), raw_gate.stride(1), conv_in.stride(0), conv_in.stride(1), conv_state.stride(0),
            state.stride(0), heads, drafts, lower_bound or 0.0,
            lower_bound is not None, width, triton.next_power_of_2(width - 1), dim, rows,
            num_warps=min(4, rows * dim // 128),
        )  # fmt: skip
