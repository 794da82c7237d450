"""Token embedding lookup: one program copies a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(ids, weight, out, id_stride, weight_stride, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row * id_stride)
    # A negative id reads nothing and gives zeros.
    values = tl.load(weight + token * weight_stride + at, at < tl.where(token < 0, 0, dim), 0.0)
    tl.store(out + row * dim + at, values, at < dim)


def embed(ids: Tensor, weight: Tensor, piece: int) -> Tensor:
    """See the operator. A program copies `piece` elements."""
    rows, dim = ids.shape[0], weight.shape[1]
    out = torch.empty((rows, dim), dtype=weight.dtype, device=weight.device)
    if rows:
        block = min(piece, triton.next_power_of_2(dim))
        _embed[(rows, triton.cdiv(dim, block))](
            ids, weight, out, ids.stride(0), weight.stride(0), dim, block, num_warps=min(max(block // 256, 1), 8)
        )
    return out
