"""KDA prefill around FlashInfer's chunked recurrence with fp32 states, which has the gates and the norms of q and k."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.nvidia._flashinfer import BLACKWELL, PACKAGE, SINCE_0_7_2
from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.ops.gated_rms_norm import gated_rms_norm
from k3hal.dispatch.transforms import gathered_states, live_rows, write_back, zeros_elsewhere
from k3hal.dispatch.transforms.convolution import convolved

# Of its many kernels this one takes fp32 states, any number of heads and sequences of any length; it is for a DSL that
# has `cutlass.experimental`.
BACKEND = "cute-dsl"
NEEDS = Needs(
    packages={PACKAGE: SINCE_0_7_2, "nvidia-cutlass-dsl": ">=4.7"}, dtypes=("bfloat16",), arch=BLACKWELL
)  # fmt: skip
RECURRENT = recorded(
    __name__, "flashinfer-python", "flashinfer.kda:recurrent_kda",
    (
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "lower_bound", "cu_seqlens", "beta_is_logit", "backend",
    ),
)  # fmt: skip
LEAST_BOUND = -5.0
"""The library lets any bound below 0 through; from this one on, say those of its kernels that name a range."""


def _supports(call: Call) -> Answer:
    dim = call.dims.get("head_dim", 128)
    return usable(
        call,
        (RECURRENT,),
        unless(dim == 128, f"needs head_dim 128, this is {dim}"),
        unless(bool(call.dims.get("bounded", True)), "needs a bounded gate"),
    )


# Scratch is allocated, and its length asked for, in every call.
@provides("kda_prefill", name="flashinfer", needs=NEEDS, supports=_supports, priority=PRIORITY)
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
    """See the operator. Convolution and output norm are torch's; the recurrence's result is rounded in between.

    The library takes rows up to the last sequence's end and no further, and a call with as many sequences as rows for
    one of decoding, which has bf16 states alone: one more sequence has the padding, and rows of zeros after it.
    """
    if lower_bound is None or not LEAST_BOUND <= lower_bound < 0:
        raise UnsupportedError(f"flashinfer takes bounds from {LEAST_BOUND:g} up to 0, this is {lower_bound}")
    (rows, heads, dim), count = raw_gate.shape, slots.numel()
    extra = max(0, count + 2 - rows)
    mixed = convolved(qkv, conv_weight, conv_state, slots, cu_seqlens, has_state).unflatten(-1, (3, heads, dim))
    q, k, v, g, beta = (
        torch.cat((x, x.new_zeros(extra, *x.shape[1:]))).unsqueeze(0) for x in (*mixed.unbind(1), raw_gate, beta_logits)
    )
    states = gathered_states(state, slots, has_state)
    states = torch.cat((states, torch.zeros_like(state[:1], memory_format=torch.contiguous_format)))
    bounds = torch.cat((cu_seqlens.long(), cu_seqlens.new_full((1,), rows + extra, dtype=torch.int64)))
    out, _ = RECURRENT(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, scale=dim**-0.5, initial_state=states,
        output_final_state=False, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=lower_bound,
        cu_seqlens=bounds, beta_is_logit=True, backend=BACKEND,
    )  # fmt: skip
    write_back(state, states[:count], slots, cu_seqlens)
    normed = gated_rms_norm(out[0, :rows], out_gate, norm_weight, eps).flatten(1)
    return zeros_elsewhere(live_rows(cu_seqlens, slots, rows), normed)
