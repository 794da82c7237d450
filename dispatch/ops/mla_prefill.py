"""Causal NoPE MLA attention of a chunk of new tokens over the paged latent cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._paged import DTYPES, K3_TP8, MlaShape, cached_rows, paged_cache


def mla_prefill(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """Attention `[T, H, Dv]` of packed chunks; token `i` of sequence `n` sees its first `context_lens[n] + i + 1` rows.

    q [T, H, Dn + Dr] (x dtype; nope channels first), kv_cache [P, page, R + Dr] (x dtype or float8_e4m3fn, page stride
    arbitrary) already holding the chunk's own rows, page_table int32 [N, maxpages], cu_seqlens int32 [N + 1],
    context_lens int32 [N], w_uk [H, Dn, R], w_uv [H, Dv, R] (x dtype). With `c | p` a cached row: k = [w_uk c | p],
    v = w_uv c, softmax(scale * q k) in fp32, fp32 accumulation, one cast to x dtype. Nothing mutated. Cache rows beyond
    a sequence's length and page-table entries beyond need are garbage; rows of q beyond cu_seqlens[-1] are padding:
    never read, output zero. Source: k3_architecture.md §3.
    """
    nope, out = w_uk.shape[1], q.new_zeros(*q.shape[:2], w_uv.shape[1])
    for n, context in enumerate(context_lens.tolist()):
        first, last = cu_seqlens[n : n + 2].tolist()
        if first == last:
            continue
        chunk, length = q[first:last].float(), context + last - first
        rows = cached_rows(kv_cache, page_table[n], length)
        latent, k_pe = rows[:, : w_uk.shape[2]], rows[:, w_uk.shape[2] :]
        k_nope = torch.einsum("hdr,lr->lhd", w_uk.float(), latent)
        scores = torch.einsum("thd,lhd->htl", chunk[..., :nope], k_nope)
        scores = (scores + torch.einsum("thd,ld->htl", chunk[..., nope:], k_pe)) * scale
        future = torch.arange(length, device=q.device) > context + torch.arange(last - first, device=q.device)[:, None]
        attention = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        value = torch.einsum("hdr,lr->lhd", w_uv.float(), latent)
        out[first:last] = torch.einsum("htl,lhd->thd", attention, value).to(q.dtype)
    return out


def inputs(
    g: torch.Generator,
    shape: MlaShape,
    dtype: str,
    contexts: Sequence[int],
    chunks: Sequence[int],
    *,
    padding: int = 0,
    strided: bool = False,
    in_order: bool = False,
    q_scale: float = 1.0,
) -> dict[str, Any]:
    """Arguments for sequences with `contexts` cached and `chunks` new tokens, and `padding` NaN rows after them."""
    kind, tokens = DTYPES[dtype], sum(chunks)
    lengths = [a + b if b else a for a, b in zip(contexts, chunks, strict=True)]
    cache, table = paged_cache(g, shape, lengths, strided=strided, in_order=in_order)
    q = torch.randn(tokens + padding, shape.heads, shape.nope + shape.rope, generator=g) * q_scale
    q[tokens:] = torch.nan
    up = torch.randn(shape.heads, shape.nope + shape.v, shape.kv_lora, generator=g) * shape.kv_lora**-0.5
    return {
        "q": q.to(kind),
        "kv_cache": cache,
        "page_table": table,
        "cu_seqlens": torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "w_uk": up[:, : shape.nope].to(kind).contiguous(),
        "w_uv": up[:, shape.nope :].to(kind).contiguous(),
        "scale": (shape.nope + shape.rope) ** -0.5,
    }


def _sample(
    name: str, shape: MlaShape, dtype: str, contexts: list[int], chunks: list[int], tags: set[str], **kw: Any
) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        return inputs(g, shape, dtype, contexts, chunks, **kw)

    return Sample(name, make, shape.dims(), dtype, "prefill", frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, page edges, context with and without new tokens, padding, fp8, long context and K3 shapes of one rank."""
    f32, bf16 = MlaShape(), MlaShape(kv_dtype="bfloat16")
    yield _sample("one_token", f32, "float32", [0], [1], {"tiny"})
    yield _sample("two", f32, "float32", [0, 5], [3, 4], {"tiny"})
    yield _sample("page_edges", bf16, "bfloat16", [3, 4, 5, 0, 7], [1, 4, 3, 5, 9], {"edge"})
    yield _sample("empty_sequences", f32, "float32", [0, 6, 9, 2], [0, 2, 0, 3], {"must", "edge", "adversarial"})
    yield _sample("padding", bf16, "bfloat16", [2, 0], [3, 1], {"edge", "adversarial"}, padding=4)
    yield _sample("nothing", f32, "float32", [0], [0], {"edge", "adversarial"}, padding=2)
    yield _sample("strided", f32, "float32", [9, 0], [5, 2], {"must", "edge"}, strided=True)
    yield _sample("in_order", f32, "float32", [17], [6], {"edge"}, in_order=True)
    yield _sample("fp8", replace(f32, kv_dtype="float8_e4m3fn"), "bfloat16", [11, 0], [5, 6], {"tiny"})
    yield _sample("long_context", replace(f32, page_tokens=64), "float32", [5000], [33], {"edge"})
    yield _sample("long_chunk", replace(f32, page_tokens=64), "float32", [100], [1100], {"must", "edge"})
    yield _sample("hot", f32, "float32", [9, 0], [5, 12], {"must", "edge", "adversarial"}, q_scale=100.0)
    yield _sample("k3_tail", K3_TP8, "bfloat16", [300, 0], [17, 65], {"k3"})
    yield _sample("k3_2k", K3_TP8, "bfloat16", [0, 4096], [2048, 2048], {"k3", "device"})
    yield _sample("k3_tp1", replace(K3_TP8, heads=96), "bfloat16", [1000], [1023], {"k3", "device"})


def cost(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Cost:
    """Up-projection of every visible row once, and the visible half of scores and values."""
    heads, nope, rank = w_uk.shape
    v_dim = w_uv.shape[1]
    new = (cu_seqlens[1:] - cu_seqlens[:-1]).double()
    rows = float((context_lens.double() + new)[new > 0].sum())
    pairs = float((new * context_lens.double() + new * (new + 1) / 2).sum())
    flops = 2.0 * heads * (rows * rank * (nope + v_dim) + pairs * (q.shape[2] + v_dim))
    moved = rows * kv_cache.shape[2] * kv_cache.element_size() + w_uk.nbytes + w_uv.nbytes
    return Cost(flops, moved + float(new.sum()) * heads * (q.shape[2] + v_dim) * q.element_size())


OPERATOR = Operator(
    reference=mla_prefill,
    family="mla",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    weights=("w_uk", "w_uv"),
    invariants=("chunk_split", "batch_composition", "padding_rows", "decode_equals_prefill", "far"),
)
