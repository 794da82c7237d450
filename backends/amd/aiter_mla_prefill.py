"""MLA prefill by AITER's flash attention over packed rows, with heads of 192 and 128 channels."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.amd._aiter import CDNA, LIBRARY, PACKAGE, PRIORITY, switch, usable_as_switched
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.library import recorded, unless
from k3hal.dispatch.transforms.lse import to_base2
from k3hal.dispatch.transforms.ragged import Batch, attention_over_cache

NEEDS = Needs(packages={PACKAGE: ">=0.1.20,<0.2"}, dtypes=("bfloat16",), arch=CDNA)
ATTEND = recorded(
    __name__, LIBRARY, "aiter.ops.mha:flash_attn_varlen_func",
    (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        "return_lse",
    ),
)  # fmt: skip
FAULTS = (
    Fault(
        "https://github.com/ROCm/aiter/issues/2229",
        "a sequence with one query is wrong for heads of other sizes than 128",
        arch=("gfx942",),
    ),
)
SIZES = {"nope_dim": 128, "rope_dim": 64, "v_dim": 128}
KINDS = ("bfloat16", "float8_e4m3fn")


def _supports(call: Call) -> Answer:
    given = {name: call.dims.get(name, size) for name, size in SIZES.items()}
    kind = call.dims.get("kv_dtype", "bfloat16")
    return usable_as_switched(
        call,
        (ATTEND,),
        switch("_MHA"),
        *(unless(n == SIZES[name], f"needs {name} {SIZES[name]}, this is {n}") for name, n in given.items()),
        # Cached rows are read here, and widened.
        unless(kind in KINDS, f"needs kv_dtype {' or '.join(KINDS)}, this is {kind}"),
    )


# The lengths of a step are fetched to the host, in every layer.
@provides("mla_prefill", name="aiter", needs=NEEDS, supports=_supports, priority=PRIORITY, faults=FAULTS)
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
    """See the operator. The library gives natural logarithms, [H, T]."""

    def attend(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = ATTEND(
            q=batch.q, k=batch.k, v=batch.v, cu_seqlens_q=batch.offsets(batch.queries),
            cu_seqlens_k=batch.offsets(batch.keys), max_seqlen_q=max(batch.queries), max_seqlen_k=max(batch.keys),
            softmax_scale=scale, causal=causal, return_lse=True,
        )  # fmt: skip
        return out, to_base2(lse.T)

    return attention_over_cache(q, kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, attend)
