"""Stable LatentMoE on CPU by our own kernels, for plain and MXFP4 experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm

from k3hal.backends.cpu.linear_native import packed as packed_linear
from k3hal.backends.cpu.linear_native import product
from k3hal.backends.cpu.native.experts import compile_kernels, gated, pack_experts, sum_of_experts
from k3hal.backends.cpu.native.library import supported
from k3hal.backends.cpu.native.packing import Packed
from k3hal.dispatch import Answer, Call, No, provides

FORMATS = ("bf16", "mxfp4")
PLAIN = ("down_weight", "up_weight", "shared_gate_up", "shared_down")


def _supports(call: Call) -> Answer:
    given = call.dims.get("expert_format")
    return supported(call) if given in FORMATS else No(f"expert format is {given}, not one of {'/'.join(FORMATS)}")


def packed(
    norm_weight: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    **plain: Tensor,
) -> Mapping[str, Any]:
    """All matrices in the kernels' layout, expert stacks with their scales inside; the norm's weight in fp32."""
    compile_kernels()
    return {
        **{name: packed_linear(plain[name])["weight"] for name in PLAIN},
        "norm_weight": None if norm_weight is None else norm_weight.float(),
        "w13": pack_experts(w13, w13_scale),
        "w13_scale": None,
        "w2": pack_experts(w2, w2_scale),
        "w2_scale": None,
    }


@provides("latent_moe", name="native", priority=60, supports=_supports, prepare=packed, mxfp4="w4a16")
def latent_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    down_weight: Packed,
    norm_weight: Tensor | None,
    up_weight: Packed,
    shared_gate_up: Packed,
    shared_down: Packed,
    w13: Packed,
    w13_scale: None,
    w2: Packed,
    w2_scale: None,
    expert_format: str,
    activation: str,
    beta: float,
    linear_beta: float,
    eps: float,
) -> Tensor:
    """See the operator; weights are as `packed` returns them."""
    del w13_scale, w2_scale, expert_format
    dtype, rows, act = x.dtype, x.float(), (activation, beta, linear_beta)
    z = product(rows, down_weight).to(dtype)
    y = sum_of_experts(z, ids, weights, w13, w2, *act).to(dtype).float()
    if norm_weight is not None:
        y = rms_norm(y, norm_weight.shape, norm_weight, eps).to(dtype)
    routed = product(y, up_weight).to(dtype)
    hidden = gated(product(rows, shared_gate_up).to(dtype), *act).to(dtype)
    return routed.add_(product(hidden, shared_down).to(dtype))
