"""One token of KDA a sequence: a program takes one head of one sequence from its raw inputs to its result.

Its state is read once and written once. All channels of the convolution's history belong to exactly one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels._kda import at_most, convolve_token, gated, head_channels, log_decay


@triton.jit
def _kda_decode(
    qkv, raw_gate, beta_logits, out_gate, taps, rate, dt_bias, norm, conv_state, state, slots, out,
    qkv_stride, raw_gate_stride, beta_stride, out_gate_stride, conv_stride, state_stride, heads, lower_bound, eps,
    BOUNDED: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    at = tl.arange(0, DIM)
    blocks: tl.constexpr = DIM // ROWS
    split = tl.arange(0, blocks)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    out += (n * heads + h) * DIM
    if slot == 0:
        tl.store(out + at, tl.zeros([DIM], out.dtype.element_ty))
    else:
        rows = tl.arange(0, ROWS)
        state += slot * state_stride + h * DIM * DIM
        tile = state + rows[:, None] * DIM + at[None, :]
        # Asked for before anything else: the rest is done while it comes.
        old = tl.load(tile)
        qkv += n * qkv_stride
        history = conv_state + slot * conv_stride
        channels = 3 * heads * DIM
        # The history a token later, [WINDOW, 4, DIM]: all but its oldest row, then the raw input.
        mine = head_channels(h, heads, DIM)[None, :, :]
        place = tl.arange(0, WINDOW)[:, None, None]
        held = history + place * channels + mine
        kept = tl.load(held + channels, (place < WIDTH - 2) & (mine < channels), 0.0)
        added = tl.load(qkv + mine + place * 0, (place == WIDTH - 2) & (mine < channels), 0.0)
        q = convolve_token(qkv, history, taps, h * DIM + at, channels, WIDTH)
        k = convolve_token(qkv, history, taps, (heads + h) * DIM + at, channels, WIDTH)
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (1.0 / tl.sqrt_rn(DIM * 1.0))
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        raw = tl.load(raw_gate + n * raw_gate_stride + h * DIM + at)
        decay = tl.exp(log_decay(raw, tl.load(dt_bias + h * DIM + at), tl.load(rate + h), lower_bound, BOUNDED))
        beta = tl.sigmoid(tl.load(beta_logits + n * beta_stride + h).to(tl.float32))
        kq = tl.sum(k * q)
        read = tl.zeros([blocks, ROWS], tl.float32)
        for b in tl.static_range(blocks):
            # The next rows are on their way before these are stored: no load passes a store it might depend on.
            if b + 1 < blocks:
                coming = tl.load(tile + (b + 1) * ROWS * DIM)
            else:
                coming = old
            v = convolve_token(qkv, history, taps, (2 * heads + h) * DIM + b * ROWS + rows, channels, WIDTH)
            u = beta * (v - tl.sum(old * (decay * k)[None, :], 1))
            o = tl.sum(old * (decay * q)[None, :], 1) + u * kq
            tl.store(tile + b * ROWS * DIM, old * decay[None, :] + u[:, None] * k[None, :])
            read = tl.where(tl.arange(0, blocks)[:, None] == b, o[None, :], read)
            old = coming
        # Several threads may have read the same channel.
        tl.debug_barrier()
        moved = tl.where(place == WIDTH - 2, added, kept)
        tl.store(held, moved, (place < WIDTH - 1) & (mine < channels))
        gate = tl.load(out_gate + n * out_gate_stride + h * DIM + split)
        normed = gated(read, tl.sum(read * read), tl.load(norm + split), gate, eps, DIM)
        tl.store(out + split, normed.to(out.dtype.element_ty))


def kda_decode(
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
    lower_bound: float | None,
    eps: float,
    rows: int,
    warps: int,
    registers: int,
) -> Tensor:
    """See the operator. `taps` [W, C] and `rate` are prepared; the state goes by in blocks of `rows` rows."""
    count, heads, dim = raw_gate.shape
    out = torch.empty((count, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if count:
        width, rows = taps.shape[0], min(rows, dim)
        _kda_decode[(heads, count)](
            qkv, raw_gate, beta_logits, out_gate, taps, rate, dt_bias, norm_weight, conv_state, state, slots, out,
            qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0), out_gate.stride(0), conv_state.stride(0),
            state.stride(0), heads, lower_bound or 0.0, eps,
            lower_bound is not None, width, triton.next_power_of_2(width - 1), dim, rows,
            num_warps=min(warps, rows * dim // 128), **at_most(registers),
        )  # fmt: skip
    return out
