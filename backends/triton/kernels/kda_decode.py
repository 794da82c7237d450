"""One token of KDA a sequence: a program takes one head of one sequence from its raw inputs to its result.

Its state is read once and written once. All channels of the convolution's history belong to exactly one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels._kda import at_most, gated, head_channels, log_decay, sigmoid


@triton.jit
def _mixed(x, history, taps, at, live, channels, WIDTH: tl.constexpr):
    """The convolution of one token's channels `at`, with SiLU, rounded to the activation dtype."""
    mixed = tl.load(x + at).to(tl.float32) * tl.load(taps + (WIDTH - 1) * channels + at)
    for j in tl.static_range(WIDTH - 1):
        mixed += tl.load(history + j * channels + at, live, 0.0).to(tl.float32) * tl.load(taps + j * channels + at)
    return (mixed * sigmoid(mixed)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _kda_decode(
    qkv, raw_gate, beta_logits, out_gate, taps, rate, dt_bias, norm, conv_state, state, slots, out,
    qkv_stride, raw_gate_stride, beta_stride, out_gate_stride, conv_stride, state_stride, heads, lower_bound, eps,
    BOUNDED: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """A row of the null slot takes the same way, with nothing read from its slot and nothing written to it."""
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + n).to(tl.int64)
    at, value = tl.arange(0, DIM), tl.arange(0, DIM)[:, None]
    limit = tl.where(slot == 0, 0, DIM)
    live = at < limit
    qkv += n * qkv_stride
    # All that hangs on the slot is asked for first, and the state before anything else.
    tile = state + slot * state_stride + h * DIM * DIM + value * DIM + at[None, :]
    held = tl.load(tile, value < limit, 0.0, eviction_policy=HINT)
    history = conv_state + slot * conv_stride
    channels = 3 * heads * DIM
    raw = tl.load(raw_gate + n * raw_gate_stride + h * DIM + at)
    # The history a token later, [WINDOW, 4, DIM]: all but its oldest row, then the raw input.
    mine = head_channels(h, heads, DIM)[None, :, :]
    place = tl.arange(0, WINDOW)[:, None, None]
    moved = history + place * channels + mine
    there = mine < tl.where(slot == 0, 0, channels)
    kept = tl.load(moved + channels, (place < WIDTH - 2) & there, 0.0)
    added = tl.load(qkv + mine + place * 0, (place == WIDTH - 2) & there, 0.0)
    q = _mixed(qkv, history, taps, h * DIM + at, live, channels, WIDTH)
    k = _mixed(qkv, history, taps, (heads + h) * DIM + at, live, channels, WIDTH)
    v = _mixed(qkv, history, taps, (2 * heads + h) * DIM + at, live, channels, WIDTH)
    gate = tl.load(out_gate + n * out_gate_stride + h * DIM + at)
    beta = tl.sigmoid(tl.load(beta_logits + n * beta_stride + h).to(tl.float32))
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (1.0 / tl.sqrt_rn(DIM * 1.0))
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    decay = tl.exp(log_decay(raw, tl.load(dt_bias + h * DIM + at), tl.load(rate + h), lower_bound, BOUNDED))
    u = beta * (v - tl.sum(held * (decay * k)[None, :], 1))
    read = tl.sum(held * (decay * q)[None, :], 1) + u * tl.sum(k * q)
    tl.store(tile, held * decay[None, :] + u[:, None] * k[None, :], value < limit, eviction_policy=HINT)
    # Several threads may have read the same channel.
    tl.debug_barrier()
    tl.store(moved, tl.where(place == WIDTH - 2, added, kept), (place < WIDTH - 1) & there)
    normed = gated(read, tl.sum(read * read), tl.load(norm + at), gate, eps, DIM)
    tl.store(out + (n * heads + h) * DIM + at, tl.where(live, normed, 0.0).to(out.dtype.element_ty))


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
    warps: int,
    registers: int,
    hint: str,
) -> Tensor:
    """See the operator. `taps` [W, C] and `rate` are prepared."""
    count, heads, dim = raw_gate.shape
    out = torch.empty((count, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if count:
        width = taps.shape[0]
        _kda_decode[(heads, count)](
            qkv, raw_gate, beta_logits, out_gate, taps, rate, dt_bias, norm_weight, conv_state, state, slots, out,
            qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0), out_gate.stride(0), conv_state.stride(0),
            state.stride(0), heads, lower_bound or 0.0, eps,
            lower_bound is not None, width, triton.next_power_of_2(width - 1), dim, hint,
            num_warps=min(warps, dim * dim // 128), **at_most(registers, qkv.device),
        )  # fmt: skip
    return out
