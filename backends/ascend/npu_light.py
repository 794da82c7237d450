"""RMSNorm and routing by torch_npu."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.ascend._npu import A2, A3, A5, LIBRARY, torch_npu
from k3hal.dispatch import Answer, Call, provides
from k3hal.dispatch.library import recorded, unless, usable

RMS_NORM = recorded(__name__, "torch-npu", "torch.ops.npu:npu_rms_norm", ("input", "gamma", "epsilon"))
TOP_K = recorded(
    __name__, "torch-npu", "torch.ops.npu:npu_moe_gating_top_k",
    (
        "x", "k", "bias", "k_group", "group_count", "group_select_mode", "renorm", "norm_type",
        "routed_scaling_factor", "eps",
    ),
)  # fmt: skip
MOST_EXPERTS = 2048
FLOOR = 1e-20
"""Beside the sum of the weights, in a division."""


def _supports_norm(call: Call) -> Answer:
    return usable(call, (RMS_NORM,))


@provides(
    "rms_norm", name="torch_npu", needs=torch_npu(A2, A3, A5), supports=_supports_norm, priority=LIBRARY,
    graph_safe=True,
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator. The library multiplies in fp32 and rounds once; its input and weight are of one dtype."""
    if residual is not None:
        residual.add_(x)
        x = residual
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = x if weight.dtype is x.dtype else x.float()
    return RMS_NORM(input=wide.contiguous(), gamma=weight.to(wide.dtype), epsilon=eps)[0].to(x.dtype)


def _supports_route(call: Call) -> Answer:
    experts = int(call.dims.get("experts") or 1)
    padded = -(-experts // 32) * 32
    return usable(call, (TOP_K,), unless(padded <= MOST_EXPERTS, f"needs experts up to 2048, these are {experts}"))


@provides(
    "moe_route", name="torch_npu", needs=torch_npu(A2, A3, A5, dtypes=()), supports=_supports_route, priority=LIBRARY,
    graph_safe=True,
)  # fmt: skip
def moe_route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See the operator. After sigmoids the library always divides by the sum of the chosen: where that is not wanted,
    its choice is taken and the weights are made here."""
    if not logits.numel():
        empty = logits.new_empty(logits.shape[0], top_k)
        return empty, empty.int()
    weights, ids, _ = TOP_K(
        x=logits.contiguous(), k=top_k, bias=bias, k_group=1, group_count=1, group_select_mode=0, renorm=0, norm_type=1,
        routed_scaling_factor=scale, eps=FLOOR,
    )  # fmt: skip
    if not renormalize:
        weights = torch.sigmoid(logits).gather(1, ids.long()) * scale
    return weights, ids.int()
