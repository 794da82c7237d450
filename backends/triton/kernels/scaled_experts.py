"""Routed experts of MXFP4 weights and MXFP8 activations: sort the choices, round, two GEMMs, add up the rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from k3hal.backends.triton._experts import Cut
from k3hal.backends.triton.kernels import _scaled_gemm as gemm
from k3hal.backends.triton.kernels.experts import added_up, in_passes, machine, tiles_for
from k3hal.backends.triton.kernels.mxfp8 import quantize_rows
from k3hal.dispatch.ops.mx_dequantize import GROUP


def sum_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    activation: str, betas: tuple[float, float], cut: Cut,
) -> Tensor:  # fmt: skip
    """See `moe_experts_a8w4`; weights are a checkpoint's own."""
    stacks = (w13, w13_scale, w2, w2_scale)

    def some(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        _experts_into(x, ids, weights, *stacks, activation == "situ", betas, cut, out)

    return in_passes(some, x, ids, weights)


def _experts_into(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    situ: bool, betas: tuple[float, float], cut: Cut, out: Tensor,
) -> None:  # fmt: skip
    (tokens, width), inner, choices = x.shape, 2 * w2.shape[2], ids.numel()
    codes, scales = quantize_rows(x)
    experts, rows, tiles, height = tiles_for(x, ids, w13.shape[0], cut)
    hidden = torch.empty(choices, inner, dtype=codes.dtype, device=x.device)
    hidden_scales = torch.empty(choices, inner // GROUP, dtype=torch.uint8, device=x.device)
    parts = torch.empty(choices, width, dtype=torch.float32, device=x.device)
    first, second = cut.shapes(height)
    deepest = machine(x.device)[1]
    fixed = {"TOP_K": ids.shape[1], "DIRECT": tokens <= cut.direct, "BT": height}
    gemm.gate_up[(tiles * triton.cdiv(inner, first.rows // 2),)](
        codes, scales, ids, experts, rows, w13, w13_scale, hidden, hidden_scales, ids.stride(0), *betas,
        K=width, INNER=inner, SITU=situ, BM=first.rows, BK=first.depth, **fixed,
        num_warps=first.warps, num_stages=min(first.stages, deepest),
    )  # fmt: skip
    gemm.down[(tiles * triton.cdiv(width, second.rows),)](
        hidden, hidden_scales, ids, experts, rows, weights, w2, w2_scale, parts, ids.stride(0), weights.stride(0),
        K=inner, WIDTH=width, BM=second.rows, BK=second.depth, **fixed,
        num_warps=second.warps, num_stages=min(second.stages, deepest),
    )  # fmt: skip
    added_up(parts, ids, out)
