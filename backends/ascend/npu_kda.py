"""KDA by vllm-ascend's kernels: the recurrence of a token, and of chunks.

Around them torch makes the convolution, whose weights they take in bf16 alone, and the norms. Queries and keys would be
rounded once more if they came normalised, and the decoding kernel's own L2 norm has no epsilon, where the operator has
1e-6. So they come exact, near the length of one (`Scaled`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.backends.ascend._npu import A2, A3, A5, FUSED, vllm_ascend
from k3hal.backends.ascend.light import gated_rms_norm, kda_gate
from k3hal.dispatch import Answer, Call, provides
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.library import Function, recorded, unless, usable
from k3hal.dispatch.ops._kda import L2_EPS, split_qkv
from k3hal.dispatch.transforms import KeptNullSlot, KFirst, live_rows, transformed, write_back, zeros_elsewhere
from k3hal.dispatch.transforms.convolution import convolved
from k3hal.dispatch.transforms.states import gathered_states

_OPS = "torch.ops._C_ascend"
RECURRENT = recorded(
    __name__, "vllm-ascend", f"{_OPS}:recurrent_kda",
    (
        "query", "key", "value", "gate", "beta", "initial_state", "cu_seqlens", "ssm_state_indices", "A_log", "dt_bias",
        "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate",
        "lower_bound",
    ),
)  # fmt: skip
GATE = recorded(
    __name__, "vllm-ascend", f"{_OPS}:kda_gate_cumsum",
    (
        "g", "chunk_size", "A_log", "dt_bias", "cu_seqlens", "use_gate_in_kernel", "safe_gate", "lower_bound", "layout",
    ),
)  # fmt: skip
CHUNKS = recorded(
    __name__, "vllm-ascend", f"{_OPS}:chunk_kda_fwd",
    (
        "q", "k", "v", "gk", "beta", "scale", "chunk_size", "layout", "initial_state", "output_final_state",
        "cu_seqlens",
    ),
)  # fmt: skip
HEAD_DIM, CHUNK, LOWEST = 128, 64, -5.0
DECODE_HEADS, PREFILL_HEADS = 256, 128


def _shapes(call: Call, most: int, functions: tuple[Function, ...]) -> Answer:
    dim, heads = call.dims.get("head_dim", HEAD_DIM), int(call.dims.get("heads") or 1)
    return usable(
        call,
        functions,
        unless(dim == HEAD_DIM, f"needs head_dim {HEAD_DIM}, this is {dim}"),
        unless(heads <= most, f"needs heads up to {most}, these are {heads}"),
    )


def _supports_decode(call: Call) -> Answer:
    return _shapes(call, DECODE_HEADS, (RECURRENT,))


def _supports_prefill(call: Call) -> Answer:
    return _shapes(call, PREFILL_HEADS, (GATE, CHUNKS))


def _check_bound(lower_bound: float | None) -> None:
    if lower_bound is not None and not LOWEST <= lower_bound < 0:
        raise UnsupportedError(
            f"a gate bounded by {lower_bound}: vllm-ascend takes bounds from -5 up to 0",
            hint="choose another provider with --ops",
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Queries, keys and values [T, H, K] in bf16 and write strengths fp32 [T, H], with which the recurrence moves the
    same states as with normalised ones, and reads `lengths` [T, H, 1] times as much.

    A key k = n e of length n is given as 2^-m k, exact and about as long as e: with r = 2^-m n, values times r and
    strengths over r^2 make the same corrections times what they are written along. Only values are rounded anew.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, beta_logits: Tensor) -> Scaled:
        query, lengths = _near_one(q)
        key, factor = _near_one(k)
        beta = torch.sigmoid(beta_logits.float()) / factor.squeeze(-1).square()
        return cls(query, key, (v.float() * factor).to(v.dtype), beta, lengths)


def _near_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """x times the power of two that makes it about one long, and how long it is then, fp32 [..., 1]."""
    wide = x.float()
    length = (wide.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
    exponent = (length.view(torch.int32) + (1 << 22)) >> 23
    power = ((254 - exponent) << 23).view(torch.float32)
    return (wide * power).to(x.dtype), length * power


@provides(
    "kda_decode", name="vllm_ascend", needs=vllm_ascend(A2, A3, A5), supports=_supports_decode, priority=FUSED,
    graph_safe=True,
)  # fmt: skip
@transformed(KeptNullSlot(("state",)))
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
    """See the operator. The library has no null slot, and reads states where they lie: between slots there may be
    anything, within one nothing."""
    _check_bound(lower_bound)
    count, live = qkv.shape[0], slots != 0
    if not count:
        return qkv.new_empty(0, norm_weight.shape[0] * A_log.shape[0])
    q, k, v = split_qkv(_convolved_token(qkv, conv_weight, conv_state, slots), A_log.shape[0])
    given = Scaled.of(q, k, v, beta_logits)
    read = RECURRENT(
        query=given.q, key=given.k, value=given.v, gate=raw_gate.contiguous(), beta=given.beta, initial_state=state,
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=slots.device), ssm_state_indices=slots,
        A_log=A_log, dt_bias=dt_bias.contiguous(), scale=q.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=False, safe_gate=lower_bound is not None,
        lower_bound=LOWEST if lower_bound is None else lower_bound,
    )  # fmt: skip
    out = gated_rms_norm(read.float() / given.lengths, out_gate, norm_weight, eps).flatten(1).to(qkv.dtype)
    return zeros_elsewhere(live, out)


def _convolved_token(qkv: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor) -> Tensor:
    """`causal_conv1d` of one token a row; what rows of slot 0 hold is written back as it was."""
    at = slots.long()
    history = conv_state[at]
    window = torch.cat((history, qkv.unsqueeze(1)), 1)
    mixed = silu((window.float() * weight.t()).sum(1)).to(qkv.dtype)
    conv_state[at] = torch.where((slots != 0).view(-1, 1, 1), window[:, 1:], history)
    return mixed


# Lengths are fetched to the host, which hands them on as lists.
@provides("kda_prefill", name="vllm_ascend", needs=vllm_ascend(A2, A3, A5), supports=_supports_prefill, priority=FUSED)
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
    """See the operator. The library wants every row to be some sequence's, and no sequence empty."""
    _check_bound(lower_bound)
    offsets = list(dict.fromkeys(cu_seqlens.tolist()))
    rows, total = qkv.shape[0], offsets[-1]
    out = qkv.new_zeros(rows, norm_weight.shape[0] * A_log.shape[0])
    if not total:
        return out
    live = live_rows(cu_seqlens, slots, total)
    mixed = convolved(qkv[:total], conv_weight, conv_state, slots, cu_seqlens, has_state)
    # What a row of no sequence holds must not reach its neighbours in a tile.
    mixed, raw_gate, beta_logits = (zeros_elsewhere(live, x[:total]) for x in (mixed, raw_gate, beta_logits))
    q, k, v = split_qkv(mixed, A_log.shape[0])
    filled = (cu_seqlens[1:] > cu_seqlens[:-1]).nonzero().squeeze(-1)
    initial = gathered_states(state, slots, has_state)
    given, gates = Scaled.of(q, k, v, beta_logits), _gates(raw_gate, A_log, dt_bias, lower_bound, offsets)
    read, final = _in_chunks(given.q, given.k, given.v, gates, given.beta, initial.index_select(0, filled), offsets)
    write_back(state, initial.index_copy(0, filled, final), slots, cu_seqlens)
    normed = gated_rms_norm(read.float() / given.lengths, out_gate[:total], norm_weight, eps).flatten(1)
    out[:total] = zeros_elsewhere(live, normed.to(qkv.dtype))
    return out


