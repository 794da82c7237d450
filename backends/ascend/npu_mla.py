"""MLA by torch_npu's attention kernels: decoding over gathered pages, prefill over expanded keys and values.

The kernels read dense caches of latents and of the other 64 channels; here both lie in one row, and rows of other
layers between the pages. So the pages that a batch needs are copied for each call.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from k3hal.backends.ascend._npu import A2, A3, A5, FUSED, LIBRARY, at_least_one, torch_npu
from k3hal.backends.ascend._plain import SCRATCH_BYTES, blocks
from k3hal.dispatch import Answer, Call, Fault, provides
from k3hal.dispatch.host_lengths import lengths_of
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.transforms import PaddedHeads, power_of_two, to_base2, transformed, zeros_elsewhere
from k3hal.dispatch.transforms.pages import needed_pages
from k3hal.dispatch.transforms.ragged import Attend, Batch, attention_over_cache

LATENT, ROPE, MOST_HEADS, MOST_PAGE, MOST_BLOCK = 512, 64, 128, 1024, 128
SPARSE = recorded(
    __name__, "torch-npu", "torch.ops.npu:npu_sparse_flash_attention",
    (
        "query", "key", "value", "sparse_indices", "scale_value", "block_table", "actual_seq_lengths_query",
        "actual_seq_lengths_kv", "query_rope", "key_rope", "sparse_block_size", "layout_query", "layout_kv",
        "sparse_mode", "attention_mode",
    ),
)  # fmt: skip
FUSED_DECODE = recorded(
    __name__, "torch-npu", "torch.ops.npu:npu_fused_infer_attention_score_v2",
    (
        "query", "key", "value", "query_rope", "key_rope", "actual_seq_kvlen", "block_table", "num_query_heads",
        "num_key_value_heads", "softmax_scale", "input_layout", "sparse_mode", "block_size",
    ),
)  # fmt: skip
FUSED_PREFILL = recorded(
    __name__, "torch-npu", "torch.ops.npu:npu_fused_infer_attention_score",
    (
        "query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale",
        "input_layout", "num_key_value_heads", "sparse_mode", "softmax_lse_flag",
    ),
)  # fmt: skip
CAUSAL, DENSE = 3, 0
"""Sparse modes: each query sees as many keys as stand before it from the end; or all."""
ABSORBED = 2
MASK = 2048
HEADS = PaddedHeads(power_of_two, {"q": 1}, 1)


def _decodes(call: Call) -> tuple[str | None, ...]:
    latent, rope = call.dims.get("kv_lora", LATENT), call.dims.get("rope_dim", ROPE)
    page, heads = int(call.dims.get("page_tokens") or 128), int(call.dims.get("heads") or 1)
    kind = call.dims.get("kv_dtype", "bfloat16")
    return (
        unless((latent, rope) == (LATENT, ROPE), f"needs kv_lora 512 and rope_dim 64, these are {latent} and {rope}"),
        unless(power_of_two(heads) <= MOST_HEADS, f"needs heads up to {MOST_HEADS}, these are {heads}"),
        unless(page % 16 == 0 and page <= MOST_PAGE, f"needs page_tokens a multiple of 16 up to 1024, this is {page}"),
        unless(kind == "bfloat16", f"needs kv_dtype bfloat16, this is {kind}"),
    )


def _supports_sparse(call: Call) -> Answer:
    return usable(call, (SPARSE,), *_decodes(call))


def _supports_fused(call: Call) -> Answer:
    return usable(call, (FUSED_DECODE,), *_decodes(call))


def _gathered(kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pages of a batch one after another, as latents [N W, page, 512] and the rest [N W, page, 64], and their table
    int32 [N, W]."""
    pages = needed_pages(page_table, seq_lens, kv_cache.shape[1])
    found = kv_cache.index_select(0, pages.flatten())
    table = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(pages.shape)
    return found[..., :LATENT].contiguous(), found[..., LATENT:].contiguous(), table


