"""Routed experts of int4 weights: sort the choices, two GEMMs, add up the rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3hal.backends.triton._experts import Cut
from k3hal.backends.triton.kernels import _int4_gemm as gemm
from k3hal.backends.triton.kernels.experts import MOST, added_up, machine, tiles_for


def sum_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    activation: str, betas: tuple[float, float], cut: Cut,
) -> Tensor:  # fmt: skip
    """See `moe_experts_int4`; weights are those of `_int4.pack`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stacks = (w13, w13_scale, w2, w2_scale, activation == "situ", betas, cut)
    for a in range(0, x.shape[0], MOST):
        b = a + MOST
        _experts_into(x[a:b], ids[a:b], weights[a:b], *stacks, out[a:b])
    return out


def _experts_into(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    situ: bool, betas: tuple[float, float], cut: Cut, out: Tensor,
) -> None:  # fmt: skip
    (tokens, width), inner, choices = x.shape, w13.shape[1] * 8, ids.numel()
    experts, rows, tiles, height = tiles_for(x, ids, w13.shape[0], cut)
    hidden = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(choices, width, dtype=torch.float32, device=x.device)
    first, second = cut.shapes(height)
    ptx, deepest = machine(x.device)
    fixed = {"TOP_K": ids.shape[1], "DIRECT": tokens <= cut.direct, "BT": height, "PTX": ptx}
    gemm.gate_up[(tiles * triton.cdiv(inner, first.rows // 2),)](
        x, ids, experts, rows, w13, w13_scale, hidden, x.stride(0), ids.stride(0), *betas,
        K=width, INNER=inner, SITU=situ, BM=first.rows, **fixed,
        num_warps=first.warps, num_stages=min(first.stages, deepest),
    )  # fmt: skip
    gemm.down[(tiles * triton.cdiv(width, second.rows),)](
        hidden, ids, experts, rows, weights, w2, w2_scale, parts, ids.stride(0), weights.stride(0),
        K=inner, WIDTH=width, BM=second.rows, **fixed,
        num_warps=second.warps, num_stages=min(second.stages, deepest),
    )  # fmt: skip
    added_up(parts, ids, out)