def _gates(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, offsets: list[int]) -> Tensor:
    """Sums of the log decays from each chunk's start, fp32 [T, H, K]; unbounded gates are opened by torch."""
    if lower_bound is None:
        g, _ = kda_gate(raw_gate, raw_gate[..., 0], A_log, dt_bias, None)
        return GATE(g=g.unsqueeze(0), chunk_size=CHUNK, cu_seqlens=offsets, layout="BSND").squeeze(0)
    return GATE(
        g=raw_gate.unsqueeze(0).contiguous(), chunk_size=CHUNK, A_log=A_log, dt_bias=dt_bias.contiguous(),
        cu_seqlens=offsets, use_gate_in_kernel=True, safe_gate=True, lower_bound=lower_bound, layout="BSND",
    ).squeeze(0)  # fmt: skip


@transformed(KFirst(("initial_state",), index=1))
def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, beta: Tensor, initial_state: Tensor, offsets: list[int]
) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, V] and final states; the library's states have the key first."""
    out, final, *_ = CHUNKS(
        q=q.unsqueeze(0), k=k.unsqueeze(0), v=v.unsqueeze(0), gk=gk.unsqueeze(0), beta=beta.unsqueeze(0),
        scale=q.shape[-1] ** -0.5, chunk_size=CHUNK, layout="BSND", initial_state=initial_state,
        output_final_state=True, cu_seqlens=offsets,
    )  # fmt: skip
    return out.squeeze(0), final
