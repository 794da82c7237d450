"""AITER's functions as its sources describe them, in plain torch: what an adapter calls them with decides what they do.

Rows that a kernel leaves as they are, are NaN here. Each refuses what the library's own checks do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from k3hal.backends.amd import (
    aiter_experts,
    aiter_kda_decode,
    aiter_kda_prefill,
    aiter_mla_decode,
    aiter_mla_prefill,
    aiter_rms_norm,
)
from k3hal.dispatch.library import Function, loaded
from k3hal.dispatch.ops._experts import gated
from k3hal.dispatch.ops._kda import delta_step
from k3hal.dispatch.ops.gated_rms_norm import gated_rms_norm
from k3hal.dispatch.ops.kda_decode import kda_decode
from k3hal.dispatch.ops.kda_gate import kda_gate
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize

KINDS = {
    "ActivationType": SimpleNamespace(Situv2="situv2", Silu="silu"),
    "QuantType": SimpleNamespace(per_1x32="per_1x32"),
}
"""Enumerations of the package itself."""
HEADS = (16, 32, 64, 128)
NEUTRAL_SCALE = 0x7F


def rms_norm(*, input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Rows of 16 or 32 bits with a unit stride, and weights of the same kind; fp32 within, rounded once."""
    assert input.ndim == 2 and input.stride(1) == 1 and weight.dtype is input.dtype and weight.is_contiguous()
    wide = input.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normed * weight.float()).to(input.dtype)


def mla_decode_fwd(
    *, q: Tensor, kv_buffer: Tensor, o: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_lens: Tensor, max_seqlen_q: int, page_size: int, nhead_kv: int, sm_scale: float,
) -> tuple[None, None]:  # fmt: skip
    """q [N, H, 576] and o [N, H, 512] dense, pages [P, 1, 1, 576]; a sequence's pages are those between its bounds."""
    count, heads, entry = q.shape
    assert heads in HEADS and q.is_contiguous() and o.is_contiguous() and nhead_kv == 1 and max_seqlen_q == 1
    assert page_size == 1 and kv_buffer.shape[1:] == (1, 1, entry) and q.dtype is kv_buffer.dtype is torch.bfloat16
    assert qo_indptr.tolist() == list(range(count + 1)) and kv_last_page_lens.tolist() == [1] * count
    assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)} == {torch.int32}
    o.fill_(torch.nan)
    for n, (first, last) in enumerate(pairwise(kv_indptr.tolist())):
        assert last > first, "a sequence of no page divides by zero"
        at = kv_indices[first:last].long()
        assert int(at.min()) >= 0 and int(at.max()) < kv_buffer.shape[0], "a page that the cache does not have"
        rows = kv_buffer[at, 0, 0].float()
        shares = (q[n].float() @ rows.T * sm_scale).softmax(-1)
        o[n] = (shares @ rows[:, : o.shape[2]]).to(o.dtype)
    return None, None


