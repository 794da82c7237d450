"""MLA decode by FlashMLA's dense kernel."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.nvidia._latents import mla_sizes
from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded, usable
from k3hal.dispatch.transforms import zeros_elsewhere
from k3hal.dispatch.transforms.pages import in_pages_up_to

# Its dense decode kernel is Hopper's; those of sm_100 are sparse, or for prefill.
NEEDS = Needs(packages={"flash-mla": ""}, dtypes=("bfloat16",), arch=("sm_90",))
PAGE = 64
METADATA = recorded(__name__, "flash-mla", "flash_mla:get_mla_metadata", ())
DECODE = recorded(
    __name__, "flash-mla", "flash_mla:flash_mla_with_kvcache",
    (
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "softmax_scale",
        "causal",
    ),
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
    return zeros_elsewhere(seq_lens > 0, out.squeeze(1))
