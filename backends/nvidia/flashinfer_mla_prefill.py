"""MLA prefill by FlashInfer's ragged attention: kernels for the Blackwell family, and a wrapper's for Hopper."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.nvidia._flashinfer import BLACKWELL, PACKAGE, SINCE_0_6_18, SINCE_0_7_2, workspace
from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.transforms.ragged import Batch, attention_over_cache

SIZES = {"nope_dim": 128, "rope_dim": 64, "v_dim": 128}
RAGGED = recorded(
    __name__, "flashinfer-python", "flashinfer.prefill:trtllm_ragged_attention_deepseek",
    (
        "query", "key", "value", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale",
        "o_sf_scale", "batch_size", "window_left", "cum_seq_lens_q", "cum_seq_lens_kv", "enable_pdl", "is_causal",
        "return_lse", "backend",
    ),
)  # fmt: skip
WRAPPER = recorded(
    __name__, "flashinfer-python", "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper",
    ("float_workspace_buffer", "kv_layout", "backend"),
)  # fmt: skip
PLAN = recorded(
    __name__, "flashinfer-python", "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.plan",
    (
        "self", "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "causal",
        "sm_scale", "q_data_type",
    ),
)  # fmt: skip
RUN = recorded(
    __name__, "flashinfer-python", "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper.run",
    ("self", "q", "k", "v", "return_lse", "lse_base"),
)  # fmt: skip
RAGGED_FAULTS = (
    Fault(
        "https://github.com/flashinfer-ai/flashinfer/issues/4451",
        "rows whose scores are all below -5e4 are zero",
        packages={PACKAGE: "<=0.6.18"},
    ),
)


def _odd_sizes(call: Call) -> list[str]:
    given = {name: call.dims.get(name, size) for name, size in SIZES.items()}
    return [f"needs {name} {SIZES[name]}, this is {n}" for name, n in given.items() if n != SIZES[name]]


def _supports_trtllm(call: Call) -> Answer:
    return usable(call, (RAGGED,), *_odd_sizes(call), _cache_kind(call))


def _supports_wrapper(call: Call) -> Answer:
    return usable(call, (WRAPPER, PLAN, RUN), *_odd_sizes(call), _cache_kind(call))


def _cache_kind(call: Call) -> str | None:
    """Cached rows are read here, and widened: any kind of which a row is numbers of one width."""
    kind = call.dims.get("kv_dtype", "bfloat16")
    return unless(kind in ("bfloat16", "float8_e4m3fn"), f"needs kv_dtype bfloat16 or float8_e4m3fn, this is {kind}")


# The lengths of a step are fetched to the host, in every layer.
@provides(
    "mla_prefill",
    name="flashinfer",
    needs=Needs(packages={PACKAGE: SINCE_0_6_18}, dtypes=("bfloat16",), arch=BLACKWELL),
    supports=_supports_trtllm,
    priority=PRIORITY,
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
    """See the operator. The library's kernels leave sequences without queries or keys unwritten: they get none."""

    def attend(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
        return RAGGED(
            query=batch.q, key=batch.k, value=batch.v, workspace_buffer=workspace("mla_prefill", q.device),
            seq_lens=torch.tensor(batch.keys, dtype=torch.int32, device=q.device), max_q_len=max(batch.queries),
            max_kv_len=max(batch.keys), bmm1_scale=scale, bmm2_scale=1.0, o_sf_scale=1.0,
            batch_size=len(batch.keys), window_left=-1, cum_seq_lens_q=batch.offsets(batch.queries),
            cum_seq_lens_kv=batch.offsets(batch.keys), enable_pdl=None, is_causal=causal, return_lse=True,
            backend="trtllm-gen",
        )  # fmt: skip

    return attention_over_cache(q, kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, attend)


@cache
def _wrapper(device: torch.device) -> Any:
    """One for all layers: its own buffers are as large as its workspace is."""
    return WRAPPER(float_workspace_buffer=workspace("ragged", device), kv_layout="NHD", backend="auto")


# On the Blackwell family the kernels above are taken; that the wrapper's are made for other families was not read.
@provides(
    "mla_prefill",
    name="flashinfer_ragged",
    needs=Needs(packages={PACKAGE: SINCE_0_7_2}, dtypes=("bfloat16",), arch=("sm_90",)),
    supports=_supports_wrapper,
    priority=PRIORITY,
    faults=RAGGED_FAULTS,
)
def mla_prefill_ragged(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """See the operator. A plan waits for the device, as it copies the offsets to the host: no run is overtaken by the
    next plan's buffers."""
    wrapper = _wrapper(q.device)

    def attend(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
        heads, dim = batch.q.shape[1:]
        PLAN(
            self=wrapper, qo_indptr=batch.offsets(batch.queries), kv_indptr=batch.offsets(batch.keys),
            num_qo_heads=heads, num_kv_heads=heads, head_dim_qk=dim, head_dim_vo=batch.v.shape[2], causal=causal,
            sm_scale=scale, q_data_type=batch.q.dtype,
        )  # fmt: skip
        return RUN(self=wrapper, q=batch.q, k=batch.k, v=batch.v, return_lse=True, lse_base="log2")

    return attention_over_cache(q, kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, attend)
