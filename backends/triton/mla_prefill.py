"""MLA prefill with cached context: windows of keys and values expanded from the latents, flash attention over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, cache_supported, kernels
from k3hal.dispatch import provides
from k3hal.dispatch.call import Call

SCRATCH = 1 << 30
# queries and keys of a tile, warps, stages
Shape = tuple[int, int, int, int]
OTHER_TILINGS: Mapping[str, Shape] = {
    "q128_k64_w4": (128, 64, 4, 3),
    "q128_k128": (128, 128, 8, 2),
    "q128_k64_s2": (128, 64, 8, 2),
    "q64_k64": (64, 64, 4, 3),
}
DEFAULT_TILING: Shape = (128, 64, 8, 3)
WIDE_TILING: Shape = (16, 32, 4, 1)
"""For fp32, which no matrix unit multiplies exactly."""


def _tiled(shape: Shape | None = None, scratch: int = SCRATCH) -> Callable[..., Tensor]:
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
        """See the operator."""
        kernel = kernels("mla_prefill")
        tiling = kernel.Tiling(*(shape or (WIDE_TILING if q.element_size() == 4 else DEFAULT_TILING)), scratch)
        return kernel.mla_prefill(q, kv_cache, page_table, cu_seqlens, context_lens, w_uk, w_uv, scale, tiling)

    return mla_prefill


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    # A scratch that holds few positions at once is for memory that is short, and for tests of what passes on.
    little = {"little_scratch": _tiled(scratch=1 << 16)}
    return little if call.dtype == "float32" else {name: _tiled(shape) for name, shape in OTHER_TILINGS.items()}


mla_prefill = provides(
    "mla_prefill", name="expanded", needs=NEEDS, supports=cache_supported, graph_safe=True, tactics=_tactics
)(_tiled())
