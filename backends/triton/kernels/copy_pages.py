"""Page copies with every read before any write.

A program owns a range of bytes of every page in hand, holds it for all of them, and writes it after a barrier: no
program reads what another writes. Only where more pages are copied than a program can hold do they go through scratch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_HELD = 128
"""Pages that one program holds a piece of."""
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


@triton.jit
def _copy(
    source, target, src, dst, source_stride, target_stride, count, words, BY_SRC: tl.constexpr, BY_DST: tl.constexpr,
    PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    copied = page < count
    live = copied[:, None] & (at < words)[None, :]
    first = tl.load(src + page, copied, 0) if BY_SRC else page.to(tl.int64)
    last = tl.load(dst + page, copied, 0) if BY_DST else page.to(tl.int64)
    held = tl.load(source + first[:, None] * source_stride + at[None, :], live, 0)
    tl.debug_barrier()
    tl.store(target + last[:, None] * target_stride + at[None, :], held, live)


def _in_words(arena: Tensor) -> Tensor:
    """The arena in the widest integers that its address, rows and row length are multiples of."""
    odd = arena.shape[1] | arena.stride(0) | arena.data_ptr()
    for size, dtype in _WORDS:
        if odd % size == 0:
            return arena.view(dtype)
    return arena


def copy_pages(arena: Tensor, src: Tensor, dst: Tensor, held_bytes: int) -> None:
    """See the operator. A program holds about `held_bytes`."""
    count = src.shape[0]
    if not count or not arena.shape[1]:
        return
    arena = _in_words(arena)
    pages = triton.next_power_of_2(min(count, MOST_HELD))
    words = arena.shape[1]
    block = min(max(held_bytes // arena.element_size() // pages, 32), triton.next_power_of_2(words))
    grid = (triton.cdiv(words, block), triton.cdiv(count, pages))
    rest = {"PAGES": pages, "BLOCK": block, "num_warps": min(max(block * pages // 1024, 1), 8)}
    stride = arena.stride(0)
    if grid[1] == 1:
        _copy[grid](arena, arena, src, dst, stride, stride, count, words, True, True, **rest)
        return
    scratch = torch.empty((count, words), dtype=arena.dtype, device=arena.device)
    _copy[grid](arena, scratch, src, dst, stride, words, count, words, True, False, **rest)
    _copy[grid](scratch, arena, src, dst, words, stride, count, words, False, True, **rest)
