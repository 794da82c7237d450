"""FlashInfer as its docstrings describe it, in plain torch; and what the other libraries' fakes share with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from k3hal.backends.nvidia import (
    flashinfer_experts,
    flashinfer_kda_decode,
    flashinfer_kda_prefill,
    flashinfer_mla_decode,
    flashinfer_mla_prefill,
)
from k3hal.dispatch.library import Function
from k3hal.dispatch.ops._kda import delta_step
from k3hal.dispatch.ops.kda_decode import kda_decode
from k3hal.dispatch.ops.kda_gate import kda_gate
from k3hal.dispatch.ops.mla_decode import mla_decode
from k3hal.dispatch.ops.moe_experts import moe_experts
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize

MARK = 0x5A


def dense(*tensors: Tensor) -> None:
    assert all(t.is_contiguous() for t in tensors)


def sequences(out: Tensor, final: Tensor, initial: Tensor, cu_seqlens: Tensor, step: Callable[..., Any]) -> None:
    """`step(state, t)` over each sequence's rows; the final states of empty ones stay as they are."""
    for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        state = initial[n]
        for t in range(first, last):
            state, _, row = step(state, t)
            out[t] = row.to(out.dtype)
        if last > first:
            final[n] = state


def latent_attention(q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, scale: float, kv_lora: int) -> Tensor:
    """q [B, 1, H, D]; rows of no length are left unwritten."""
    assert int(pages.min()) >= 0 and int(pages.max()) < cache.shape[0], "a page that the cache does not have"
    out = mla_decode(q[:, 0], cache, pages, lengths, scale, kv_lora)
    out[lengths == 0] = torch.nan
    return out.unsqueeze(1)


