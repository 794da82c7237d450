"""Sigmoid gate: some channels of one row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid_gate(x, gate, out, x_row, gate_row, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < dim
    values = tl.load(x + row * x_row + at, live, 0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(gate + row * gate_row + at, live, 0.0).to(tl.float32))
    tl.store(out + row * dim + at, (values * opened).to(out.dtype.element_ty), live)


def sigmoid_gate(x: Tensor, gate: Tensor, block: int) -> Tensor:
    """See the operator; at most `block` channels a program."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, dim = x.shape
    if rows:
        block = min(block, triton.next_power_of_2(dim))
        _sigmoid_gate[(rows, triton.cdiv(dim, block))](
            x, gate, out, x.stride(0), gate.stride(0), dim, block, num_warps=min(max(block // 256, 1), 8)
        )
    return out
