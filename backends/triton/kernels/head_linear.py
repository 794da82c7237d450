"""Per-head products: a tile of rows and outputs of one head a program.

Weights of any layout are read once for each block of rows: at decoding there is one, and the weights are the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels.programs import jit_for_any


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of `outputs` by all rows up to `rows`, summed up `depth` at a time."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


@jit_for_any("rows")
def _head_linear(
    x, weight, out, x_row, x_head, weight_head, weight_row, weight_column, rows, heads,
    OUTPUTS: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, IN, BLOCK_K):
        channel = at + channels
        inside = (row[:, None] < rows) & (channel[None, :] < IN)
        values = tl.load(x + row[:, None] * x_row + h * x_head + channel[None, :], inside, 0.0)
        inside = (output[None, :] < OUTPUTS) & (channel[:, None] < IN)
        place = h * weight_head + output[None, :] * weight_row + channel[:, None] * weight_column
        acc = tl.dot(values, tl.load(weight + place, inside, 0.0), acc, input_precision="ieee")
    place = (row[:, None] * heads + h) * OUTPUTS + output[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), (row[:, None] < rows) & (output[None, :] < OUTPUTS))


def head_linear(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """See the operator."""
    rows, (heads, outputs, depth) = x.shape[0], weight.shape
    out = torch.empty((rows, heads, outputs), dtype=x.dtype, device=x.device)
    if rows:
        # All blocks of rows of an output are neighbours, so that its weights come from memory once.
        _head_linear[(triton.cdiv(rows, tiling.rows), triton.cdiv(outputs, tiling.outputs), heads)](
            x, weight, out, x.stride(0), x.stride(1), *weight.stride(), rows, heads,
            outputs, depth, tiling.rows, tiling.outputs, tiling.depth,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return out
