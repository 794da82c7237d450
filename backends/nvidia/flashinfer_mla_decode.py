"""MLA decode by FlashInfer for the Blackwell family: kernels that come compiled, and some in CuTe DSL."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.nvidia._flashinfer import BLACKWELL, PACKAGE, SINCE_0_6_18, workspace
from k3hal.backends.nvidia._latents import mla_sizes
from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.transforms import zeros_elsewhere
from k3hal.dispatch.transforms.pages import in_pages_up_to

NEEDS = Needs(packages={PACKAGE: SINCE_0_6_18}, dtypes=("bfloat16",), arch=BLACKWELL)
NOPE = 128
DECODE = recorded(
    __name__, "flashinfer-python", "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla",
    (
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "block_tables",
        "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale", "backend",
    ),
)  # fmt: skip
_TILES = ((8, 8), (32, 16))
"""Up to so many heads, the compiled kernels' rows of heads; 64 beyond."""
PAGES, CUTE_PAGES = (32, 64), (128, 64, 32, 16)
CUTE_HEADS = 128
FAULTS = (
    Fault(
        "https://github.com/flashinfer-ai/flashinfer/issues/3130",
        "everything is zero where page numbers are large",
        packages={PACKAGE: "<=0.6.8.post1"},
    ),
)


def _whole_rows(call: Call) -> str | None:
    heads = int(call.dims.get("heads") or 64)
    tile = next((tile for most, tile in _TILES if heads <= most), 64)
    return unless(heads % min(heads, tile) == 0, f"needs heads a multiple of {tile}, these are {heads}")


def _supports(call: Call) -> Answer:
    # Beside a cache in fp8 it takes queries in fp8 alone, which the operator does not allow.
    return usable(call, (DECODE,), _whole_rows(call), *mla_sizes(call, PAGES, ("bfloat16",), multiples=True))


def _supports_cute(call: Call) -> Answer:
    heads = int(call.dims.get("heads") or CUTE_HEADS)
    few = unless(heads <= CUTE_HEADS, f"needs heads up to {CUTE_HEADS}, these are {heads}")
    return usable(call, (DECODE,), few, *mla_sizes(call, CUTE_PAGES, ("bfloat16",)))


def _decoded(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora: int,
    backend: str,
    most: int,
) -> Tensor:
    """What a backend gives, from pages of at most `most` tokens; zeros where a sequence has none."""
    cache, pages = in_pages_up_to(most, kv_cache, page_table, seq_lens)
    out = DECODE(
        query=q.unsqueeze(1).contiguous(), kv_cache=cache.unsqueeze(1), workspace_buffer=workspace(backend, q.device),
        qk_nope_head_dim=NOPE, kv_lora_rank=kv_lora, qk_rope_head_dim=q.shape[-1] - kv_lora, block_tables=pages,
        seq_lens=seq_lens, max_seq_len=page_table.shape[1] * kv_cache.shape[1], bmm1_scale=scale, bmm2_scale=1.0,
        backend=backend,
    )  # fmt: skip
    return zeros_elsewhere(seq_lens > 0, out.squeeze(1))


@provides("mla_decode", name="flashinfer", needs=NEEDS, supports=_supports, priority=PRIORITY, faults=FAULTS)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator."""
    return _decoded(q, kv_cache, page_table, seq_lens, scale, kv_lora, "trtllm-gen", PAGES[-1])


# It compiles for a number of heads and a page when it first meets them.
@provides(
    "mla_decode",
    name="flashinfer_cute",
    needs=Needs(packages={PACKAGE: SINCE_0_6_18, "nvidia-cutlass-dsl": ""}, dtypes=("bfloat16",), arch=BLACKWELL),
    supports=_supports_cute,
    priority=PRIORITY,
    faults=FAULTS,
)
def mla_decode_cute(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int
) -> Tensor:
    """See the operator."""
    return _decoded(q, kv_cache, page_table, seq_lens, scale, kv_lora, "cute-dsl", CUTE_PAGES[0])
