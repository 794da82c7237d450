"""SiTU and SwiGLU in fp32, to within a few units in the last place also near zero."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Of fp32; the quotient of exponentials loses what the series keeps where x is small."""
    square = x * x
    series = -17 / 315 + square * (62 / 2835)
    series = 2 / 15 + square * series
    near = x + x * square * (square * series - 1 / 3)
    decay = tl.exp(-2 * tl.abs(x))
    far = (1 - decay) / (1 + decay)
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, far))


@triton.jit
def situ_mul(gate, up, beta, linear_beta):
    """`beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta)`."""
    capped = beta * tanh(gate / beta) / (1 + tl.exp(-gate))
    return capped * (linear_beta * tanh(up / linear_beta))


@triton.jit
def silu_mul(gate, up):
    """`g sigmoid(g) u`."""
    return gate / (1 + tl.exp(-gate)) * up
