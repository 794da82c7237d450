"""MLA decode by FlashMLA's dense kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.nvidia._latents import in_pages_up_to, mla_sizes
from k3hal.backends.nvidia._library import PRIORITY, Function, usable
from k3hal.dispatch import Answer, Call, Needs, provides

# Its dense decode kernel is Hopper's; those of sm_100 are sparse, or for prefill.
NEEDS = Needs(packages={"flash-mla": ""}, dtypes=("bfloat16",), arch=("sm_90",))
PAGE = 64
METADATA = Function("flash_mla", "get_mla_metadata", (), "FlashMLA 9241ae3")
DECODE = Function(
    "flash_mla",
    "flash_mla_with_kvcache",
    (
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ),
    "FlashMLA 9241ae3",
)  # fmt: skip


def _supports(call: Call) -> Answer:
    return usable(call, (METADATA, DECODE), *mla_sizes(call, (PAGE,), ("bfloat16",), multiples=True))


# Plans are made in the first call with them, and hold for the lengths of that call: one is made for every call.
@provides("mla_decode", name="flash_mla", needs=NEEDS, supports=_supports, priority=PRIORITY)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator. The scale is passed: the library's default is that of 576 channels."""
    plan, _ = METADATA()
    cache, pages = in_pages_up_to(PAGE, kv_cache, page_table, seq_lens)
    out, _ = DECODE(
        q=q.unsqueeze(1).contiguous(), k_cache=cache.unsqueeze(2), block_table=pages, cache_seqlens=seq_lens,
        head_dim_v=kv_lora, tile_scheduler_metadata=plan, softmax_scale=scale, causal=False,
    )  # fmt: skip
    return torch.where((seq_lens > 0).view(-1, 1, 1), out.squeeze(1), 0.0)
