"""What the KDA kernels share: the convolution of some channels, the gates and the norms, all in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from k3hal.backends.triton.kernels.programs import is_amd


def at_most(registers: int, device: torch.device) -> Mapping[str, int]:
    """A launch's limit of registers a thread, for more programs at a time on a multiprocessor. Not for AMD."""
    return {} if is_amd(device) else {"maxnreg": registers}


@triton.jit
def sigmoid(x):
    """Cheaper than `tl.sigmoid`, whose quotient and exponential look after numbers that do not come up here."""
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@triton.jit
def softplus(x):
    """`log(1 + exp x)`: `log(1 + z)` is 2 artanh(z / (2 + z)), as a series in at most 1 / 9."""
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    t = s * s
    p = t * (1.0 / 17) + 1.0 / 15
    for n in tl.static_range(7):
        p = p * t + 1.0 / (13 - 2 * n)
    return tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def log_decay(raw, bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """Natural log, <= 0; `rate` is exp(A_log)."""
    shifted = raw.to(tl.float32) + bias
    if BOUNDED:
        return lower_bound * tl.sigmoid(rate * shifted)
    else:
        return -rate * softplus(shifted)


@triton.jit
def convolve_token(x, history, taps, at, channels, WIDTH: tl.constexpr):
    """The convolution of one token's channels `at`, with SiLU, rounded to the activation dtype."""
    mixed = tl.load(x + at).to(tl.float32) * tl.load(taps + (WIDTH - 1) * channels + at)
    for j in tl.static_range(WIDTH - 1):
        mixed += tl.load(history + j * channels + at).to(tl.float32) * tl.load(taps + j * channels + at)
    return (mixed * tl.sigmoid(mixed)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def convolve_rows(x, x_stride, history, known, taps, at, rows, start, end, channels, WIDTH: tl.constexpr):
    """The convolution of channels `at` of the tokens `rows` of a sequence [start, end), as for one token; zero from
    `end` on. Before `start` lies the history where it is `known`, else zeros."""
    mixed = tl.zeros([rows.shape[0], at.shape[0]], tl.float32)
    for j in tl.static_range(WIDTH):
        t = rows - (WIDTH - 1 - j)
        raw = tl.load(x + t[:, None] * x_stride + at[None, :], ((t >= start) & (rows < end))[:, None], 0.0)
        if j + 1 < WIDTH:
            before = ((t < start) & (t >= start - known * WIDTH) & (rows < end))[:, None]
            held = tl.load(history + (t - start + WIDTH - 1)[:, None] * channels + at[None, :], before, 0.0)
            raw = tl.where(before, held, raw)
        mixed += raw.to(tl.float32) * tl.load(taps + j * channels + at)[None, :]
    return (mixed * tl.sigmoid(mixed)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def convolve_chunk(x, x_stride, history, known, taps, at, first, rows, start, end, channels, WIDTH: tl.constexpr):
    """`convolve_rows` in the activation dtype, of rows from `first` on: they look back only where they are the first of
    their sequence."""
    mixed = tl.zeros([rows.shape[0], at.shape[0]], tl.float32)
    live = (rows < end)[:, None]
    for j in tl.static_range(WIDTH):
        t = rows - (WIDTH - 1 - j)
        raw = tl.load(x + t[:, None] * x_stride + at[None, :], live & (t >= start)[:, None], 0.0)
        if j + 1 < WIDTH:
            if first == start:
                before = ((t < start) & (t >= start - known * WIDTH))[:, None] & live
                held = tl.load(history + (t - start + WIDTH - 1)[:, None] * channels + at[None, :], before, 0.0)
                raw = tl.where(before, held, raw)
        mixed += raw.to(tl.float32) * tl.load(taps + j * channels + at)[None, :]
    return (mixed * sigmoid(mixed)).to(x.dtype.element_ty)


@triton.jit
def move_history(
    x, x_stride, history, known, start, end, h, heads,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Leave the last W - 1 raw inputs of a head's channels in the history, what it held included."""
    channels = 3 * heads * DIM
    mine = head_channels(h, heads, DIM)[None, :, :]
    place = tl.arange(0, WINDOW)[:, None, None]
    t = end - (WIDTH - 1) + place
    live = (place < WIDTH - 1) & (mine < channels)
    raw = tl.load(x + t * x_stride + mine, live & (t >= start), 0.0)
    held = tl.load(
        history + (t - start + WIDTH - 1) * channels + mine, live & (t < start) & (t >= start - known * WIDTH), 0.0
    )
    # Several threads may read the same channel.
    tl.debug_barrier()
    tl.store(history + place * channels + mine, tl.where(t < start, held, raw), live)


@triton.jit
def head_channels(h, heads, DIM: tl.constexpr):
    """A head's channels of q, k and v as [4, DIM]; the last row is beyond all."""
    return (tl.arange(0, 4)[:, None] * heads + h) * DIM + tl.arange(0, DIM)[None, :]


@triton.jit
def gated(o, square_sum, norm, gate, eps, DIM: tl.constexpr):
    """RMSNorm of a head with the sum of its squares known, times the sigmoid of its gate."""
    return o * (1 / tl.sqrt_rn(square_sum / DIM + eps)) * norm * tl.sigmoid(gate.to(tl.float32))
