"""MLA cache insertion: some rows a program, padding rows neither read nor written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from k3hal.backends.triton.kernels.programs import jit_for_any

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _stored(values, kind: tl.constexpr):
    """`values` in the cache's dtype; fp8 saturates, and keeps NaN."""
    if kind == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(kind)


@jit_for_any("count")
def _insert(
    latent, k_pe, cache, rows, latent_row, rope_row, page_stride, entry_stride, count,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + token, token < count, -1)
    live = (row >= 0)[:, None]
    to = cache + (row // PAGE * page_stride + row % PAGE * entry_stride)[:, None]
    ranks, ropes = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    values = tl.load(latent + token[:, None] * latent_row + ranks, live & (ranks < RANK))
    tl.store(to + ranks, _stored(values, cache.dtype.element_ty), live & (ranks < RANK))
    values = tl.load(k_pe + token[:, None] * rope_row + ropes, live & (ropes < ROPE))
    tl.store(to + RANK + ropes, _stored(values, cache.dtype.element_ty), live & (ropes < ROPE))


def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor, rows_of_one: int) -> None:
    """See the operator; `rows_of_one` tokens a program."""
    count, rank, rope = rows.shape[0], latent.shape[1], k_pe.shape[1]
    if count:
        _insert[(triton.cdiv(count, rows_of_one),)](
            latent, k_pe, kv_cache, rows,
            latent.stride(0), k_pe.stride(0), kv_cache.stride(0), kv_cache.stride(1), count,
            rank, rope, kv_cache.shape[1], triton.next_power_of_2(rank), triton.next_power_of_2(rope), rows_of_one,
            num_warps=min(max(rows_of_one, 1), 4),
        )  # fmt: skip
