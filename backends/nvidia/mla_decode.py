"""Absorbed MLA decoding on Hopper by our own kernel: a ring of cached rows on their way to every multiprocessor."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from k3hal.backends.nvidia.native.library import Kernel, kernel, supported
from k3hal.dispatch import Needs, provides
from k3hal.dispatch.call import Answer, Call, No, Yes

LOG2_E = 1.4426950408889634
MOST_HEADS, RANK, ROPE, ROWS = 16, 512, 64, 64
THREADS, MERGE_THREADS, SHARED = 384, 256, 227 << 10
LEAST_CHUNK = 512
"""Rows of a chunk, if its sequence is not so long that every multiprocessor would get more than one."""
FEW = 96
"""Heads of all sequences up to which eight programs share the channels of each in the merge, and not two."""


ARGUMENTS = struct.Struct("@7Q4q7if")
"""`struct Arguments` of the kernel file: pointers, strides, numbers."""


@cache
def _kernels(fp8: bool, index: int) -> tuple[Kernel, Kernel, Kernel, int]:
    """The kernel that attends, those that merge few heads and many, and how many multiprocessors the device has."""
    macros = (f"FP8={int(fp8)}",)
    processors = torch.cuda.get_device_properties(index).multi_processor_count
    attend = kernel("mla_decode", "attend", macros, SHARED, index)
    merge, merge_many = (kernel("mla_decode", name, macros, 0, index) for name in ("merge", "merge_many"))
    return attend, merge, merge_many, processors


def _supports(call: Call) -> Answer:
    kind, dims = call.dims.get("kv_dtype", call.dtype), call.dims
    heads, page = dims.get("heads", 0), dims.get("page_tokens", 0)
    reasons = []
    if kind not in ("bfloat16", "float8_e4m3fn"):
        reasons.append(f"needs kv_dtype bfloat16 or float8_e4m3fn, this is {kind}")
    if (dims.get("kv_lora"), dims.get("rope_dim")) != (RANK, ROPE):
        reasons.append(f"needs kv_lora {RANK} and rope_dim {ROPE}")
    if not isinstance(heads, int) or not 1 <= heads <= MOST_HEADS:
        reasons.append(f"needs at most {MOST_HEADS} heads, this has {heads}")
    if not isinstance(page, int) or page % ROWS or not page:
        reasons.append(f"needs pages of a multiple of {ROWS} tokens, this has {page}")
    answer = supported(call)
    if isinstance(answer, No):
        reasons += answer.reasons
    return No(*reasons) if reasons else Yes("compiled for Hopper on first use")


@provides("mla_decode", name="hopper", needs=Needs(dtypes=("bfloat16",)), supports=_supports, graph_safe=True)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator. The grid and the scratch follow from shapes alone, and chunks from a sequence's own length."""
    count, heads = q.shape[:2]
    out = torch.empty((count, heads, kv_lora), dtype=q.dtype, device=q.device)
    if not count:
        return out
    if (q.stride(0) | q.stride(1) | q.data_ptr() >> 1) % 8:
        q = q.contiguous()
    attend, merge, merge_many, processors = _kernels(kv_cache.element_size() == 1, q.get_device())
    page, page_bytes = kv_cache.shape[1], kv_cache.stride(0) * kv_cache.element_size()
    splits = min(processors, -(-page_table.shape[1] * page // LEAST_CHUNK))
    # Sums of chunks, and then the logarithm of each one's sum of exponentials.
    scratch = torch.empty(count * splits * heads * (kv_lora + 1), dtype=torch.float32, device=q.device)
    logarithms = scratch.data_ptr() + count * splits * heads * kv_lora * 4
    arguments = ARGUMENTS.pack(
        q.data_ptr(), kv_cache.data_ptr(), page_table.data_ptr(), seq_lens.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), logarithms, q.stride(0), q.stride(1), page_bytes, page_table.stride(0),
        count, heads, page, splits, LEAST_CHUNK, processors, (page_bytes | kv_cache.data_ptr()) % 16 == 0,
        scale * LOG2_E,
    )  # fmt: skip
    attend.launch((min(count * splits, processors), 1), THREADS, arguments, overlapped=True)
    if splits > 1:
        merges, sharers = (merge, 8) if count * heads <= FEW else (merge_many, 2)
        merges.launch((count * heads, sharers), MERGE_THREADS, arguments, overlapped=True)
    return out
