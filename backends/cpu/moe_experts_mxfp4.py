"""Routed experts with MXFP4 weights on the CPU: weights stay packed in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3hal.backends.cpu._expert_sum import Load, sum_of_experts
from k3hal.backends.cpu._mxfp4 import dequantize
from k3hal.dispatch import provides

# Elements dequantised at a time: enough to make the four calls of a tile cheap, few enough to stay in cache.
TILE = 1 << 19


def matrices(packed: Tensor, scales: Tensor) -> Load:
    """Experts dequantised exactly: several small ones a tile, or one large one."""
    per_tile = max(1, TILE // (2 * packed[0].numel()))

    def load(experts: list[int]) -> Iterator[Tensor]:
        for a in range(0, len(experts), per_tile):
            chosen = torch.tensor(experts[a : a + per_tile])
            yield dequantize(packed.index_select(0, chosen), scales.index_select(0, chosen), keep=False)

    return load


@provides("moe_experts_mxfp4", name="dequantized", mxfp4="w4a16")
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Chosen experts are dequantised exactly, tile by tile, and used in fp32."""
    first, second = matrices(w13, w13_scale), matrices(w2, w2_scale)
    return sum_of_experts(x, ids, weights, first, second, (activation, beta, linear_beta))