def _parts(kv_cache: Tensor, page_table: Tensor) -> list[slice]:
    """Sequences whose pages are copied together."""
    return list(blocks(page_table.shape[0], SCRATCH_BYTES // max(1, page_table.shape[1] * kv_cache[0].nbytes)))


@provides(
    "mla_decode", name="sparse_flash", needs=torch_npu(A2, A3), supports=_supports_sparse, priority=FUSED,
    graph_safe=True,
)  # fmt: skip
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator. Sparse attention that leaves no block out: unlike the dense kernel it takes lengths as tensors,
    so that a graph may hold it and nobody waits for them."""
    some = seq_lens > 0
    return zeros_elsewhere(some, _sparse(zeros_elsewhere(some, q), kv_cache, page_table, seq_lens, scale))


@transformed(HEADS)
def _sparse(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    page = kv_cache.shape[1]
    block = min(page & -page, MOST_BLOCK)
    at = torch.arange(page_table.shape[1] * page // block, dtype=torch.int32, device=q.device)
    out = [torch.empty_like(q[:0, :, :LATENT])]
    for part in _parts(kv_cache, page_table):
        lengths = seq_lens[part]
        latents, others, table = _gathered(kv_cache, page_table[part], lengths)
        chosen = torch.where(at * block < lengths.unsqueeze(1), at, -1)
        keys = latents.unsqueeze(2)
        mixed, *_ = SPARSE(
            query=q[part, :, :LATENT].contiguous(), key=keys, value=keys, sparse_indices=chosen.unsqueeze(1),
            scale_value=scale, block_table=table,
            actual_seq_lengths_query=torch.arange(1, lengths.numel() + 1, dtype=torch.int32, device=q.device),
            actual_seq_lengths_kv=lengths, query_rope=q[part, :, LATENT:].contiguous(), key_rope=others.unsqueeze(2),
            sparse_block_size=block, layout_query="TND", layout_kv="PA_BSND", sparse_mode=CAUSAL,
            attention_mode=ABSORBED,
        )  # fmt: skip
        out.append(mixed)
    return torch.cat(out)


@provides(
    "mla_decode", name="fused_infer", needs=torch_npu(A2, A3, A5), supports=_supports_fused, priority=LIBRARY,
    graph_safe=True,
)  # fmt: skip
def mla_decode_fused(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int
) -> Tensor:
    """See the operator. The library wants lengths as lists: those that the host knows, else it waits for them."""
    some = seq_lens > 0
    return zeros_elsewhere(some, _dense(zeros_elsewhere(some, q), page_table, seq_lens, kv_cache, scale))


@transformed(HEADS)
def _dense(q: Tensor, page_table: Tensor, seq_lens: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
    out = [torch.empty_like(q[:0, :, :LATENT])]
    for part in _parts(kv_cache, page_table):
        latents, others, table = _gathered(kv_cache, page_table[part], seq_lens[part])
        keys, queries = latents.unsqueeze(1), q[part].unsqueeze(2)
        mixed, _ = FUSED_DECODE(
            query=queries[..., :LATENT].contiguous(), key=keys, value=keys,
            query_rope=queries[..., LATENT:].contiguous(), key_rope=others.unsqueeze(1),
            actual_seq_kvlen=at_least_one(lengths_of(seq_lens, part)), block_table=table,
            num_query_heads=q.shape[1], num_key_value_heads=1,
            softmax_scale=scale, input_layout="BNSD", sparse_mode=DENSE, block_size=kv_cache.shape[1],
        )  # fmt: skip
        out.append(mixed.squeeze(2))
    return torch.cat(out)


def _supports_prefill(call: Call) -> Answer:
    kind = call.dims.get("kv_dtype", "bfloat16")
    width = int(call.dims.get("nope_dim") or 128) + int(call.dims.get("rope_dim") or ROPE)
    values = call.dims.get("v_dim", 128)
    return usable(
        call,
        (FUSED_PREFILL,),
        unless(
            (width, values) == (192, 128), f"needs 192 channels of keys and 128 of values, not {width} and {values}"
        ),
        unless(kind == "bfloat16", f"needs kv_dtype bfloat16, this is {kind}"),
    )


@cache
def _future(device: torch.device) -> Tensor:
    """What the library's causal mode takes for a mask, whatever the lengths: true above the diagonal."""
    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)


def _attend(scale: float) -> Attend:
    def attend(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
        heads = batch.q.shape[1]
        out, lse = FUSED_PREFILL(
            query=batch.q, key=batch.k.contiguous(), value=batch.v,
            atten_mask=_future(batch.q.device) if causal else None, actual_seq_lengths=list(accumulate(batch.queries)),
            actual_seq_lengths_kv=list(accumulate(batch.keys)), num_heads=heads, scale=scale, input_layout="TND",
            num_key_value_heads=heads, sparse_mode=CAUSAL if causal else DENSE, softmax_lse_flag=True,
        )  # fmt: skip
        return out, to_base2(lse.squeeze(-1))

    return attend


PREFILL_FAULTS = (
    Fault(
        "https://github.com/vllm-project/vllm-ascend/issues/13699",
        "packed rows without a mask all get the plain mean of the values",
        packages={"torch-npu": ">=2.10,<2.11"},
    ),
)


# Lengths are fetched to the host, which packs the batches and hands them on as lists.
@provides(
    "mla_prefill",
    name="fused_infer",
    needs=torch_npu(A2, A3, A5),
    supports=_supports_prefill,
    priority=FUSED,
    faults=PREFILL_FAULTS,
)
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
    """See the operator. The channels that elsewhere turn with the position do not here, so they stand beside the others
    and the library sees keys of 192 channels."""
    return attention_over_cache(q, kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, _attend(scale))
