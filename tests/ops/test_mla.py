"""MLA operators: invariants between prefill, decode and insertion, on the reference and on the CPU provider."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3hal.backends.cpu import mla_decode as cpu_decode
from k3hal.backends.cpu import mla_prefill as cpu_prefill
from k3hal.dispatch import Call
from k3hal.dispatch.ops import mla_decode as decode_op
from k3hal.dispatch.ops import mla_prefill as prefill_op
from k3hal.dispatch.ops._paged import MlaShape
from k3hal.dispatch.ops.mla_cache_insert import mla_cache_insert
from k3hal.dispatch.registry import default_registry

from .kda_layer import CPU

SHAPE = MlaShape()
Fn = Callable[..., Any]


def _each(argument: str, reference: Fn) -> Any:
    """The reference and every CPU provider of its operator that this machine runs."""
    op = reference.__name__
    runs = [p for p in default_registry().of(op) if p.backend == "cpu" and p.answer(Call(op, CPU, "float32"))]
    return pytest.mark.parametrize(
        argument, [reference, *(p.fn for p in runs)], ids=["reference", *(p.name for p in runs)]
    )


INSERT = _each("insert", mla_cache_insert)
PREFILL, DECODE = _each("prefill", prefill_op.mla_prefill), _each("decode", decode_op.mla_decode)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _whole(length: int, seed: int = 0, shape: MlaShape = SHAPE) -> dict[str, Any]:
    return prefill_op.inputs(_generator(seed), shape, "float32", [0], [length], strided=True)


def _chunk(whole: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The arguments of tokens [first, last) of a one-sequence call."""
    return whole | {
        "q": whole["q"][first:last],
        "cu_seqlens": torch.tensor([0, last - first], dtype=torch.int32),
        "context_lens": torch.tensor([first], dtype=torch.int32),
    }


def _absorb(arguments: dict[str, Any]) -> Tensor:
    """Queries [T, H, R + Dr] for decoding."""
    q, w_uk = arguments["q"], arguments["w_uk"]
    return torch.cat([torch.einsum("thd,hdr->thr", q[..., : w_uk.shape[1]], w_uk), q[..., w_uk.shape[1] :]], dim=-1)


@PREFILL
@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40), cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 99))
def test_prefill_may_be_split_anywhere(prefill: Fn, length: int, cuts: list[int], seed: int) -> None:
    whole = _whole(length, seed)
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    parts = [prefill(**_chunk(whole, a, b)) for a, b in pairwise(edges)]
    torch.testing.assert_close(torch.cat(parts), prefill(**whole), rtol=1e-5, atol=1e-5)


@DECODE
@PREFILL
def test_decode_is_the_last_row_of_prefill(prefill: Fn, decode: Fn) -> None:
    for length in (1, 4, 5, 33):
        whole = _whole(length)
        expected = prefill(**whole)[-1]
        seq_lens = torch.tensor([length], dtype=torch.int32)
        q = _absorb(whole)[-1:]
        latent = decode(q, whole["kv_cache"], whole["page_table"], seq_lens, whole["scale"], SHAPE.kv_lora)
        actual = torch.einsum("hr,hdr->hd", latent[0], whole["w_uv"])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@DECODE
@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_decode_of_a_batch_is_its_sequences_alone(decode: Fn, lengths: list[int], seed: int) -> None:
    batch = decode_op.inputs(_generator(seed), SHAPE, "float32", lengths)
    order = torch.randperm(len(lengths), generator=_generator(seed))
    moved = {name: batch[name][order] for name in ("q", "page_table", "seq_lens")}
    together = decode(**batch)
    torch.testing.assert_close(decode(**(batch | moved)), together[order], rtol=1e-6, atol=1e-6)
    for n, length in enumerate(lengths):
        one = {name: batch[name][n : n + 1] for name in ("q", "page_table", "seq_lens")}
        torch.testing.assert_close(decode(**(batch | one))[0], together[n], rtol=1e-6, atol=1e-6)
        assert bool(together[n].any()) == (length > 0)


@PREFILL
def test_prefill_of_a_batch_is_its_sequences_alone(prefill: Fn) -> None:
    contexts, chunks = [0, 7, 3, 20], [5, 0, 9, 1]
    batch = prefill_op.inputs(_generator(), SHAPE, "float32", contexts, chunks, padding=3)
    together, offsets = prefill(**batch), batch["cu_seqlens"].tolist()
    for n, (context, chunk) in enumerate(zip(contexts, chunks, strict=True)):
        one = _chunk(batch, offsets[n], offsets[n + 1]) | {
            "page_table": batch["page_table"][n : n + 1],
            "context_lens": torch.tensor([context], dtype=torch.int32),
        }
        expected = prefill(**one)
        assert expected.shape[0] == chunk
        torch.testing.assert_close(together[offsets[n] : offsets[n + 1]], expected, rtol=1e-6, atol=1e-6)
    assert not together[offsets[-1] :].any()


