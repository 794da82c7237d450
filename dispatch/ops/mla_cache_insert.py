"""Writes new tokens' MLA entries (normed latent and k_pe) into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._paged import DTYPES, K3_TP8, MlaShape, into_pages

FP8_MAX = 448.0


def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
    """Write row `t` of `[latent | k_pe]` to cache row `rows[t]`.

    latent [T, R], k_pe [T, Dr] (x dtype, rows may be strided), kv_cache [P, page, R + Dr] (mutated; x dtype or
    float8_e4m3fn with scale 1, saturating at +-448; page stride arbitrary), rows int64 [T] = page * page tokens +
    offset, unique where not negative. A negative row is padding: its inputs may be garbage and nothing is written.
    Source: k3_architecture.md §3.
    """
    keep = rows >= 0
    entries = torch.cat([latent[keep], k_pe[keep]], dim=-1)
    if kv_cache.dtype == torch.float8_e4m3fn:
        entries = entries.float().clamp(-FP8_MAX, FP8_MAX)
    page_tokens = kv_cache.shape[1]
    kv_cache[rows[keep] // page_tokens, rows[keep] % page_tokens] = entries.to(kv_cache.dtype)


def _sample(name: str, shape: MlaShape, dtype: str, rows: list[int], pages: int, tags: set[str]) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        tokens, kind = len(rows), DTYPES[dtype]
        fused = torch.randn(tokens, shape.entry + 5, generator=g) * (300 if "fp8" in name else 100)
        fused[[row < 0 for row in rows]] = torch.nan
        fused = fused.to(kind)
        cache = torch.randn(pages, shape.page_tokens, shape.entry, generator=g)
        cache[0] = torch.nan
        return {
            "latent": fused[:, : shape.kv_lora].contiguous(),
            "k_pe": fused[:, shape.kv_lora : shape.entry],
            "kv_cache": into_pages(cache, DTYPES[shape.kv_dtype], "strided" in name),
            "rows": torch.tensor(rows, dtype=torch.int64),
        }

    return Sample(name, make, shape.dims(), dtype, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Tiny, padded, fp8 with saturation, strided pages, and a K3 prefill step."""
    small, fp8, bf16 = MlaShape(), MlaShape(kv_dtype="float8_e4m3fn"), MlaShape(kv_dtype="bfloat16")
    yield _sample("one", small, "float32", [7], 3, {"tiny"})
    yield _sample("scattered", bf16, "bfloat16", [11, 4, 5, 8], 3, {"tiny"})
    yield _sample("padding", small, "float32", [-1, 6, -1, 9, -7], 3, {"tiny", "adversarial"})
    yield _sample("all_padding", small, "float32", [-1, -1], 3, {"edge", "adversarial"})
    yield _sample("strided", small, "float32", [4, 5, 6, 7, 8, 11], 3, {"edge"})
    yield _sample("strided_padding", bf16, "bfloat16", [4, -1, 11], 3, {"edge"})
    yield _sample("fp8", fp8, "bfloat16", [4, -1, 11, 6], 3, {"tiny"})
    yield _sample("fp8_strided", fp8, "float32", [4, 8], 3, {"edge"})
    yield _sample("k3_step", K3_TP8, "bfloat16", list(range(64, 64 + 513)), 12, {"k3"})


def cost(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> Cost:
    """Read every entry once, write it once."""
    entries = latent.shape[0] * kv_cache.shape[2]
    return Cost(0.0, entries * (latent.element_size() + kv_cache.element_size()) + rows.nbytes)


OPERATOR = Operator(
    reference=mla_cache_insert,
    family="mla",
    outputs={"kv_cache": "exact"},
    samples=samples,
    cost=cost,
    mutates=("kv_cache",),
    invariants=("padding_rows", "untouched_rows", "far"),
)
