"""Absorbed MLA decoding on CPU by our own kernel: each cached row is read once for all heads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3hal.backends.cpu.native.library import FLOAT, INT, LONG, POINTER, function, supported, threads
from k3hal.dispatch import provides
from k3hal.dispatch.call import Answer, Call, No

CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
_NAMES = {str(dtype).removeprefix("torch.") for dtype in CACHE_KINDS}


@lru_cache(maxsize=1)
def _kernel() -> Any:
    cache, table, sizes = (POINTER, LONG, LONG), (POINTER, LONG, POINTER), (LONG,) * 4
    return function("mla", "k3hal_mla_decode", POINTER, *cache, *table, POINTER, *sizes, FLOAT, INT, INT, INT)


def _supports(call: Call) -> Answer:
    kind = call.dims.get("kv_dtype", call.dtype)
    return supported(call) if kind in _NAMES else No(f"needs kv_dtype {'/'.join(sorted(_NAMES))}, this is {kind}")


@provides("mla_decode", name="native", priority=60, supports=_supports)
def mla_decode(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora: int) -> Tensor:
    """See the operator."""
    q = q.contiguous()
    rows, heads, entry = q.shape
    out = torch.empty(rows, heads, kv_lora, dtype=q.dtype)
    _kernel()(
        q.data_ptr(), kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.shape[1],
        page_table.data_ptr(), page_table.stride(0), seq_lens.data_ptr(), out.data_ptr(),
        rows, heads, entry, kv_lora, scale, q.dtype == torch.float32, CACHE_KINDS[kv_cache.dtype], threads(),
    )  # fmt: skip
    return out
