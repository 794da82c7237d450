"""Per-head projections on CPU by our own kernel, all heads in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.cpu.linear_native import kernel, packed
from k3hal.backends.cpu.native.library import supported, threads
from k3hal.backends.cpu.native.packing import Packed
from k3hal.dispatch import provides


@provides("head_linear", name="native", priority=60, supports=supported, prepare=packed)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator; `weight` is `Packed`."""
    assert isinstance(weight, Packed)
    heads, rows = x.shape[1], x.shape[0]
    dense = x.float()
    if dense.stride(2) != 1 or dense.stride(1) != weight.depth:
        dense = dense.contiguous()
    out = torch.empty(rows, heads, weight.rows)
    data, scales = weight.pointers
    kernel()(
        dense.data_ptr(), dense.stride(0), data, scales, out.data_ptr(), heads * weight.rows, rows, weight.depth,
        weight.rows, heads, weight.kind, threads(),
    )  # fmt: skip
    return out if x.dtype == torch.float32 else out.to(x.dtype)
