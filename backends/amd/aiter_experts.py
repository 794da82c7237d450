"""Routed MXFP4 experts by AITER's fused products, whose kernels with bf16 activations and SiTU are FlyDSL's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.amd._aiter import CDNA, LIBRARY, OFF, PACKAGE, PRIORITY, Forbidden, switch, usable_as_switched
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded, unless
from k3hal.dispatch.transforms import zeros_elsewhere

NEEDS = Needs(packages={PACKAGE: ">=0.1.20,<0.2", "flydsl": ">=0.3"}, dtypes=("bfloat16",), arch=CDNA)
FUSED = recorded(
    __name__, LIBRARY, "aiter.fused_moe:fused_moe",
    (
        "hidden_states", "w1", "w2", "topk_weight", "topk_ids", "activation", "quant_type", "w1_scale", "w2_scale",
        "beta", "linear_beta", "gate_mode",
    ),
)  # fmt: skip
WEIGHTS = recorded(
    __name__, LIBRARY, "aiter.ops.shuffle:shuffle_weight_a16w4", ("src", "NLane", "gate_up")
)  # fmt: skip
SCALES = recorded(
    __name__, LIBRARY, "aiter.ops.shuffle:shuffle_scale_a16w4", ("src", "experts_cnt", "gate_up")
)  # fmt: skip
SEPARATED = "separated"
"""Rows [gate; up] as they come. With fp8 activations the library wants them in turns."""
_LANES, _MULTIPLE = 16, 128
# The library reads its own, at every call, and rounds activations where they are set; vLLM's are for the same choice.
PRECISION: Forbidden = {
    "AITER_SITUV2_A8W4": ("1",),
    "AITER_SITUV2_A4W4": ("1",),
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": ("a8w4", "a4w4", *OFF),
}


def _supports(call: Call) -> Answer:
    sizes = {name: int(call.dims.get(name) or _MULTIPLE) for name in ("hidden", "intermediate")}
    activation = call.dims.get("activation", "situ")
    # Of SwiGLU the library rounds the activations to fp4, which the operator forbids.
    return usable_as_switched(
        call,
        (FUSED, WEIGHTS, SCALES),
        {**switch("_MOE"), **PRECISION},
        *(
            unless(n % _MULTIPLE == 0, f"needs {name} a multiple of {_MULTIPLE}, this is {n}")
            for name, n in sizes.items()
        ),
        unless(activation == "situ", f"needs activation situ, this is {activation}"),
    )


def _prepared(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Any]:
    """Codes and scales in tiles of the matrix instructions; scales come as rows of all experts, padded in depth."""
    experts = w13.shape[0]
    first, second = (WEIGHTS(src=w.contiguous(), NLane=_LANES, gate_up=False) for w in (w13, w2))
    folded = (SCALES(src=s.flatten(0, 1), experts_cnt=experts, gate_up=False) for s in (w13_scale, w2_scale))
    first_scale, second_scale = folded
    return {"w13": first, "w13_scale": first_scale, "w2": second, "w2_scale": second_scale}


def _codes(weight: Tensor) -> Tensor:
    """Two codes a byte, marked as laid out: the library looks for an attribute that loading loses."""
    seen = weight.view(torch.float4_e2m1fn_x2)
    seen.is_shuffled = True  # type: ignore[attr-defined]
    return seen


# It sorts and allocates in every call, and compiles its kernels in the first.
@provides(
    "moe_experts_mxfp4",
    name="aiter",
    needs=NEEDS,
    supports=_supports,
    prepare=_prepared,
    priority=PRIORITY,
    mxfp4="w4a16",
)
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
    """See the operator. What both products give, and the activation between them, is rounded to bf16.

    The library adds a token's choices up in bf16, which for 16 of them is more than rounding once: here every choice is
    a token of its own, and they are added up in fp32. Its sort takes no choice of no expert: those become rows of zeros
    for the first.
    """
    tokens, choices = ids.shape
    if not tokens:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    kinds = import_module("aiter")
    chosen = ids.flatten() >= 0
    out = FUSED(
        hidden_states=zeros_elsewhere(chosen, x.repeat_interleave(choices, 0)), w1=_codes(w13), w2=_codes(w2),
        topk_weight=torch.ones((ids.numel(), 1), dtype=torch.float32, device=x.device),
        topk_ids=ids.reshape(-1, 1).clamp_min(0), activation=kinds.ActivationType.Situv2,
        quant_type=kinds.QuantType.per_1x32, w1_scale=w13_scale.view(torch.float8_e8m0fnu),
        w2_scale=w2_scale.view(torch.float8_e8m0fnu), beta=beta, linear_beta=linear_beta, gate_mode=SEPARATED,
    )  # fmt: skip
    each = out.view(tokens, choices, -1).float() * weights.unsqueeze(-1)
    return torch.where((ids >= 0).unsqueeze(-1), each, 0.0).sum(1).to(x.dtype)
