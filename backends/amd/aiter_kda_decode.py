"""KDA's decoding step by AITER's Gluon kernel, which has the convolution, the gates and the gated norm too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.amd._aiter import LIBRARY, PACKAGE, PRIORITY, switch, usable_as_switched
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded, unless
from k3hal.dispatch.transforms import zeros_elsewhere

DIM, WIDTH = 128, 4
NEEDS = Needs(packages={PACKAGE: ">=0.1.24,<0.2", "triton": ">=3.6"}, dtypes=("bfloat16",), arch=("gfx950",))
DECODE = recorded(
    __name__, LIBRARY, "aiter.ops.triton.attention.kda:fused_recurrent_kda_packed_decode",
    (
        "mixed_qkv", "g", "beta", "A_log", "dt_bias", "lower_bound", "initial_state", "ssm_state_indices", "conv_state",
        "conv_weight", "out_gate", "norm_weight", "norm_eps", "out",
    ),
)  # fmt: skip


def supports(call: Call, function: Any) -> Answer:
    """Whether a Gluon kernel of KDA takes a call's sizes."""
    dim, width = call.dims.get("head_dim", DIM), call.dims.get("conv_width", WIDTH)
    return usable_as_switched(
        call,
        (function,),
        switch(),
        unless(dim == DIM, f"needs head_dim {DIM}, this is {dim}"),
        unless(width == WIDTH, f"needs conv_width {WIDTH}, this is {width}"),
    )


def _prepared(conv_weight: Tensor, **others: Tensor) -> Mapping[str, Any]:
    """Taps as [3, W, H K]: those of queries, keys and values apart, and channels innermost."""
    taps = conv_weight.float().unflatten(0, (3, -1)).transpose(1, 2).contiguous()
    return {"conv_weight": taps, **others}


@provides(
    "kda_decode",
    name="aiter",
    needs=NEEDS,
    supports=lambda call: supports(call, DECODE),
    prepare=_prepared,
    priority=PRIORITY,
    graph_safe=True,
)
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
    """See the operator. Slots up to 0 are of no sequence, whose rows the library leaves unwritten."""
    count, heads, dim = raw_gate.shape
    out = torch.empty((count, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if count:
        DECODE(
            mixed_qkv=qkv, g=raw_gate, beta=beta_logits, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            initial_state=state, ssm_state_indices=slots, conv_state=conv_state.transpose(1, 2),
            conv_weight=conv_weight, out_gate=out_gate, norm_weight=norm_weight, norm_eps=eps, out=out,
        )  # fmt: skip
    return zeros_elsewhere(slots != 0, out).flatten(1)
