"""MLA decode by FlashMLA's dense kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.nvidia._library import PRIORITY, Function, unless, usable
from k3hal.dispatch import Answer, Call, Needs, provides

# Its dense decode kernel is Hopper's; those of sm_100 are sparse, or for prefill.
NEEDS = Needs(packages={"flash-mla": ""}, dtypes=("bfloat16",), arch=("sm_90",))
PAGE, LATENT, ROPE = 64, 512, 64
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


def mla_sizes(call: Call, pages: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[str | None, ...]:
    """What speaks against a call's sizes for kernels made for a latent of 512 and 64 more channels."""
    latent, rope = call.dims.get("kv_lora", LATENT), call.dims.get("rope_dim", ROPE)
    page, kind = call.dims.get("page_tokens", pages[0]), call.dims.get("kv_dtype", kinds[0])
    return (
        unless((latent, rope) == (LATENT, ROPE), f"needs kv_lora 512 and rope_dim 64, these are {latent} and {rope}"),
        unless(page in pages, f"needs page_tokens {' or '.join(map(str, pages))}, this is {page}"),
        unless(kind in kinds, f"needs kv_dtype {' or '.join(kinds)}, this is {kind}"),
    )


def needed_pages(page_table: Tensor, seq_lens: Tensor, page_tokens: int) -> Tensor:
    """The page table with page 0 where no row is needed: the library may fetch ahead, and entries there are garbage."""
    first = torch.arange(page_table.shape[1], device=page_table.device) * page_tokens
    return torch.where(first < seq_lens.unsqueeze(-1), page_table, 0)


def _supports(call: Call) -> Answer:
    return usable(call, (METADATA, DECODE), *mla_sizes(call, (PAGE,), ("bfloat16",)))


# Plans are made in the first call with them, and hold for the lengths of that call: one is made for every call.
@provides("mla_decode", name="flash_mla", needs=NEEDS, supports=_supports, priority=PRIORITY)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator. The scale is passed: the library's default is that of 576 channels."""
    plan, _ = METADATA()
    out, _ = DECODE(
        q=q.unsqueeze(1).contiguous(), k_cache=kv_cache.unsqueeze(2),
        block_table=needed_pages(page_table, seq_lens, kv_cache.shape[1]), cache_seqlens=seq_lens, head_dim_v=kv_lora,
        tile_scheduler_metadata=plan, softmax_scale=scale, causal=False,
    )  # fmt: skip
    return torch.where((seq_lens > 0).view(-1, 1, 1), out.squeeze(1), 0.0)
