"""Gated activations of [gate | up]: a program takes a piece of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels._activations import silu_mul, situ_mul


@triton.jit
def _gated(x, out, x_stride, inner, beta, linear_beta, SITU: tl.constexpr, BLOCK: tl.constexpr):
    pieces = tl.cdiv(inner, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    live = at < inner
    gate = tl.load(x + row * x_stride + at, live, 0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + inner + at, live, 0.0).to(tl.float32)
    value = situ_mul(gate, up, beta, linear_beta) if SITU else silu_mul(gate, up)
    tl.store(out + row * inner + at, value.to(out.dtype.element_ty), live)


def gated(x: Tensor, situ: bool, beta: float, linear_beta: float) -> Tensor:
    """`situ_and_mul`, or `silu_and_mul` where betas mean nothing."""
    tokens, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(triton.next_power_of_2(inner), 1024)
        _gated[(tokens * triton.cdiv(inner, block),)](x, out, x.stride(0), inner, beta, linear_beta, situ, block)
    return out
