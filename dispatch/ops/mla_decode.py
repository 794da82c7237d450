"""Absorbed MLA attention of one token per sequence over the paged latent cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._paged import DTYPES, K3_TP8, MlaShape, cached_rows, large_paged_cache, paged_cache


def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """Latent attention output `[N, H, R]` for absorbed queries `q = [w_uk^T q_nope | q_pe]`, R = `kv_lora`.

    q [N, H, R + Dr] (x dtype), kv_cache [P, page, R + Dr] (x dtype or float8_e4m3fn, page stride arbitrary),
    page_table int32 [N, maxpages], seq_lens int32 [N] counting the new token, whose row is already cached.
    out = softmax(scale * q row) over the first seq_lens[n] rows, times their first R channels; fp32 softmax and
    accumulation, one cast to x dtype. Nothing mutated. seq_len 0 is a padding row: output zero, its q and page table
    never read. Cache rows beyond the length and page-table entries beyond need are garbage.
    Source: k3_architecture.md §3.
    """
    out = q.new_zeros(*q.shape[:2], kv_lora)
    for n, length in enumerate(seq_lens.tolist()):
        if length:
            rows = cached_rows(kv_cache, page_table[n], length)
            attention = (q[n].float() @ rows.T * scale).softmax(dim=-1)
            out[n] = (attention @ rows[:, :kv_lora]).to(q.dtype)
    return out


def inputs(
    g: torch.Generator,
    shape: MlaShape,
    dtype: str,
    lengths: Sequence[int],
    *,
    strided: bool = False,
    in_order: bool = False,
    q_scale: float = 1.0,
    large: bool = False,
) -> dict[str, Any]:
    """Arguments for sequences of these lengths; the q of an empty one is NaN.

    A large `q_scale` makes scores whose exp overflows; `large` says that the cache has gigabytes.
    """
    if large:
        cache, table = large_paged_cache(g, shape, lengths)
    else:
        cache, table = paged_cache(g, shape, lengths, strided=strided, in_order=in_order)
    q = torch.randn(len(lengths), shape.heads, shape.entry, generator=g) * q_scale
    q[[length == 0 for length in lengths]] = torch.nan
    return {
        "q": q.to(DTYPES[dtype]),
        "kv_cache": cache,
        "page_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "scale": (shape.nope + shape.rope) ** -0.5,
        "kv_lora": shape.kv_lora,
    }


def _sample(name: str, shape: MlaShape, dtype: str, lengths: list[int], tags: set[str], **kw: Any) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        return inputs(g, shape, dtype, lengths, **kw)

    return Sample(name, make, shape.dims(), dtype, "decode", frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, page edges, empty and very unequal sequences, pages in order and not, fp8, and K3 shapes of one rank."""
    f32, bf16 = MlaShape(), MlaShape(kv_dtype="bfloat16")
    yield _sample("one", f32, "float32", [1], {"tiny"})
    yield _sample("three", bf16, "bfloat16", [3, 9, 6], {"tiny"})
    yield _sample("page_edges", f32, "float32", [3, 4, 5, 7, 8, 9], {"edge"})
    yield _sample("empty_rows", f32, "float32", [0, 5, 0, 1], {"edge", "adversarial"})
    yield _sample("all_empty", bf16, "bfloat16", [0, 0], {"edge", "adversarial"})
    yield _sample("unequal", f32, "float32", [1, 700, 2, 65, 0, 64, 63], {"edge", "adversarial"})
    yield _sample("in_order", f32, "float32", [37], {"edge"}, in_order=True)
    yield _sample("in_order_strided", bf16, "bfloat16", [36, 3], {"edge"}, strided=True, in_order=True)
    yield _sample("strided", f32, "float32", [10, 22], {"must", "edge"}, strided=True)
    yield _sample("fp8", replace(f32, kv_dtype="float8_e4m3fn"), "bfloat16", [5, 30, 0], {"tiny"})
    yield _sample("many", replace(f32, page_tokens=16), "float32", [80 + n for n in range(65)], {"edge"})
    yield _sample("long", replace(f32, page_tokens=64), "float32", [20_000, 3], {"edge"})
    yield _sample("hot", f32, "float32", [9, 30], {"must", "edge", "adversarial"}, q_scale=100.0)
    yield _sample("k3_small", K3_TP8, "bfloat16", [100, 1, 129], {"k3"})
    yield _sample("k3_6_heads", replace(K3_TP8, heads=6), "bfloat16", [65], {"k3"})
    for heads in (24, 64, 96):
        yield _sample(f"k3_{heads}_heads", replace(K3_TP8, heads=heads), "bfloat16", [130, 0, 65], {"k3", "edge"})
    fp8 = replace(K3_TP8, kv_dtype="float8_e4m3fn")
    yield _sample("k3_fp8", fp8, "bfloat16", [0, 700, 1, 64], {"k3", "edge"}, strided=True)
    yield _sample("k3_hot", K3_TP8, "bfloat16", [300, 65], {"k3", "adversarial"}, q_scale=100.0)
    yield _sample("k3_fp8_hot", fp8, "bfloat16", [600], {"k3", "adversarial"}, q_scale=100.0)
    yield _sample("k3_64x4k", K3_TP8, "bfloat16", [4096 - n for n in range(64)], {"k3", "device"})
    yield _sample("k3_128k", K3_TP8, "bfloat16", [131_071, 1], {"k3", "device"})
    for batch in (1, 16, 64):
        lengths = [131_072 - n for n in range(batch)]
        yield _sample(f"bench_128k_batch_{batch}", K3_TP8, "bfloat16", lengths, {"device", "bench"}, large=True)
    many, few = replace(K3_TP8, heads=96), replace(K3_TP8, heads=6)
    for name, shape, batch in (("fp8", fp8, 1), ("fp8", fp8, 16), ("6_heads", few, 1), ("96_heads", many, 1)):
        lengths = [131_072 - n for n in range(batch)]
        yield _sample(f"bench_128k_{name}_batch_{batch}", shape, "bfloat16", lengths, {"device", "bench"}, large=True)


def cost(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Cost:
    """Every cached row read once; scores over R + Dr channels, values over R."""
    rows = float(seq_lens.sum())
    flops = 2.0 * rows * q.shape[1] * (q.shape[2] + kv_lora)
    moved = rows * kv_cache.shape[2] * kv_cache.element_size()
    return Cost(flops, moved + q.shape[0] * q.shape[1] * (q.shape[2] + kv_lora) * q.element_size())


OPERATOR = Operator(
    reference=mla_decode,
    family="mla",
    outputs={"out": "matmul"},
    samples=samples,
    cost=cost,
    invariants=("batch_composition", "padding_rows", "decode_equals_prefill", "far"),
)
