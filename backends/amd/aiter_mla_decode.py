"""MLA decode by AITER's assembly kernels, which take 16, 32, 64 or 128 heads: what is missing is computed as well."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends.amd._aiter import CDNA, LIBRARY, PACKAGE, PRIORITY, switch, usable_as_switched
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.library import recorded, unless
from k3hal.dispatch.transforms import PaddedHeads, transformed, zeros_elsewhere
from k3hal.dispatch.transforms.pages import in_pages_up_to

NEEDS = Needs(packages={PACKAGE: ">=0.1.20,<0.2"}, dtypes=("bfloat16",), arch=CDNA)
DECODE = recorded(
    __name__, LIBRARY, "aiter.mla:mla_decode_fwd",
    (
        "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q", "page_size",
        "nhead_kv", "sm_scale",
    ),
)  # fmt: skip
LATENT, ROPE, MOST_HEADS = 512, 64, 128


def _tile(heads: int) -> int:
    """16, 32, 64 or 128 heads: those the kernels are made for, each of which shares the cached rows it reads."""
    return max(16, 1 << (heads - 1).bit_length())


FAULTS = (
    Fault(
        "https://github.com/vllm-project/vllm/issues/51232",
        "no kernel is found for 12 heads over a cache in fp8",
        dims={"kv_dtype": ("float8_e4m3fn",)},
    ),
    Fault(
        "https://github.com/ROCm/aiter/issues/5765",
        "but for 64 heads, rows beyond 4 GiB of the cache are read from elsewhere",
        arch=("gfx950",),
        when=lambda call: _tile(int(call.dims.get("heads") or 16)) != 64,
    ),
)


def _supports(call: Call) -> Answer:
    latent, rope = call.dims.get("kv_lora", LATENT), call.dims.get("rope_dim", ROPE)
    kind, heads = call.dims.get("kv_dtype", "bfloat16"), int(call.dims.get("heads") or 16)
    return usable_as_switched(
        call,
        (DECODE,),
        switch("_MLA"),
        unless((latent, rope) == (LATENT, ROPE), f"needs kv_lora 512 and rope_dim 64, these are {latent} and {rope}"),
        unless(kind == "bfloat16", f"needs kv_dtype bfloat16, this is {kind}"),
        unless(heads <= MOST_HEADS, f"needs heads up to {MOST_HEADS}, these are {heads}"),
    )


# Whether its scratch, which it allocates in every call, may be captured was not seen.
@provides("mla_decode", name="aiter", needs=NEEDS, supports=_supports, priority=PRIORITY, faults=FAULTS)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator. The library sees pages of one token, which all its kernels take.

    A sequence without tokens is given the first row of page 0, whatever is there; its result is replaced by zeros.
    """
    rows, table = in_pages_up_to(1, kv_cache, page_table, seq_lens)
    out = _attend(q, rows, table, seq_lens.clamp_min(1), scale, kv_lora)
    return zeros_elsewhere(seq_lens > 0, out)


@transformed(PaddedHeads(_tile, {"q": 1}, result=1))
def _attend(q: Tensor, rows: Tensor, table: Tensor, lengths: Tensor, scale: float, kv_lora: int) -> Tensor:
    """The result [N, H, R] for rows [P, 1, D] of which `table` [N, M] has the numbers."""
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    out = torch.empty((*q.shape[:2], kv_lora), dtype=q.dtype, device=q.device)
    DECODE(
        q=q.contiguous(), kv_buffer=rows.unsqueeze(2), o=out,
        qo_indptr=torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device), kv_indptr=starts,
        kv_indices=_packed(table, lengths, starts), kv_last_page_lens=torch.ones_like(lengths), max_seqlen_q=1,
        page_size=1, nhead_kv=1, sm_scale=scale,
    )  # fmt: skip
    return out


def _packed(table: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
    """The first `lengths` [N] entries of each row of `table` [N, M], one row after another; zeros behind the last.

    As long as all rows are: how many there are stays on the device.
    """
    at = torch.arange(table.shape[1], device=table.device)
    place = torch.where(at < lengths.unsqueeze(1), starts[:-1, None] + at, table.numel())
    packed = table.new_zeros(table.numel() + 1, dtype=torch.int32)
    return packed.scatter_(0, place.flatten().long(), table.flatten().int())[:-1]
