"""RMSNorm: `x * rsqrt(mean x^2 + eps) * weight`, the residual added and stored first where there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, residual, weight, out, x_stride, residual_stride, dim, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < dim
    values = tl.load(x + row * x_stride + at, live, 0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + at, live, 0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + at, rounded, live)
        values = rounded.to(tl.float32)
    factor = 1 / tl.sqrt_rn(tl.sum(values * values) / dim + eps)
    scale = tl.load(weight + at, live, 0.0).to(tl.float32)
    tl.store(out + row * dim + at, (values * factor * scale).to(out.dtype.element_ty), live)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See the operator."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    if x.dim() != 2:
        x, residual = x.reshape(-1, dim), None if residual is None else residual.view(-1, dim)
    if x.shape[0]:
        block = triton.next_power_of_2(dim)
        added, stride = (x, 0) if residual is None else (residual, residual.stride(0))
        _rms_norm[(x.shape[0],)](
            x, added, weight, out, x.stride(0), stride, dim, eps, residual is not None, block,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out
