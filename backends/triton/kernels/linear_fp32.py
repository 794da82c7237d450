"""Products with an fp32 result: a tile of rows and outputs a program, the depth split where there are few outputs.

At decoding the weights are the bytes, and a router's 896 outputs are too few programs to draw them at a GPU's rate:
then several programs share a tile's depth, and a second kernel adds what they found in a fixed order. In how many parts
depends on the weights alone, never on the batch, so that a row's sum is the same in any company.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels.programs import jit_for_any

LEAST_PROGRAMS, LEAST_DEPTH, MOST_PARTS = 512, 512, 16
SUM_BLOCK = 1024
MOST_SUMMED = 1024
"""Products that a matrix unit adds up by itself. Hopper's cuts off a few bits each time that it adds: over a depth of
7168 a sum was 8e-6 of its size away on an H200."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of `outputs` by all rows up to `rows`, summed up `depth` at a time."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int

    def parts(self, outputs: int, depth: int) -> int:
        """In how many parts a weight's depth is summed up."""
        wanted = triton.cdiv(LEAST_PROGRAMS, triton.cdiv(outputs, self.outputs))
        return max(1, min(wanted, depth // max(LEAST_DEPTH, self.depth), MOST_PARTS))


@jit_for_any("rows")
def _linear_fp32(
    x, weight, out, x_row, weight_row, rows, OUTPUTS: tl.constexpr, IN: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, PART, BLOCK_K):
        channel = part * PART + at + tl.arange(0, BLOCK_K)
        inside = (row[:, None] < rows) & (channel[None, :] < IN)
        values = tl.load(x + row[:, None] * x_row + channel[None, :], inside, 0.0)
        inside = (output[None, :] < OUTPUTS) & (channel[:, None] < IN)
        factors = tl.load(weight + output[None, :] * weight_row + channel[:, None], inside, 0.0)
        acc = tl.dot(values, factors, acc, input_precision="ieee")
        if (at + BLOCK_K) % SPAN == 0:
            total += acc
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    place = (part.to(tl.int64) * rows + row[:, None]) * OUTPUTS + output[None, :]
    tl.store(out + place, total + acc, (row[:, None] < rows) & (output[None, :] < OUTPUTS))


@jit_for_any("count")
def _add_parts(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * count + at, at < count, 0.0)
    tl.store(out + at, total, at < count)


def linear_fp32(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """See the operator."""
    rows, (outputs, depth) = x.shape[0], weight.shape
    out = torch.empty((rows, outputs), dtype=torch.float32, device=x.device)
    if not rows:
        return out
    parts = tiling.parts(outputs, depth)
    each = triton.cdiv(triton.cdiv(depth, parts), tiling.depth) * tiling.depth
    sums = out if parts == 1 else torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    # All blocks of rows of an output are neighbours, so that its weights come from memory once.
    _linear_fp32[(triton.cdiv(rows, tiling.rows), triton.cdiv(outputs, tiling.outputs), parts)](
        x, weight, sums, x.stride(0), weight.stride(0), rows, outputs, depth, each,
        tiling.rows, tiling.outputs, tiling.depth, max(MOST_SUMMED, tiling.depth),
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if parts > 1:
        _add_parts[(triton.cdiv(out.numel(), SUM_BLOCK),)](sums, out, out.numel(), parts, SUM_BLOCK, num_warps=4)
    return out
