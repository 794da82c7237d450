"""MLA cache insertion on CPU by our own kernel, for caches of the activations' dtype."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from k3hal.backends.cpu.native.library import LONG, POINTER, function, supported
from k3hal.dispatch import provides
from k3hal.dispatch.call import Answer, Call, No


@lru_cache(maxsize=1)
def _kernel() -> Any:
    return function("cache", "k3hal_cache_insert", *(POINTER, LONG, LONG) * 3, LONG, POINTER, LONG)


def _supports(call: Call) -> Answer:
    kind = call.dims.get("kv_dtype", call.dtype)
    return supported(call) if kind == call.dtype else No(f"needs kv_dtype {call.dtype}, this is {kind}")


@provides("mla_cache_insert", name="native", priority=60, supports=_supports)
def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
    """See the operator."""
    size = latent.element_size()
    page_stride, row_stride = kv_cache.stride(0) * size, kv_cache.stride(1) * size
    _kernel()(
        latent.data_ptr(), latent.stride(0) * size, latent.shape[1] * size,
        k_pe.data_ptr(), k_pe.stride(0) * size, k_pe.shape[1] * size,
        kv_cache.data_ptr(), page_stride, row_stride, kv_cache.shape[1], rows.data_ptr(), rows.shape[0],
    )  # fmt: skip