def flash_attn_varlen_func(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Packed rows; a causal mask ends at the last key. Logarithms are natural ones, [H, T]."""
    assert return_lse and q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and q.shape[1] == k.shape[1]
    assert cu_seqlens_q.dtype is torch.int32 and cu_seqlens_k.dtype is torch.int32
    out = torch.full_like(q[..., : v.shape[2]], torch.nan)
    lse = q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (a, b), (c, d) in bounds:
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        scores = torch.einsum("thd,lhd->htl", q[a:b].float(), k[c:d].float()) * softmax_scale
        if causal:
            late = torch.ones(b - a, d - c, dtype=torch.bool).triu(d - c - (b - a) + 1)
            scores = scores.masked_fill(late, -torch.inf)
        out[a:b] = torch.einsum("htl,lhd->thd", scores.softmax(-1), v[c:d].float()).to(out.dtype)
        lse[:, a:b] = scores.logsumexp(-1)
    return out, lse


def shuffle_weight_a16w4(*, src: Tensor, NLane: int, gate_up: bool) -> Tensor:
    """Bytes [E, N, B]: tiles of 16 rows by 64 bytes one after another, in each four times 16 bytes of all its rows."""
    assert NLane == 16 and not gate_up and src.shape[1] % 16 == 0 and src.shape[2] % 64 == 0
    tiles = src.unflatten(2, (-1, 4, 16)).unflatten(1, (-1, 16))  # [E, tile of rows, row, tile of bytes, quarter, byte]
    out = tiles.movedim(2, 4).reshape(src.shape)
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def shuffle_scale_a16w4(*, src: Tensor, experts_cnt: int, gate_up: bool) -> Tensor:
    """Scales [E N, K / 32], the columns padded to eights: of 32 rows and eight columns those of one lane together."""
    assert not gate_up and src.ndim == 2 and src.shape[0] % (32 * experts_cnt) == 0
    wide = pad(src, (0, -src.shape[1] % 8), value=NEUTRAL_SCALE)
    # Half of the rows, row; half of the columns, column of four.
    tiles = wide.unflatten(1, (-1, 2, 4)).unflatten(0, (experts_cnt, -1, 2, 16))
    return tiles.permute(0, 1, 4, 6, 3, 5, 2).reshape(wide.shape)


def _undone(laid_out: Tensor, layout: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """What `layout` made `laid_out` of."""
    came_from = layout(torch.arange(laid_out.numel()).view(shape)).flatten()
    out = torch.empty_like(laid_out).flatten()
    out[came_from] = laid_out.flatten()
    return out.view(shape)


def fused_moe(
    *, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weight: Tensor, topk_ids: Tensor, activation: str,
    quant_type: str, w1_scale: Tensor, w2_scale: Tensor, beta: float, linear_beta: float, gate_mode: str,
) -> Tensor:  # fmt: skip
    """MXFP4 codes beside bf16 activations: what the first product's activation gives is rounded, and choices are added
    up in bf16, one after another in any order."""
    assert (activation, quant_type, gate_mode) == ("situv2", "per_1x32", "separated")
    for name in ("AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4"):
        assert os.environ.get(name, "0") != "1", f"{name} rounds activations"
    assert w1.is_shuffled and w2.is_shuffled and w1.dtype is torch.float4_e2m1fn_x2  # type: ignore[attr-defined]
    assert hidden_states.is_contiguous() and hidden_states.dtype is torch.bfloat16
    assert topk_weight.dtype is torch.float32 and topk_ids.dtype is torch.int32
    experts = w1.shape[0]
    assert int(topk_ids.min()) >= 0 and int(topk_ids.max()) < experts, "a choice of no expert"
    first, second = (_weights(w, s) for w, s in ((w1, w1_scale), (w2, w2_scale)))
    out = torch.zeros_like(hidden_states)
    for t, chosen in enumerate(topk_ids.tolist()):
        for j, e in enumerate(chosen):
            inner = gated(first[e] @ hidden_states[t].float(), "situ", beta, linear_beta).to(torch.bfloat16)
            out[t] += (second[e] @ inner.float() * topk_weight[t, j]).to(torch.bfloat16)
    return out


def _weights(codes: Tensor, scales: Tensor) -> list[Tensor]:
    """fp32 [N, K] of each expert."""
    experts, rows, half = codes.shape
    plain = _undone(
        codes.view(torch.uint8), lambda x: shuffle_weight_a16w4(src=x, NLane=16, gate_up=False), codes.shape
    )
    shape = (experts * rows, scales.shape[-1])
    bytes_ = _undone(
        scales.view(torch.uint8), lambda x: shuffle_scale_a16w4(src=x, experts_cnt=experts, gate_up=False), shape
    )
    kept = bytes_.view(experts, rows, -1)[..., : half // 16]
    return [mx_dequantize(plain[e], kept[e].contiguous(), torch.float32) for e in range(experts)]


def fused_recurrent_kda_packed_decode(
    *, mixed_qkv: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    initial_state: Tensor, ssm_state_indices: Tensor, conv_state: Tensor, conv_weight: Tensor, out_gate: Tensor,
    norm_weight: Tensor, norm_eps: float, out: Tensor,
) -> Tensor:  # fmt: skip
    """Slots up to 0 are padding: their rows are not written. States [S, H, V, K] fp32, histories [S, 3 H K, W - 1]."""
    count, heads, dim = g.shape
    width = conv_weight.shape[1]
    assert conv_weight.shape == (3, width, heads * dim) and conv_weight.is_contiguous()
    assert conv_state.shape[1:] == (3 * heads * dim, width - 1) and initial_state.dtype is torch.float32
    assert out_gate.shape == out.shape == (count, heads, dim) and out.stride()[1:] == (dim, 1)
    assert initial_state.stride()[1:] == (dim * dim, dim, 1) and initial_state.stride(0) % dim == 0
    assert mixed_qkv.stride(1) == 1 and g.stride()[1:] == (dim, 1) and ssm_state_indices.stride(-1) == 1
    out.fill_(torch.nan)
    live = ssm_state_indices > 0
    taps = conv_weight.transpose(1, 2).reshape(3 * heads * dim, width)
    made = kda_decode(
        mixed_qkv[live], g[live], beta[live], out_gate[live], taps, A_log, dt_bias, norm_weight,
        conv_state.transpose(1, 2), initial_state, ssm_state_indices[live], lower_bound, norm_eps,
    )  # fmt: skip
    out[live] = made.unflatten(1, (heads, dim))
    return out


def chunk_kda(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float,
    cu_seqlens: Tensor, scale: float, out: Tensor, state_cache: Tensor, state_indices: Tensor,
    has_initial_state: Tensor, out_gate: Tensor, norm_weight: Tensor, norm_eps: float,
) -> tuple[Tensor, None]:  # fmt: skip
    """[1, T, H, 128] with rows at multiples of 16 bytes. Sequences whose slot the pool does not have are passed over;
    one without tokens has no state to read."""
    dim = q.shape[3]
    assert dim == 128 and -5.5 <= lower_bound < 0 and scale == dim**-0.5 and state_cache.dtype is torch.float32
    for x in (q, k, v, g, out_gate, out):
        assert x.shape == q.shape and x.stride()[2:] == (dim, 1) and x.stride(1) % 8 == 0
    assert beta.shape == q.shape[:3] and beta.stride(2) == 1 and state_cache.stride()[1:] == (dim * dim, dim, 1)
    assert A_log.is_contiguous() and dt_bias.is_contiguous() and norm_weight.numel() == dim
    assert cu_seqlens.dtype in (torch.int32, torch.int64) and cu_seqlens.is_contiguous() and state_indices.ndim == 1
    out.fill_(torch.nan)
    decay, write = kda_gate(g[0], beta[0], A_log, dt_bias, lower_bound)
    for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        slot = int(state_indices[n])
        if not 0 <= slot < state_cache.shape[0]:
            continue
        assert last > first, "what the state of a sequence without tokens becomes is not said"
        state = state_cache[slot].clone() if has_initial_state[n] else torch.zeros_like(state_cache[slot])
        for t in range(first, last):
            state, _, row = delta_step(state, q[0, t], k[0, t], v[0, t], decay[t], write[t])
            normed = gated_rms_norm(row.unsqueeze(0), out_gate[0, t : t + 1].float(), norm_weight, norm_eps)
            out[0, t] = normed[0].to(out.dtype)
        state_cache[slot] = state
    return out, None


EMULATORS: dict[Function, Callable[..., Any]] = {
    aiter_rms_norm.NORM: rms_norm,
    aiter_mla_decode.DECODE: mla_decode_fwd,
    aiter_mla_prefill.ATTEND: flash_attn_varlen_func,
    aiter_experts.FUSED: fused_moe,
    aiter_experts.WEIGHTS: shuffle_weight_a16w4,
    aiter_experts.SCALES: shuffle_scale_a16w4,
    aiter_kda_decode.DECODE: fused_recurrent_kda_packed_decode,
    aiter_kda_prefill.CHUNK: chunk_kda,
}


@contextmanager
def emulated() -> Iterator[list[str]]:
    """AITER can be imported, and is these functions under the signatures that are recorded. Gives the names of those
    that are called, as they come."""
    called: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            install(called, patch)
            yield called
    finally:
        loaded.cache_clear()


def install(called: list[str], patch: pytest.MonkeyPatch) -> None:
    """Put the emulators in AITER's place until `patch` is undone."""
    for function, emulator in EMULATORS.items():
        parts = function.module.split(".")
        for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if name not in sys.modules:
                patch.setitem(sys.modules, name, ModuleType(name))
        strict = _strict(function, emulator, called)
        patch.setattr(sys.modules[function.module], function.name, strict, raising=False)
    for name, values in KINDS.items():
        patch.setattr(sys.modules["aiter"], name, values, raising=False)
    loaded.cache_clear()


def _strict(function: Function, emulator: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    """`emulator` under the recorded signature: an argument that is not in it, or one that lacks, is an error."""
    signature = function.records[-1].signature

    def call(**arguments: Any) -> Any:
        signature.bind(**arguments)
        called.append(function.name)
        return emulator(**arguments)

    call.__signature__ = signature
    return call
