"""Routed experts by FlashInfer's CUTLASS products: plain weights, and MXFP4 beside activations in bf16 on Hopper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.nvidia._flashinfer import PACKAGE, SINCE_0_7_2
from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.library import recorded, usable
from k3hal.dispatch.transforms.layouts import up_first

EXPERTS = recorded(
    __name__, "flashinfer-python", "flashinfer.fused_moe.core:cutlass_fused_moe",
    (
        "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights",
        "output_dtype", "quant_scales", "output", "use_w4_group_scaling", "activation_type", "use_fused_finalize",
        "situ_beta", "situ_linear_beta",
    ),
)  # fmt: skip
INTERLEAVE = recorded(
    __name__, "flashinfer-python", "flashinfer.fused_moe.prepare:interleave_moe_weights_for_sm90_mixed_gemm",
    ("weight", "quant_type"),
)  # fmt: skip
FOLD = recorded(
    __name__, "flashinfer-python", "flashinfer.fused_moe.prepare:interleave_moe_scales_for_sm90_mixed_gemm",
    ("scales", "group_size"),
)  # fmt: skip
FAULTS = (
    Fault(
        "https://github.com/flashinfer-ai/flashinfer/pull/4597",
        "the number of SiTU runs another activation",
        packages={PACKAGE: "<0.7"},
        dims={"activation": ("situ",)},
    ),
)
ACTIVATIONS = {"silu": 3, "situ": 10}
"""Their numbers in the library's enumeration: SwiGLU, and SiTU with its two scales."""
_MXFP4_GROUP = 32


def _sizes(call: Call, multiple: int) -> list[str]:
    sizes = {name: int(call.dims.get(name) or multiple) for name in ("hidden", "intermediate")}
    odd = [f"needs {name} a multiple of {multiple}, this is {n}" for name, n in sizes.items() if n % multiple]
    activation = call.dims.get("activation", "situ")
    return [*odd, *([] if activation in ACTIVATIONS else [f"needs activation silu or situ, this is {activation}"])]


def _supports_mxfp4(call: Call) -> Answer:
    return usable(call, (EXPERTS, INTERLEAVE, FOLD), *_sizes(call, 128))


def _supports_plain(call: Call) -> Answer:
    return usable(call, (EXPERTS,), *_sizes(call, 8))


def _prepared_mxfp4(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Any]:
    """Codes and scales in the layouts of the products that decode on the way to the tensor cores."""
    first, second = (INTERLEAVE(weight=w, quant_type="fp4") for w in (up_first(w13), w2.contiguous()))
    scales = (FOLD(scales=s, group_size=_MXFP4_GROUP) for s in (up_first(w13_scale), w2_scale.contiguous()))
    first_scale, second_scale = scales
    return {"w13": first, "w13_scale": first_scale, "w2": second, "w2_scale": second_scale}


def _prepared(w13: Tensor, w2: Tensor) -> Mapping[str, Any]:
    return {"w13": up_first(w13), "w2": w2.contiguous()}


def _fused(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    scales: Sequence[Tensor],
    activation: str,
    betas: tuple[float, float],
) -> Tensor:
    """Choices of no local expert, negative ones among them, are of no row. Sums are not by atomics."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[0] == 0:
        return out
    situ = activation == "situ"
    beta, linear_beta = (
        torch.full((w13.shape[0],), value, dtype=torch.float32, device=x.device) if situ else None for value in betas
    )
    EXPERTS(
        input=x.contiguous(), token_selected_experts=ids.contiguous(), token_final_scales=weights.contiguous(),
        fc1_expert_weights=w13, fc2_expert_weights=w2, output_dtype=x.dtype, quant_scales=list(scales), output=out,
        use_w4_group_scaling=bool(scales), activation_type=ACTIVATIONS[activation],
        use_fused_finalize=False, situ_beta=beta, situ_linear_beta=linear_beta,
    )  # fmt: skip
    return out


# It allocates its scratch in every call, and compiles its kernels in the first.
@provides(
    "moe_experts_mxfp4",
    name="flashinfer",
    needs=Needs(packages={PACKAGE: SINCE_0_7_2}, dtypes=("bfloat16",), arch=("sm_90",)),
    supports=_supports_mxfp4,
    prepare=_prepared_mxfp4,
    priority=PRIORITY,
    mxfp4="w4a16",
    faults=FAULTS,
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
    """See the operator. What both products give, and the activation between them, is rounded to bf16."""
    scales = (w13_scale.view(torch.int32), w2_scale.view(torch.int32))
    return _fused(x, ids, weights, w13, w2, scales, activation, (beta, linear_beta))


@provides(
    "moe_experts",
    name="flashinfer",
    needs=Needs(packages={PACKAGE: SINCE_0_7_2}, dtypes=("bfloat16",), arch=("sm_90", "sm_100", "sm_103")),
    supports=_supports_plain,
    prepare=_prepared,
    priority=PRIORITY,
    faults=FAULTS,
)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the operator; roundings as with MXFP4."""
    return _fused(x, ids, weights, w13, w2, (), activation, (beta, linear_beta))
