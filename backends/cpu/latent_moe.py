"""Stable LatentMoE on the CPU, for plain and MXFP4 experts in fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm

from k3hal.backends.cpu._linear import linear
from k3hal.backends.cpu.moe_experts import moe_experts
from k3hal.backends.cpu.moe_experts_mxfp4 import moe_experts_mxfp4
from k3hal.dispatch import Answer, Call, Needs, No, Yes, provides
from k3hal.dispatch.ops._experts import gated

FORMATS = ("bf16", "mxfp4")


def _supports(call: Call) -> Answer:
    given = call.dims.get("expert_format")
    return Yes() if given in FORMATS else No(f"expert format is {given}, not one of {'/'.join(FORMATS)}")


@provides("latent_moe", name="streamed", needs=Needs(dtypes=("float32",)), supports=_supports, mxfp4="w4a16")
def latent_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    down_weight: Tensor,
    norm_weight: Tensor | None,
    up_weight: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    expert_format: str,
    activation: str,
    beta: float,
    linear_beta: float,
    eps: float,
) -> Tensor:
    """The composition, with the four plain products in forms that stream their weights at memory speed."""
    z, tail = linear(x, down_weight), (activation, beta, linear_beta)
    if w13_scale is not None and w2_scale is not None:
        y = moe_experts_mxfp4(z, ids, weights, w13, w13_scale, w2, w2_scale, *tail)
    else:
        y = moe_experts(z, ids, weights, w13, w2, *tail)
    if norm_weight is not None:
        y = rms_norm(y, norm_weight.shape, norm_weight, eps)
    hidden = gated(linear(x, shared_gate_up), *tail)
    return linear(y, up_weight).add_(linear(hidden, shared_down)).contiguous().contiguous()