def decode(
    *, query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
    qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: float,
    bmm2_scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """query [B, 1, H, D] in the cache's dtype, cache [P, 1, page, D]."""
    assert kv_lora_rank + qk_rope_head_dim == query.shape[-1] and query.dtype is kv_cache.dtype
    assert not workspace_buffer.any() and bmm2_scale == 1.0 and int(seq_lens.max()) <= max_seq_len
    return latent_attention(query, kv_cache[:, 0], block_tables, seq_lens, bmm1_scale, kv_lora_rank)


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, kv_bounds: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Packed sequences, none without queries or keys; the sums under the softmax as logarithms to base 2, fp32."""
    dense(q, k, v)
    assert q_bounds.dtype is torch.int32 and kv_bounds.dtype is torch.int32 and k.shape[1] == q.shape[1]
    out, lse = torch.full_like(q[..., : v.shape[2]], torch.nan), q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    for (a, b), (c, d) in zip(pairwise(q_bounds.tolist()), pairwise(kv_bounds.tolist()), strict=True):
        assert b > a and d > c and (not causal or b - a == d - c)
        scores = torch.einsum("thd,lhd->thl", q[a:b].float(), k[c:d].float()) * scale
        if causal:
            future = torch.ones(b - a, d - c, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future.unsqueeze(1), -torch.inf)
        out[a:b] = torch.einsum("thl,lhd->thd", scores.softmax(-1), v[c:d].float()).to(q.dtype)
        lse[a:b] = scores.logsumexp(-1) / torch.tensor(2.0).log()
    return out, lse


def trtllm_ragged(
    *, query: Tensor, key: Tensor, value: Tensor, workspace_buffer: Tensor, seq_lens: Tensor, max_q_len: int,
    max_kv_len: int, bmm1_scale: float, bmm2_scale: float, o_sf_scale: float, batch_size: int, window_left: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor, enable_pdl: bool | None, is_causal: bool, return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys of 192 channels and values of 128 in the library; any here."""
    counts = cum_seq_lens_kv[1:] - cum_seq_lens_kv[:-1]
    assert workspace_buffer.dtype is torch.uint8 and return_lse and window_left == -1 and backend == "trtllm-gen"
    assert torch.equal(seq_lens, counts) and max_kv_len == int(counts.max()) and batch_size == counts.numel()
    assert max_q_len == int((cum_seq_lens_q[1:] - cum_seq_lens_q[:-1]).max()) and bmm2_scale == o_sf_scale == 1.0
    return ragged_attention(query, key, value, cum_seq_lens_q, cum_seq_lens_kv, bmm1_scale, is_causal)


def wrapper(*, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> Any:
    """Holds the latest plan."""
    assert float_workspace_buffer.dtype is torch.uint8 and kv_layout == "NHD" and backend == "auto"
    return SimpleNamespace(plan={})


def wrapper_plan(*, self: Any, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, **plan: Any) -> None:
    """Sizes, offsets and the mask of the runs to come."""
    assert plan["num_kv_heads"] == num_qo_heads
    self.plan = {"q_bounds": qo_indptr, "kv_bounds": kv_indptr, "heads": num_qo_heads, **plan}


def wrapper_run(
    *, self: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, lse_base: str
) -> tuple[Tensor, Tensor]:
    """As planned, once."""
    plan, self.plan = self.plan, {}
    assert return_lse and lse_base == "log2" and q.dtype is plan["q_data_type"]
    assert (plan["heads"], plan["head_dim_qk"], plan["head_dim_vo"]) == (*q.shape[1:], v.shape[2])
    return ragged_attention(q, k, v, plan["q_bounds"], plan["kv_bounds"], plan["sm_scale"], plan["causal"])


def fused_kda(
    *, x: Tensor, weight: Tensor, conv_state: Tensor, raw_gate: Tensor, raw_beta: Tensor, A_log: Tensor,
    dt_bias: Tensor, state_indices: Tensor, state: Tensor, output_gate: Tensor, norm_weight: Tensor,
    lower_bound: float | None, norm_eps: float, backend: str,
) -> Tensor:  # fmt: skip
    """One token a row; conv_state [S, C, 3] with channels inner in memory, taps [3, 4, H K]. Slot 0 gives zeros."""
    dense(weight, raw_gate, A_log, dt_bias, state_indices, norm_weight)
    (_, rows, heads, dim), channels = raw_gate.shape, x.shape[1]
    assert rows > 0 and weight.shape == (3, 4, heads * dim) and dt_bias.shape == (heads * dim,)
    assert conv_state.shape[1:] == (channels, 3) and conv_state.stride()[1:] == (1, channels) and x.stride(1) == 1
    assert raw_beta.shape == (1, rows, heads) and state_indices.dtype is torch.int32 and backend == "cute-dsl"
    out = kda_decode(
        x, raw_gate[0], raw_beta[0], output_gate, weight.transpose(1, 2).flatten(0, 1), A_log,
        dt_bias.view(heads, dim), norm_weight, conv_state.transpose(1, 2), state, state_indices, lower_bound, norm_eps,
    )  # fmt: skip
    return out.view(1, rows, heads, dim)


def recurrent_kda(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    initial_state: Tensor, output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    lower_bound: float, cu_seqlens: Tensor, beta_is_logit: bool, backend: str,
) -> tuple[Tensor, None]:  # fmt: skip
    """Raw gate and logits in; states in place. More rows than sequences, which have all rows between them."""
    dense(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    assert {x.dtype for x in (q, k, v, g, beta)} == {torch.bfloat16} and initial_state.dtype is torch.float32
    assert cu_seqlens.dtype is torch.int64 and int(cu_seqlens[-1]) == q.shape[1] > initial_state.shape[0]
    assert cu_seqlens.numel() == initial_state.shape[0] + 1 and backend == "cute-dsl" and not output_final_state
    assert use_qk_l2norm_in_kernel and use_gate_in_kernel and beta_is_logit and -5 <= lower_bound < 0
    assert scale == q.shape[-1] ** -0.5
    decay, write = kda_gate(g[0], beta[0], A_log, dt_bias, lower_bound)
    out = torch.full_like(v, torch.nan)
    sequences(
        out[0], initial_state, initial_state.clone(), cu_seqlens,
        lambda s, t: delta_step(s, q[0, t], k[0, t], v[0, t], decay[t], write[t]),
    )  # fmt: skip
    return out, None


def interleave(*, weight: Tensor, quant_type: str) -> Tensor:
    """A layout of the library's own: other bytes, the same shape."""
    dense(weight)
    assert quant_type == "fp4"
    return weight.flip(-1) ^ MARK


def fold(*, scales: Tensor, group_size: int) -> Tensor:
    """Each expert's scales in whole words, in an order of the library's own."""
    dense(scales)
    assert group_size == 32
    flat = scales.flip(1).flatten(1)
    return pad(flat, (0, -flat.shape[1] % 4))


def _unfolded(codes: Tensor, words: Tensor) -> Tensor:
    """Plain weights [E, N, K] of what `interleave` and `fold` made."""
    experts, rows, half = codes.shape
    scales = words.view(torch.uint8)[:, : rows * half // 16].view(experts, rows, -1).flip(1)
    return mx_dequantize((codes ^ MARK).flip(-1), scales, torch.float32)


def experts(
    *, input: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor, fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor, output_dtype: torch.dtype, quant_scales: list[Tensor], output: Tensor,
    use_w4_group_scaling: bool, activation_type: int, use_fused_finalize: bool, situ_beta: Tensor | None,
    situ_linear_beta: Tensor | None,
) -> None:  # fmt: skip
    """First product's rows [up; gate]; a choice of no expert here is none."""
    dense(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output)
    assert input.shape[0] > 0 and output.dtype is output_dtype and not use_fused_finalize
    assert token_selected_experts.dtype is torch.int32 and token_final_scales.dtype is torch.float32
    w13, w2 = fc1_expert_weights, fc2_expert_weights
    if use_w4_group_scaling:
        assert all(s.dtype is torch.int32 for s in quant_scales)
        w13, w2 = (_unfolded(w, s) for w, s in zip((w13, w2), quant_scales, strict=True))
    betas = [4.0, 25.0]
    if situ_beta is not None and situ_linear_beta is not None:
        betas = [float(each[0]) for each in (situ_beta, situ_linear_beta)]
    name = {3: "silu", 10: "situ"}[activation_type]
    gate_first = torch.cat(w13.chunk(2, dim=1)[::-1], dim=1)
    output.copy_(moe_experts(input, token_selected_experts, token_final_scales, gate_first, w2, name, *betas))


FLASHINFER: dict[Function, Callable[..., Any]] = {
    flashinfer_mla_decode.DECODE: decode,
    flashinfer_mla_prefill.RAGGED: trtllm_ragged,
    flashinfer_mla_prefill.WRAPPER: wrapper,
    flashinfer_mla_prefill.PLAN: wrapper_plan,
    flashinfer_mla_prefill.RUN: wrapper_run,
    flashinfer_kda_decode.DECODE: fused_kda,
    flashinfer_kda_prefill.RECURRENT: recurrent_kda,
    flashinfer_experts.INTERLEAVE: interleave,
    flashinfer_experts.FOLD: fold,
    flashinfer_experts.EXPERTS: experts,
}
