"""MLA decode by FlashInfer's kernels for the Blackwell family."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.nvidia._flashinfer import BLACKWELL, PACKAGE, SINCE_0_6_18, SOURCE, workspace
from k3hal.backends.nvidia._library import PRIORITY, Function, unless, usable
from k3hal.backends.nvidia.flash_mla import mla_sizes, needed_pages
from k3hal.dispatch import Answer, Call, Needs, provides

NEEDS = Needs(packages={PACKAGE: SINCE_0_6_18}, dtypes=("bfloat16",), arch=BLACKWELL)
NOPE = 128
DECODE = Function(
    "flashinfer.mla",
    "trtllm_batch_decode_with_kv_cache_mla",
    (
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim",
        "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale", "backend",
    ),
    SOURCE,
)  # fmt: skip
_TILES = ((8, 8), (32, 16))
"""Up to so many heads, the kernels' rows of heads; 64 beyond."""


def _heads(call: Call) -> str | None:
    heads = int(call.dims.get("heads") or 64)
    tile = next((tile for most, tile in _TILES if heads <= most), 64)
    return unless(heads % min(heads, tile) == 0, f"needs heads a multiple of {tile}, these are {heads}")


def _supports(call: Call) -> Answer:
    # Beside a cache in fp8 it takes queries in fp8 alone, which the operator does not allow.
    return usable(call, (DECODE,), _heads(call), *mla_sizes(call, (32, 64), ("bfloat16",)))


@provides("mla_decode", name="flashinfer", needs=NEEDS, supports=_supports, priority=PRIORITY)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator."""
    pages = needed_pages(page_table, seq_lens, kv_cache.shape[1])
    out = DECODE(
        query=q.unsqueeze(1).contiguous(), kv_cache=kv_cache.unsqueeze(1),
        workspace_buffer=workspace("mla_decode", q.device), qk_nope_head_dim=NOPE, kv_lora_rank=kv_lora,
        qk_rope_head_dim=q.shape[-1] - kv_lora, block_tables=pages, seq_lens=seq_lens,
        max_seq_len=page_table.shape[1] * kv_cache.shape[1], bmm1_scale=scale, bmm2_scale=1.0, backend="trtllm-gen",
    )  # fmt: skip
    return torch.where((seq_lens > 0).view(-1, 1, 1), out.squeeze(1), 0.0)
