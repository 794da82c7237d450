"""torch_npu's and vllm-ascend's operators as their documents describe them, in plain torch.

Sources: the documents of CANN's operators (ops-transformer of December 2025, ops-nn of August 2026), the schemas of
torch_npu 2.14.0, vllm-ascend at cf0baa3 (README files and the checks before its kernels). What a document leaves open
is filled with NaN; what it forbids is an assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.ascend import npu_experts, npu_kda, npu_light, npu_mla
from k3hal.dispatch.library import Function

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNK = 64


def dense(*tensors: Tensor) -> None:
    assert all(t.is_contiguous() for t in tensors), "a tensor with gaps"


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """fp32 inside, one rounding; both of one dtype, and not empty."""
    dense(input, gamma)
    assert input.numel() and gamma.dtype is input.dtype and gamma.shape == input.shape[-1:]
    rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


def gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, k_group: int = 1, group_count: int = 1,
    group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0, routed_scaling_factor: float = 1.0,
    eps: float = 1e-20, **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One group, sigmoids; the bias decides the choice alone, and the chosen are divided by their sum."""
    assert x.ndim == 2 and x.numel() and x.shape[1] <= 2048 and 1 <= k <= x.shape[1]
    assert bias is not None and bias.dtype is x.dtype and bias.shape == x.shape[1:]
    assert (k_group, group_count, group_select_mode, renorm, norm_type) == (1, 1, 0, 0, 1)
    scores = torch.sigmoid(x.float())
    ids = torch.sort(scores + bias.float(), dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(1, ids)
    y = chosen / (chosen.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return y.to(x.dtype), ids.int(), torch.full_like(scores, torch.nan)


def sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor | None, sparse_indices: Tensor, scale_value: float, *,
    block_table: Tensor | None = None, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3,
    attention_mode: int = 0, **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries T N D, cache in pages of one head; of every query the blocks that its indices name, valid ones first."""
    assert (layout_query, layout_kv, attention_mode) == ("TND", "PA_BSND", 2) and sparse_mode in (0, 3)
    assert value is not None and block_table is not None and actual_seq_lengths_query is not None
    assert query_rope is not None and key_rope is not None and actual_seq_lengths_kv is not None
    dense(query, key, value, sparse_indices, query_rope, key_rope)
    tokens, heads, width = query.shape
    page = key.shape[1]
    assert heads in POWERS and width == 512 and query_rope.shape == (tokens, heads, 64) and tokens > 0
    assert key.shape[2:] == (1, 512) and key_rope.shape == (key.shape[0], page, 1, 64) and value.shape == key.shape
    assert page % 16 == 0 and page <= 1024 and page % sparse_block_size == 0 and sparse_block_size in POWERS
    ints = (block_table, sparse_indices, actual_seq_lengths_kv, actual_seq_lengths_query)
    assert all(x.dtype is torch.int32 for x in ints) and key.dtype is query.dtype is query_rope.dtype is key_rope.dtype
    assert actual_seq_lengths_query.tolist() == list(range(1, tokens + 1)), "one query a sequence"
    out = torch.full_like(query, torch.nan)
    for n, length in enumerate(actual_seq_lengths_kv.tolist()):
        chosen = sparse_indices[n, 0].tolist()
        blocks = [b for b in chosen if b >= 0]
        assert chosen[: len(blocks)] == blocks, "a valid index behind an invalid one"
        rows = [i for b in blocks for i in range(b * sparse_block_size, (b + 1) * sparse_block_size) if i < length]
        if rows:
            at = torch.tensor(rows)
            pages = block_table[n].long()[at // page]
            k, rope = key[pages, at % page, 0].float(), key_rope[pages, at % page, 0].float()
            scores = (query[n].float() @ k.T + query_rope[n].float() @ rope.T) * scale_value
            out[n] = (scores.softmax(-1) @ value[pages, at % page, 0].float()).to(query.dtype)
    nothing = query.new_full((1,), torch.nan, dtype=torch.float32)
    return out, nothing, nothing


def fused_infer_decode(
    query: Tensor, key: Tensor, value: Tensor, *, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    actual_seq_kvlen: list[int] | None = None, block_table: Tensor | None = None, num_query_heads: int = 1,
    num_key_value_heads: int = 0, softmax_scale: float = 1.0, input_layout: str = "BSH", sparse_mode: int = 0,
    block_size: int = 0, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """MLA over pages, B N S D: latents of 512 as keys and values, 64 more channels beside them; lengths on the host."""
    assert query_rope is not None and key_rope is not None and block_table is not None and actual_seq_kvlen is not None
    dense(query, key, value, query_rope, key_rope)
    batch, heads, steps, width = query.shape
    assert (input_layout, sparse_mode, num_key_value_heads, steps, width) == ("BNSD", 0, 1, 1, 512)
    assert heads == num_query_heads and heads in POWERS and query_rope.shape == (batch, heads, 1, 64)
    assert key.shape[1:] == (1, block_size, 512) and key_rope.shape[1:] == (1, block_size, 64)
    assert block_size % 16 == 0 and block_table.dtype is torch.int32 and len(actual_seq_kvlen) == batch
    out = torch.full_like(query, torch.nan)
    for n, length in enumerate(actual_seq_kvlen):
        assert 0 < length <= block_table.shape[1] * block_size
        at = torch.arange(length)
        pages = block_table[n].long()[at // block_size]
        k, rope = key[pages, 0, at % block_size].float(), key_rope[pages, 0, at % block_size].float()
        scores = (query[n, :, 0].float() @ k.T + query_rope[n, :, 0].float() @ rope.T) * softmax_scale
        out[n, :, 0] = (scores.softmax(-1) @ value[pages, 0, at % block_size].float()).to(query.dtype)
    return out, torch.zeros(1)


def fused_infer_prefill(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None, actual_seq_lengths_kv: list[int] | None = None, num_heads: int = 1,
    scale: float = 1.0, input_layout: str = "BSH", num_key_value_heads: int = 0, sparse_mode: int = 0,
    softmax_lse_flag: bool = False, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Packed sequences T N D of bf16, keys of 192 channels and values of 128; sums of lengths on the host. The
    logarithms of the sums are natural ones, [T, N, 1]."""
    dense(query, key, value)
    assert actual_seq_lengths is not None and actual_seq_lengths_kv is not None and input_layout == "TND"
    assert query.dtype is torch.bfloat16 and query.shape[1:] == (num_heads, 192) and value.shape[2] == 128
    assert num_key_value_heads == num_heads == key.shape[1] and softmax_lse_flag
    assert actual_seq_lengths[-1] == query.shape[0] and actual_seq_lengths_kv[-1] == key.shape[0]
    assert (sparse_mode == 3) == (atten_mask is not None)
    assert atten_mask is None or torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    out = torch.full((*query.shape[:2], 128), torch.nan, dtype=query.dtype)
    lse = torch.full((*query.shape[:2], 1), torch.inf)
    bounds = zip(pairwise((0, *actual_seq_lengths)), pairwise((0, *actual_seq_lengths_kv)), strict=True)
    for (a, b), (c, d) in bounds:
        scores = torch.einsum("thd,lhd->thl", query[a:b].float(), key[c:d].float()) * scale
        if sparse_mode == 3:
            seen = torch.arange(d - c) <= torch.arange(b - a)[:, None] + (d - c) - (b - a)
            scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        out[a:b] = torch.einsum("thl,lhd->thd", scores.softmax(-1), value[c:d].float()).to(query.dtype)
        lse[a:b, :, 0] = scores.logsumexp(-1)
    return out, lse


def format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """FP4 numbers in fp32, for products with bf16 (15): blocks of 16 by 16, of which those of a column follow each
    other. The shape says nothing of it."""
    dense(input)
    assert input.dtype is torch.float32 and (acl_format, customize_dtype, input_dtype) == (29, 15, None)
    experts, k, n = input.shape
    return input.view(experts, k // 16, 16, n // 16, 16).permute(0, 3, 1, 2, 4).reshape(experts, k, n)


def int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """The 950's: FP4 numbers in fp32, as they lie, eight codes to a float32."""
    dense(weight)
    assert weight.dtype is torch.float32 and inner_k_tiles == 0 and weight.shape[-1] % 8 == 0
    codes = torch.bucketize(weight.abs(), torch.tensor(E2M1[:8]), out_int32=True) + 8 * (weight < 0)
    assert torch.equal(torch.tensor(E2M1)[codes], weight)
    eight = codes.to(torch.uint8).unflatten(-1, (-1, 4, 2))
    return (eight[..., 0] | eight[..., 1] << 4).view(torch.float32).squeeze(-1)


def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None, group_list: Tensor | None = None, split_item: int | None = 0,
    group_type: int | None = None, group_list_type: int | None = 0, **others: Any,
) -> list[Tensor]:  # fmt: skip
    """One tensor of rows sorted by group, one of weights [E, K, N]; int64 counts. Codes are eight to an int32 along N,
    the lowest bits first, signed; their scales, bf16 [E, G, N], are for K / G rows each. MXFP4 is eight to a float32,
    as `int4pack` leaves it, with scales E8M0 of 32 rows and no offsets. Rows behind the last group stay unwritten."""
    assert len(x) == len(weight) == 1 and group_list is not None and group_list.dtype is torch.int64
    assert (split_item, group_type, group_list_type) == (2, 0, 1) and not any(v for v in others.values() if v)
    rows, given = x[0], weight[0]
    dense(rows, given)
    experts = given.shape[0]
    assert experts <= 1024 and group_list.shape == (experts,) and rows.dtype is torch.bfloat16
    if given.dtype is torch.int32:
        assert antiquant_scale is not None and antiquant_offset is not None
        scale, offset = antiquant_scale[0], antiquant_offset[0]
        dense(scale, offset)
        assert scale.dtype is offset.dtype is torch.bfloat16 and scale.shape == offset.shape and not bool(offset.any())
        bits = given.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
        values = torch.where(bits > 7, bits - 16, bits).flatten(-2).float()
        assert values.shape[2] == scale.shape[2] and values.shape[1] % scale.shape[1] == 0
        each = values.shape[1] // scale.shape[1]
        given = (values.unflatten(1, (-1, each)) * scale.float().unsqueeze(2)).flatten(1, 2)
    elif given.dtype is torch.float32:
        assert antiquant_scale is not None and antiquant_offset is None and antiquant_scale[0].dtype is torch.uint8
        dense(antiquant_scale[0])
        k, n = given.shape[1], 8 * given.shape[2]
        assert k % 64 == 0 and n % 64 == 0 and antiquant_scale[0].shape == (experts, k // 32, n)
        bits = given.view(torch.int32).unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
        values = torch.tensor(E2M1)[bits.flatten().long()].view(experts, n // 16, k // 16, 16, 16)
        values = values.permute(0, 2, 3, 1, 4).reshape(experts, k // 32, 32, n)
        scale = torch.exp2(antiquant_scale[0].float() - 127).masked_fill(antiquant_scale[0] == 255, torch.nan)
        given = (values * scale.unsqueeze(2)).flatten(1, 2)
    else:
        assert given.dtype is rows.dtype and antiquant_scale is None
    assert given.shape[1] == rows.shape[1] and int(group_list.sum()) <= rows.shape[0]
    out = torch.full((rows.shape[0], given.shape[2]), torch.nan, dtype=rows.dtype)
    first = 0
    for expert, count in enumerate(group_list.tolist()):
        out[first : first + count] = (rows[first : first + count].float() @ given[expert].float()).to(rows.dtype)
        first += count
    return [out]


def _delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, ...]:
    """One token, states [H, V, K] in fp32: decay, correct, read."""
    decayed = state * g.exp().unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v.float() - (decayed * k.float().unsqueeze(-2)).sum(-1))
    new = decayed + u.unsqueeze(-1) * k.float().unsqueeze(-2)
    return new, (new * (q.float() * scale).unsqueeze(-2)).sum(-1)


def _gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor, safe: bool, lower: float) -> Tensor:
    shifted = raw.float() + dt_bias.view(raw.shape[-2:])
    rate = a_log.exp().unsqueeze(-1)
    return lower * torch.sigmoid(rate * shifted) if safe else -rate * torch.nn.functional.softplus(shifted)


def recurrent_kda(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
    ssm_state_indices: Tensor, A_log: Tensor, dt_bias: Tensor, *, num_accepted_tokens: Tensor | None = None,
    scale: float = 128**-0.5, use_qk_l2norm_in_kernel: bool = True, use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = True,
    lower_bound: float = -5.0,
) -> Tensor:  # fmt: skip
    """Packed tokens T H D, at most eight a sequence, states [slots, H, V, K] in place: dense inside, any gaps between.
    Its L2 norm has no epsilon. Slot 0 is a slot as any other; rows of no sequence stay unwritten."""
    dense(query, key, value, gate, beta, A_log, dt_bias)
    assert query.dtype is key.dtype is value.dtype is torch.bfloat16 and query.ndim == 3 and query.shape[0] > 0
    assert query.shape[2] == 128 and value.shape[2] in (128, 256) and value.shape[1] <= 256
    assert initial_state.dtype in (torch.float32, torch.bfloat16) and initial_state[0, 0].is_contiguous()
    assert A_log.dtype is dt_bias.dtype is torch.float32 and num_accepted_tokens is None and not allow_neg_eigval
    assert not safe_gate or -5 <= lower_bound < 0
    assert ssm_state_indices.ndim == 1 and ssm_state_indices.numel() >= query.shape[0]
    out = torch.full_like(value, torch.nan)
    for first, last in pairwise(cu_seqlens.tolist()):
        assert 0 <= last - first <= 8
        for t in range(first, last):
            slot = int(ssm_state_indices[t])
            q, k = query[t].float(), key[t].float()
            if use_qk_l2norm_in_kernel:
                q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
            raw = gate[t].float()
            g = _gate(raw, A_log, dt_bias, safe_gate, lower_bound) if use_gate_in_kernel else raw
            b = torch.sigmoid(beta[t].float()) if use_beta_sigmoid_in_kernel else beta[t].float()
            new, row = _delta(initial_state[slot].float(), q, k, value[t], g, b, scale)
            initial_state[slot], out[t] = new.to(initial_state.dtype), row.to(out.dtype)
    return out


def _offsets(cu_seqlens: list[int] | None, tokens: int) -> list[tuple[int, int]]:
    """The sequences; every row is some one's, and none is empty: of such the caller has to make do without."""
    assert cu_seqlens is not None and cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens
    assert all(b > a for a, b in pairwise(cu_seqlens))
    return list(pairwise(cu_seqlens))


def kda_gate_cumsum(
    g: Tensor, chunk_size: int, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    cu_seqlens: list[int] | None = None, use_gate_in_kernel: bool | None = False, safe_gate: bool | None = False,
    lower_bound: float | None = -5.0, layout: str = "BSND",
) -> Tensor:  # fmt: skip
    """fp32 sums of the log decays from the start of each chunk, [1, T, H, K]; of raw gates only bounded ones."""
    dense(g)
    assert layout == "BSND" and g.shape[0] == 1 and chunk_size == CHUNK and g.shape[3] <= 256
    assert bool(use_gate_in_kernel) == bool(safe_gate)
    decay = g[0].float()
    if use_gate_in_kernel:
        assert A_log is not None and dt_bias is not None and lower_bound is not None and -5 <= lower_bound < 0
        assert A_log.dtype is torch.float32 and A_log.shape == g.shape[2:3]
        decay = _gate(g[0], A_log, dt_bias, True, lower_bound)
    out = torch.empty_like(decay)
    for first, last in _offsets(cu_seqlens, g.shape[1]):
        for start in range(first, last, CHUNK):
            out[start : min(last, start + CHUNK)] = decay[start : min(last, start + CHUNK)].cumsum(0)
    return out.unsqueeze(0)


def chunk_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, beta: Tensor, scale: float, chunk_size: int, layout: str = "BSND", *,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, cu_seqlens: list[int] | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """No norm inside; gates are sums from a chunk's start; states [N, H, K, V], the key first, fp32."""
    dense(q, k, v, gk, beta)
    assert initial_state is not None and initial_state.dtype is torch.float32 and output_final_state
    assert layout == "BSND" and q.shape[0] == 1 and q.dtype is k.dtype is v.dtype is torch.bfloat16
    heads, width, values = v.shape[2], q.shape[3], v.shape[3]
    assert chunk_size == CHUNK and heads <= 128 and not any(others.values())
    assert width % 16 == 0 and values % 16 == 0 and width * values >= CHUNK * (width + values), "outside its template"
    sequences = _offsets(cu_seqlens, q.shape[1])
    assert initial_state.shape == (len(sequences), heads, width, values)
    out, final = torch.full_like(v, torch.nan), torch.full_like(initial_state, torch.nan)
    for n, (first, last) in enumerate(sequences):
        state = initial_state[n].mT
        for t in range(first, last):
            before = gk[0, t - 1] if (t - first) % CHUNK else torch.zeros_like(gk[0, t])
            state, row = _delta(state, q[0, t], k[0, t], v[0, t], gk[0, t] - before, beta[0, t].float(), scale)
            out[0, t] = row.to(out.dtype)
        final[n] = state.mT
    empty = q.new_empty(0)
    return out, final, gk, *[empty] * 8, initial_state


EMULATORS: dict[Function, tuple[Callable[..., Any], str]] = {
    npu_light.RMS_NORM: (rms_norm, "(Tensor, Tensor)"),
    npu_light.TOP_K: (gating_top_k, "(Tensor, Tensor, Tensor)"),
    npu_mla.SPARSE: (sparse_flash_attention, "(Tensor, Tensor, Tensor)"),
    npu_mla.FUSED_DECODE: (fused_infer_decode, "(Tensor, Tensor)"),
    npu_mla.FUSED_PREFILL: (fused_infer_prefill, "(Tensor, Tensor)"),
    npu_experts.PRODUCT: (grouped_matmul, "Tensor[]"),
    npu_experts.REORDERED: (format_cast, "Tensor"),
    npu_experts.PACKED: (int4pack, "Tensor"),
    npu_kda.RECURRENT: (recurrent_kda, "Tensor"),
    npu_kda.GATE: (kda_gate_cumsum, "Tensor"),
    npu_kda.CHUNKS: (chunk_kda_fwd, f"({', '.join(['Tensor'] * 12)})"),
}
