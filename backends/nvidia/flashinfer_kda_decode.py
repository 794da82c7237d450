"""KDA decode by FlashInfer's fused kernel: convolution, gates, recurrence and output norm in one launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3hal.backends.nvidia._flashinfer import BLACKWELL, PACKAGE
from k3hal.backends.nvidia._kda import DIM, WIDTH
from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.transforms.layouts import taps_by_part

# 0.6.18 has the function too, for sm_100 and fewer heads. The kernel is written in CuTe DSL.
NEEDS = Needs(packages={PACKAGE: ">=0.7.2,<0.8", "nvidia-cutlass-dsl": ""}, dtypes=("bfloat16",), arch=BLACKWELL)
HEADS = (8, 12, 24, 32, 48, 96)
"""0.7.4 has 16 and 64 too."""
DECODE = recorded(
    __name__, "flashinfer-python", "flashinfer.kda_decode:fused_kda_decode",
    (
        "x", "weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state_indices", "state",
        "output_gate", "norm_weight", "lower_bound", "norm_eps", "backend",
    ),
)  # fmt: skip


def _supports(call: Call) -> Answer:
    dim, width = call.dims.get("head_dim", DIM), call.dims.get("conv_width", WIDTH)
    heads = call.dims.get("heads", HEADS[0])
    return usable(
        call,
        (DECODE,),
        unless(dim == DIM, f"needs head_dim {DIM}, this is {dim}"),
        unless(width == WIDTH, f"needs conv_width {WIDTH}, this is {width}"),
        unless(heads in HEADS, f"needs heads {'/'.join(map(str, HEADS))}, these are {heads}"),
    )


def _laid_out(conv_weight: Tensor, dt_bias: Tensor, **others: Tensor) -> Mapping[str, Tensor]:
    """Taps as [3, W, H K], oldest first, and the gate's bias as [H K]."""
    return {"conv_weight": taps_by_part(conv_weight), "dt_bias": dt_bias.flatten().contiguous(), **others}


# It compiles for a bound and an epsilon when it first meets them; that it may be captured was not seen.
@provides("kda_decode", name="flashinfer", needs=NEEDS, supports=_supports, prepare=_laid_out, priority=PRIORITY)
def kda_decode(
    qkv: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    out_gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """See the operator; slot 0 is the library's null slot too. The recurrence's result is rounded before the norm."""
    if qkv.shape[0] == 0:
        return qkv.new_empty(0, raw_gate.shape[1] * raw_gate.shape[2])
    out = DECODE(
        x=qkv, weight=conv_weight, conv_state=conv_state.transpose(1, 2), raw_gate=raw_gate.contiguous().unsqueeze(0),
        raw_beta=beta_logits.unsqueeze(0), A_log=A_log, dt_bias=dt_bias, state_indices=slots, state=state,
        output_gate=out_gate, norm_weight=norm_weight, lower_bound=lower_bound, norm_eps=eps, backend="cute-dsl",
    )  # fmt: skip
    return torch.flatten(out.squeeze(0), 1)
