"""KDA prefill around FlashKDA, whose kernel has the gates, the norms of q and k, and the chunked recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.ops.gated_rms_norm import gated_rms_norm
from k3hal.dispatch.transforms import gathered_states, live_rows, write_back, zeros_elsewhere
from k3hal.dispatch.transforms.convolution import convolved

NEEDS = Needs(packages={"flash-kda": "", "cuda": ">=12.9"}, dtypes=("bfloat16",), min_arch=90)
FORWARD = recorded(
    __name__, "flash-kda", "flash_kda:fwd",
    (
        "q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound", "initial_state", "final_state",
        "cu_seqlens",
    ),
)  # fmt: skip
_LEAST_BOUND = -5.0
FAULTS = (
    Fault(
        "https://github.com/local-inference-lab/blackwell-llm-docker/pull/29",
        "its first call reserves 3.8 GiB that the memory plan does not know of",
        when=lambda call: call.device.arch_number >= 120,
    ),
)


def _supports(call: Call) -> Answer:
    dim = call.dims.get("head_dim", 128)
    return usable(
        call,
        (FORWARD,),
        unless(dim == 128, f"needs head_dim 128, this is {dim}"),
        unless(bool(call.dims.get("bounded", True)), "needs a bounded gate"),
    )


# The length of the workspace is asked of the library, and the states are allocated, in every call.
@provides("kda_prefill", name="flash_kda", needs=NEEDS, supports=_supports, priority=PRIORITY, faults=FAULTS)
def kda_prefill(
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
    cu_seqlens: Tensor,
    has_state: Tensor,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """See the operator. Convolution and output norm are torch's; the recurrence's result is rounded in between."""
    if lower_bound is None or lower_bound < _LEAST_BOUND:
        raise UnsupportedError(f"flash_kda takes bounds from {_LEAST_BOUND:g} on, this is {lower_bound}")
    heads, dim = raw_gate.shape[1:]
    mixed = convolved(qkv, conv_weight, conv_state, slots, cu_seqlens, has_state)
    q, k, v = (part.contiguous().unsqueeze(0) for part in mixed.unflatten(-1, (3, heads, dim)).unbind(1))
    initial = gathered_states(state, slots, has_state)
    final, out = torch.empty_like(initial), torch.empty_like(v)
    FORWARD(
        q=q, k=k, v=v, g=raw_gate.contiguous().unsqueeze(0), beta=beta_logits.contiguous().unsqueeze(0),
        scale=dim**-0.5, out=out, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, initial_state=initial,
        final_state=final, cu_seqlens=cu_seqlens.long(),
    )  # fmt: skip
    write_back(state, final, slots, cu_seqlens)
    normed = gated_rms_norm(out.squeeze(0), out_gate, norm_weight, eps).flatten(1)
    return zeros_elsewhere(live_rows(cu_seqlens, slots, qkv.shape[0]), normed)
