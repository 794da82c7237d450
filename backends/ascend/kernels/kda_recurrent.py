"""One token of KDA's recurrence a sequence: a program takes some rows of one head's state.

triton-ascend lowers loads whose offsets are sums of ranges, each once, and masks that compare a range with a bound; so
there are no more than these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Of a state, held beside what is made of it in the 192 KiB that a vector core has."""


@triton.jit
def _normalised(x):
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _kda_recurrent(
    q, k, v, g, beta, state, slots, out,
    q_stride, k_stride, v_stride, g_stride, beta_stride, state_stride, heads, scale,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row of slot 0 reads no state, writes none, and gives zeros."""
    n, h, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * ROWS
    slot = tl.load(slots + n).to(tl.int64)
    limit = tl.where(slot == 0, 0, DIM)
    at, row = tl.arange(0, DIM), first + tl.arange(0, ROWS)
    query = _normalised(tl.load(q + n * q_stride + h * DIM + at).to(tl.float32)) * scale
    key = _normalised(tl.load(k + n * k_stride + h * DIM + at).to(tl.float32))
    decay = tl.exp(tl.load(g + n * g_stride + h * DIM + at))
    strength = tl.load(beta + n * beta_stride + h)
    value = tl.load(v + n * v_stride + h * DIM + row).to(tl.float32)
    tile = state + slot * state_stride + h * DIM * DIM + row[:, None] * DIM + at[None, :]
    live = row[:, None] < limit
    held = tl.load(tile, live, 0.0) * decay[None, :]
    u = strength * (value - tl.sum(held * key[None, :], 1))
    new = held + u[:, None] * key[None, :]
    tl.store(tile, new, live)
    read = tl.sum(new * query[None, :], 1)
    tl.store(out + (n * heads + h) * DIM + row, tl.where(row < limit, read, 0.0).to(out.dtype.element_ty))


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """See the operator."""
    count, heads, dim = q.shape
    out = torch.empty((count, heads, dim), dtype=v.dtype, device=v.device)
    if count:
        rows = min(ROWS, dim)
        _kda_recurrent[(count, heads, dim // rows)](
            q, k, v, g, beta, state, slots, out,
            q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), state.stride(0), heads, dim**-0.5,
            dim, rows,
        )  # fmt: skip
    return out
