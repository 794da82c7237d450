"""KDA prefill around AITER's chunked Gluon kernels, which have the gates, the norms and the paged states."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.amd._aiter import LIBRARY, PACKAGE, PRIORITY
from k3hal.backends.amd.aiter_kda_decode import supports
from k3hal.dispatch import Answer, Call, Needs, No, provides
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.library import recorded
from k3hal.dispatch.transforms import live_rows, zeros_elsewhere
from k3hal.dispatch.transforms.convolution import convolved

NEEDS = Needs(packages={PACKAGE: ">=0.1.24,<0.2", "triton": ">=3.6"}, dtypes=("bfloat16",), arch=("gfx950",))
CHUNK = recorded(
    __name__, LIBRARY, "aiter.ops.triton.attention.chunk_kda:chunk_kda",
    (
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "cu_seqlens", "scale", "out", "state_cache",
        "state_indices", "has_initial_state", "out_gate", "norm_weight", "norm_eps",
    ),
)  # fmt: skip
LEAST_BOUND = -5.5
"""Below it products of 16 tokens' decays are too large for fp32."""


def _supports(call: Call) -> Answer:
    answer = supports(call, CHUNK)
    if call.dims.get("bounded", True):
        return answer
    return No(*(answer.reasons if isinstance(answer, No) else ()), "needs a bounded gate")


# It makes a list of chunks, and fetches how many there are.
@provides("kda_prefill", name="aiter", needs=NEEDS, supports=_supports, priority=PRIORITY)
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
    """See the operator. The convolution is torch's.

    States at no slot of the pool are passed over: -1 for the null slot, and for sequences without tokens.
    """
    if lower_bound is None or not LEAST_BOUND <= lower_bound < 0:
        raise UnsupportedError(f"aiter takes bounds from {LEAST_BOUND:g} up to 0, this is {lower_bound}")
    rows, heads, dim = raw_gate.shape
    out = torch.zeros((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not rows:
        return out.flatten(1)
    mixed = convolved(qkv, conv_weight, conv_state, slots, cu_seqlens, has_state).unflatten(-1, (3, heads, dim))
    q, k, v = (x.unsqueeze(0) for x in mixed.unbind(1))
    written = (slots != 0) & (cu_seqlens[1:] > cu_seqlens[:-1])
    CHUNK(
        q=q, k=k, v=v, g=_dense(raw_gate), beta=beta_logits.unsqueeze(0), A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, scale=dim**-0.5, out=out.unsqueeze(0), state_cache=state,
        state_indices=torch.where(written, slots, -1), has_initial_state=has_state, out_gate=_dense(out_gate),
        norm_weight=norm_weight, norm_eps=eps,
    )  # fmt: skip
    return zeros_elsewhere(live_rows(cu_seqlens, slots, rows), out).flatten(1)


def _dense(x: Tensor) -> Tensor:
    """[1, T, H, K] with heads one after another, and rows that begin at multiples of 16 bytes."""
    heads, dim = x.shape[1:]
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    dense = x.stride()[1:] == (dim, 1) or heads == 1
    return (x if aligned and dense else x.clone(memory_format=torch.contiguous_format)).unsqueeze(0)
