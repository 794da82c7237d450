"""Projections by torch, which calls the cube unit: bf16 factors, sums in fp32, one rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear as library

from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.dispatch import provides


@provides("linear", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    return library(x, weight)


def _wide(weight: Tensor) -> Mapping[str, Tensor]:
    return {"weight": weight.float()}


# torch_npu's mm gives no other dtype than that of its factors. The runtime keeps HF32 off (`NpuRuntime`).
@provides("linear_fp32", name="torch", needs=NEEDS, prepare=_wide, priority=PRIORITY, graph_safe=True)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator. `weight` comes prepared as fp32: twice the memory, and nothing to convert in a call."""
    return library(x.float(), weight)


@provides("head_linear", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the operator. A batch of products, one a head: the vendor's fused transposing product was found to diverge
    (https://github.com/sgl-project/sglang/pull/33465)."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()
