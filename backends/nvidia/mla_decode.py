"""Absorbed MLA decoding on Hopper by our own kernels: few heads from a ring of rows, many from wide tiles."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from k3hal.backends.nvidia.native.library import Kernel, kernel, supported
from k3hal.backends.nvidia.native.tensor_map import swizzled_pages
from k3hal.dispatch import Needs, provides
from k3hal.dispatch.call import Answer, Call, No, Yes

LOG2_E = 1.4426950408889634
FEW_HEADS, MOST_HEADS, RANK, ROPE, ROWS = 16, 96, 512, 64, 64
BLOCKS = (24, 32, 48)
"""Heads that a program may take together where there are many."""
THREADS, SHARED = 384, 227 << 10
LEAST_CHUNK = 512
"""Rows of a chunk, if its sequence is not so long that every multiprocessor would get more than one."""
FEW_MERGED = 96
"""Heads of all sequences up to which four programs of 512 threads share the channels of each in the merge, and not two
of 256."""

ONCE_ROWS = 300_000
"""Rows of all sequences up to which they leave the L2 cache first: 3 to 6 % faster on an H200, beyond 2 % slower."""
ARGUMENTS = struct.Struct("@7Q4q8if2i60x")
"""`struct Arguments` of the kernel files: pointers, strides, numbers. Behind a tensor map they are a multiple of 64 bytes."""


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _attend(heads: int, fp8: bool, once: bool, index: int) -> Kernel:
    """The kernel for so many heads of a program; `once`: see `ONCE_ROWS`."""
    if heads > FEW_HEADS:
        return kernel("mla_many", "attend_many", (f"HEADS={heads}",), SHARED, index)
    return kernel("mla_decode", "attend", (f"FP8={int(fp8)}", f"ONCE={int(once)}"), SHARED, index)


@cache
def _merge(few: bool, fp8: bool, index: int) -> Kernel:
    return kernel("mla_decode", "merge" if few else "merge_many", (f"FP8={int(fp8)}", "ONCE=0"), 0, index)


def _blocks(heads: int) -> tuple[int, int]:
    """How many programs share a sequence's heads, and how many heads one of them has."""
    if heads <= FEW_HEADS:
        return 1, heads
    count = -(-heads // BLOCKS[-1])
    return count, next(each for each in BLOCKS if each * count >= heads)


def _supports(call: Call) -> Answer:
    kind, dims = call.dims.get("kv_dtype", call.dtype), call.dims
    heads, page = dims.get("heads", 0), dims.get("page_tokens", 0)
    reasons = []
    if kind not in ("bfloat16", "float8_e4m3fn"):
        reasons.append(f"needs kv_dtype bfloat16 or float8_e4m3fn, this is {kind}")
    if (dims.get("kv_lora"), dims.get("rope_dim")) != (RANK, ROPE):
        reasons.append(f"needs kv_lora {RANK} and rope_dim {ROPE}")
    most = MOST_HEADS if kind == "bfloat16" else FEW_HEADS
    if not isinstance(heads, int) or not 1 <= heads <= most:
        reasons.append(f"needs at most {most} heads, this has {heads}")
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
    index, (blocks, each) = q.get_device(), _blocks(heads)
    few, chunks = each <= FEW_HEADS, _processors(index) // blocks
    if not few and (kv_cache.stride(0) % 8 or kv_cache.data_ptr() % 16):
        kv_cache = kv_cache.contiguous()
    page, page_bytes = kv_cache.shape[1], kv_cache.stride(0) * kv_cache.element_size()
    most_rows = page_table.shape[1] * page
    splits = min(chunks, -(-most_rows // LEAST_CHUNK))
    # Averages of chunks, of a cache in fp8 in fp16, and then the logarithm of each one's sum of exponentials.
    fp8 = kv_cache.element_size() == 1
    width, parts = kv_lora // 2 if fp8 else kv_lora, count * splits * heads
    scratch = torch.empty(parts * (width + 1), dtype=torch.float32, device=q.device)
    logarithms = scratch.data_ptr() + parts * width * 4
    arguments = ARGUMENTS.pack(
        q.data_ptr(), kv_cache.data_ptr(), page_table.data_ptr(), seq_lens.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), logarithms, q.stride(0), q.stride(1), page_bytes, page_table.stride(0),
        count, heads, page, splits, LEAST_CHUNK, chunks, (page_bytes | kv_cache.data_ptr()) % 16 == 0, blocks,
        scale * LOG2_E, kv_cache.shape[0], page_table.shape[1],
    )  # fmt: skip
    given = arguments
    if not few:
        where = kv_cache.data_ptr(), kv_cache.shape[0], page, RANK + ROPE, page_bytes
        given = swizzled_pages(*where, (ROWS, 64)) + arguments
    grid = min(count * splits, chunks) * blocks
    attend = _attend(each, fp8, few and count * most_rows <= ONCE_ROWS, index)
    attend.launch((grid, 1), THREADS, given, overlapped=True)
    if splits > 1:
        few_merged = count * heads <= FEW_MERGED
        shared, threads = (4, 512) if few_merged else (2, 256)
        _merge(few_merged, fp8, index).launch((count * heads, shared), threads, arguments, overlapped=True)
    return out
