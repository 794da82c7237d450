"""Routed experts of any format: sort the choices, two GEMMs, add up the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import triton
from torch import Tensor

from k3hal.backends.triton._experts import Cut
from k3hal.backends.triton.kernels import _expert_gemm as gemm
from k3hal.backends.triton.kernels import _expert_tiles as tiling
from k3hal.backends.triton.kernels.programs import arch

Format = Literal["plain", "mxfp4", "int4"]

FEW = 2048
"""Choices that one program reads at once; more are counted first, by a program an expert."""
LEAST_CHOICES = 128
"""Of those the kernel reads at least so many, that it need not be compiled for every batch."""
SCAN = 2048
MOST = 4096
"""Tokens at a time. Scratch is an fp32 row a choice, which is 0.9 GiB for K3; its experts have 73 rows each then."""


def sum_of_experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor | None, w2: Tensor,
    w2_scale: Tensor | None, activation: str, betas: tuple[float, float], cut: Cut, *, format: Format,
    rounded: bool = False,
) -> Tensor:  # fmt: skip
    """See `moe_experts`; weights of the format mxfp4 are those of `_mxfp4.pack`, of int4 those of `_int4.pack`.

    `rounded`: x has been rounded to MXFP8, and the activation is. The first GEMM's programs take 64 rows or more then.
    """
    inner = w2.shape[2] if format == "plain" else w13.shape[1] * 8
    stacks = (w13, w13_scale, w2, w2_scale)

    def some(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        _experts_into(x, ids, weights, *stacks, activation == "situ", betas, cut, format, rounded, inner, out)

    return in_passes(some, x, ids, weights)


def in_passes(
    some: Callable[[Tensor, Tensor, Tensor, Tensor], None], x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """The experts' sums of x's rows, as `some` writes those of at most MOST tokens' x, ids and weights to its last."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] > MOST:
        for a in range(0, x.shape[0], MOST):
            b = a + MOST
            some(x[a:b], ids[a:b], weights[a:b], out[a:b])
    elif out.numel():
        some(x, ids, weights, out)
    return out


def _experts_into(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor | None, w2: Tensor,
    w2_scale: Tensor | None, situ: bool, betas: tuple[float, float], cut: Cut, format: Format, rounded: bool,
    inner: int, out: Tensor,
) -> None:  # fmt: skip
    (tokens, width), choices = x.shape, ids.numel()
    experts, rows, tiles, height = tiles_for(x, ids, w13.shape[0], cut)
    hidden = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(choices, width, dtype=torch.float32, device=x.device)
    first, second = cut.shapes(height)
    ptx, deepest = machine(x.device)
    fixed = {"TOP_K": ids.shape[1], "FORMAT": format, "DIRECT": tokens <= cut.direct, "BT": height, "PTX": ptx}
    gemm.gate_up[(tiles * triton.cdiv(inner, first.rows // 2),)](
        x, ids, experts, rows, w13, w13_scale, hidden, x.stride(0), ids.stride(0), *betas,
        K=width, INNER=inner, SITU=situ, ROUND=rounded, BM=first.rows, BK=first.depth, **fixed,
        num_warps=first.warps, num_stages=min(first.stages, deepest),
    )  # fmt: skip
    gemm.down[(tiles * triton.cdiv(width, second.rows),)](
        hidden, ids, experts, rows, weights, w2, w2_scale, parts, ids.stride(0), weights.stride(0),
        K=inner, WIDTH=width, BM=second.rows, BK=second.depth, **fixed,
        num_warps=second.warps, num_stages=min(second.stages, deepest),
    )  # fmt: skip
    added_up(parts, ids, out)


def added_up(parts: Tensor, ids: Tensor, out: Tensor) -> None:
    """A row each of fp32 parts [T k, D] for the choices of ids [T, k], summed into out [T, D]."""
    (tokens, width), top_k = out.shape, ids.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    gemm.combine[(tokens * triton.cdiv(width, block),)](
        parts, ids, out, ids.stride(0), top_k, triton.next_power_of_2(top_k), width, block
    )


def tiles_for(x: Tensor, ids: Tensor, count: int, cut: Cut) -> tuple[Tensor, Tensor, int, int]:
    """`experts` and `rows` of the tiles that the choices of `count` experts make, how many there may be, and the
    choices of each."""
    height = _height(x, ids.numel() // count, cut)
    if x.shape[0] <= cut.direct:
        return ids, ids, ids.numel(), height
    return *_tiles(ids, count, height), height


def machine(device: torch.device) -> tuple[bool, int]:
    """Whether bfloat16 is multiplied by PTX's own instruction, and the most stages: AMD's local memory holds two."""
    name = arch(device)
    return (int(name[3:]) >= 90, 8) if name.startswith("sm_") else (False, 2)


def _height(x: Tensor, each: int, cut: Cut) -> int:
    """Choices a tile: a power of two that most experts' choices fit in, if they are spread evenly, `each` an expert.

    Without tensor cores, which fp32 is, tall tiles only spill registers.
    """
    if x.shape[0] <= cut.direct or x.dtype is torch.float32:
        return 16
    return min(max(16, triton.next_power_of_2(each * 5 // 4)), cut.tallest)


def _tiles(ids: Tensor, count: int, height: int) -> tuple[Tensor, Tensor, int]:
    """`experts` and `rows` of `_expert_tiles`, and how many tiles there may be at most."""
    top_k, choices = ids.shape[1], ids.numel()
    few = choices <= FEW
    tiles = choices if few else min(count, choices) + choices // height
    experts = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    rows = torch.empty(tiles * height, dtype=torch.int32, device=ids.device)
    if few:
        block = max(triton.next_power_of_2(choices), LEAST_CHOICES)
        tiling.tiles_of_few[(choices,)](ids, experts, rows, ids.stride(0), choices, top_k, height, block)
    else:
        counts = torch.empty(count, dtype=torch.int32, device=ids.device)
        tiling.count_choices[(count,)](ids, counts, ids.stride(0), choices, top_k, SCAN)
        tiling.tiles_of_many[(count + 1,)](
            ids, counts, experts, rows, ids.stride(0), choices, tiles, count, triton.next_power_of_2(count),
            top_k, height, SCAN,
        )  # fmt: skip
    return experts, rows, tiles