def test_prefill_matches_plain_attention() -> None:
    """Against the library's attention on explicit keys and values."""
    whole = _whole(23)
    rows = whole["kv_cache"][whole["page_table"][0, :6].long()].flatten(0, 1)[:23]
    latent, k_pe = rows.split([SHAPE.kv_lora, SHAPE.rope], dim=-1)
    keys = torch.cat([torch.einsum("hdr,lr->hld", whole["w_uk"], latent), k_pe.expand(SHAPE.heads, -1, -1)], dim=-1)
    values = torch.einsum("hdr,lr->hld", whole["w_uv"], latent)
    expected = torch.nn.functional.scaled_dot_product_attention(
        whole["q"].transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=whole["scale"]
    )
    torch.testing.assert_close(prefill_op.mla_prefill(**whole), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_cpu_block_sizes_change_nothing(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    shape = replace(SHAPE, kv_dtype=kv_dtype)
    decoding = decode_op.inputs(_generator(), shape, "float32", [700, 3, 40, 41, 257])
    prefilling = prefill_op.inputs(_generator(), shape, "float32", [600, 10], [40, 300])
    decoded, prefilled = cpu_decode.mla_decode(**decoding), cpu_prefill.mla_prefill(**prefilling)
    monkeypatch.setattr(cpu_decode, "BLOCK_ROWS", 64)
    monkeypatch.setattr(cpu_prefill, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(cpu_prefill, "TILE_ELEMENTS", 3 * 256 * 16)
    torch.testing.assert_close(cpu_decode.mla_decode(**decoding), decoded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cpu_prefill.mla_prefill(**prefilling), prefilled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("absorbed", [False, True])
def test_both_forms_of_cpu_prefill_agree(monkeypatch: pytest.MonkeyPatch, absorbed: bool) -> None:
    arguments = prefill_op.inputs(_generator(), SHAPE, "float32", [33, 0], [9, 21])
    monkeypatch.setattr(cpu_prefill, "_prefers_absorbed", lambda *_: absorbed)
    expected = prefill_op.mla_prefill(**arguments)
    torch.testing.assert_close(cpu_prefill.mla_prefill(**arguments), expected, rtol=1e-5, atol=1e-5)


def test_cpu_decode_batches_similar_lengths() -> None:
    batches = cpu_decode._batches([30 + n for n in range(64)])
    assert len(batches) <= 4
    assert sorted(n for batch in batches for n in batch) == list(range(64))
    assert cpu_decode._batches([0, 0]) == []
    apart = cpu_decode._batches([1, 100_000, 0, 2])
    assert sorted(map(sorted, apart)) == [[0, 3], [1]]


def test_extreme_scores_stay_finite() -> None:
    arguments = _whole(600)
    arguments["q"] = arguments["q"] * 1e4
    actual, expected = cpu_prefill.mla_prefill(**arguments), prefill_op.mla_prefill(**arguments)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@INSERT
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_insert_writes_its_rows_only(insert: Fn, kv_dtype: torch.dtype) -> None:
    g = _generator()
    cache = torch.randn(6, 4, 10, generator=g).to(kv_dtype)
    before = cache.float().view(24, 10).clone()
    entries = torch.randn(5, 10, generator=g) * 600
    rows = torch.tensor([9, -1, 23, 4, 10])
    insert(entries[:, :8], entries[:, 8:], cache, rows)
    expected = before.clone()
    limit = 448.0 if kv_dtype == torch.float8_e4m3fn else math.inf
    written = entries.clamp(-limit, limit).to(kv_dtype).float()
    for row, entry in zip(rows.tolist(), written, strict=True):
        if row >= 0:
            expected[row] = entry
    assert torch.equal(cache.float().view(24, 10), expected)


@INSERT
def test_inserted_rows_are_what_prefill_reads(insert: Fn) -> None:
    """Filling the cache in two steps through a page table gives one attention."""
    whole = _whole(11)
    pages = whole["page_table"][0, :3].long()
    rows = (pages[:, None] * SHAPE.page_tokens + torch.arange(SHAPE.page_tokens)).flatten()[:11]
    entries = whole["kv_cache"][pages].flatten(0, 1)[:11]
    cache = torch.full_like(whole["kv_cache"], torch.nan)
    for part in (slice(0, 5), slice(5, 11)):
        insert(entries[part, : SHAPE.kv_lora], entries[part, SHAPE.kv_lora :], cache, rows[part])
    expected = cpu_prefill.mla_prefill(**whole)
    whole["kv_cache"] = cache
    assert torch.equal(cpu_prefill.mla_prefill(**whole), expected)
