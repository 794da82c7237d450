"""MLA cache insertion into caches of the activations' dtype and of fp8."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, cache_supported, kernels
from k3hal.dispatch import provides

OTHER_ROWS = (1, 8)
"""Tokens of a program."""


def _rows_at_once(count: int) -> Callable[..., None]:
    def mla_cache_insert(latent: Tensor, k_pe: Tensor, kv_cache: Tensor, rows: Tensor) -> None:
        """See the operator."""
        kernels("mla_cache_insert").mla_cache_insert(latent, k_pe, kv_cache, rows, count)

    return mla_cache_insert


mla_cache_insert = provides(
    "mla_cache_insert",
    name="fused",
    needs=NEEDS,
    supports=cache_supported,
    graph_safe=True,
    tactics={f"rows{count}": _rows_at_once(count) for count in OTHER_ROWS},
)(_rows_at_once(4))
